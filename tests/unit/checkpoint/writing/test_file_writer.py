"""The express writer and its direct I/O: real files of every size, on a disk and in memory, and what goes wrong."""

from __future__ import annotations

import errno
import json
import mmap
import os
import re
import resource
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk, Format
from gracepoint.checkpoint.format.records import StoredFile
from gracepoint.checkpoint.memory import ArrayBytes, aligned_empty, bytes_of
from gracepoint.checkpoint.storage.buffers import ALIGNMENT_BYTES, BLOCK_BYTES, Buffer
from gracepoint.checkpoint.storage.locations import local_path, storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checkpoint.writing import chunk_writer as file_writer
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter, FileWriter
from gracepoint.checkpoint.writing.pool import THREADS, Folders, WriteJob
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import assert_same, engine, in_gang, restore, rich_state, save
from tests.unit.checkpoint.fakes.thread_limit import allow_threads
from tests.unit.checkpoint.fakes.watched_buffer import WatchedBuffer
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore

SIZES = (
    *(0, 1, ALIGNMENT_BYTES - 1, ALIGNMENT_BYTES, (1 << 16) + 1, BLOCK_BYTES - 1),
    *(BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 5),
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A folder with direct I/O: the test's own, or one beside the code if the tests' folders are in memory."""
    if local_path(tmp_path).has_direct_io():
        yield tmp_path
        return
    cache = Path(__file__).parents[4] / ".cache"
    cache.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        if not local_path(Path(folder)).has_direct_io():
            pytest.skip(f"neither {tmp_path} nor {cache} is on a file system with direct I/O (O_DIRECT)")
        yield Path(folder)


class Given:
    """Chunks of one leaf with their values."""

    def __init__(self, values: list[npt.NDArray[Any]], *, mine: bool = True) -> None:
        self.values = values
        self.mine = mine
        self.released: list[str] = []

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        for number, values in enumerate(self.values):
            yield Chunk(0, f"w/{number}", ((0, values.size),), mine=self.mine, bytes=values.nbytes), values

    def written(self, chunk: Chunk) -> None:
        self.released.append(chunk.file)


def job(folder: Path | StoragePath, source: Any) -> WriteJob:
    top = folder if isinstance(folder, StoragePath) else storage_path(folder)
    return WriteJob(top, "default", {0: ArraySpec("w", "array", (1,), "|u1", (1,))}, [0], source, {"a/b": b"small"})


def _writers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("gracepoint: writes")}


def soon(timeout_s: float = 30.0) -> Deadline:
    return Deadline.after(timeout_s, time.monotonic)


def as_they_are(values: npt.NDArray[Any]) -> ArrayBytes:
    return ArrayBytes(values, values.dtype)


def random_bytes(size: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(size).integers(0, 256, size, np.uint8)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
    else:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
            yield Path(path)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "page cache"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("past_alignment", [0, 64])
def test_a_file_holds_exactly_what_was_given_and_its_checksum_is_returned(
    folder: Path, past_alignment: int, size: int, direct: bool
) -> None:
    data = aligned_empty((past_alignment + size,), np.dtype(np.uint8), ALIGNMENT_BYTES)[past_alignment:]
    data[:] = random_bytes(size)
    path = folder / "file"
    path.write_bytes(b"longer than that, and in its place" * 100)
    if direct and not local_path(folder).has_direct_io():
        direct = False
    checksum = local_path(path).write_large(as_they_are(data), Buffer(), lambda: None, direct=direct)
    assert path.read_bytes() == data.tobytes()
    assert checksum == zlib.crc32(data.data)


def test_aligned_values_are_written_from_where_they_are(tmp_path: Path) -> None:
    taken = {}
    for past_alignment in (0, 64):
        data = aligned_empty((past_alignment + BLOCK_BYTES,), np.dtype(np.uint8), ALIGNMENT_BYTES)[past_alignment:]
        data[:] = 1
        buffer = WatchedBuffer()
        local_path(tmp_path / "file").write_large(as_they_are(data), buffer, lambda: None, direct=True)
        taken[past_alignment] = buffer.used
    assert taken == {0: False, 64: True}


@pytest.mark.parametrize("limit", [BLOCK_BYTES + 100, BLOCK_BYTES, 5 * ALIGNMENT_BYTES + 1])
def test_file_size_limit_fails_with_the_system_error_and_path(tmp_path: Path, limit: int) -> None:
    path, data = tmp_path / "file", random_bytes(2 * BLOCK_BYTES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match=re.escape(str(path))) as raised:
            local_path(path).write_large(as_they_are(data), Buffer(), lambda: None, direct=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG


def test_large_values_bypass_the_page_cache_where_supported(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: dict[str, int] = {}
    real = os.open

    def noting(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        opened[Path(path).name] = flags
        return real(path, flags, *rest, **named)

    assert not list(disk.iterdir())
    monkeypatch.setattr(os, "open", noting)
    for name, size in (("large", 1 << 20), ("small", 100)):
        local_path(disk / name).write_large(as_they_are(random_bytes(size)), Buffer(), lambda: None, direct=True)
    assert {name: bool(flags & os.O_DIRECT) for name, flags in opened.items()} == {"large": True, "small": False}


def test_a_file_system_in_memory_has_no_direct_io() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        assert not local_path(Path(path)).has_direct_io()
        assert not os.listdir(path)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_the_flag_has_no_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        descriptor = real(path, flags & ~os.O_DIRECT, *rest)
        if flags & os.O_DIRECT:
            os.close(descriptor)  # and the file is there, as Linux leaves it
            raise OSError(number, os.strerror(number), str(path))
        return descriptor

    monkeypatch.setattr(os, "open", refusing)
    assert not local_path(tmp_path).has_direct_io()
    assert not list(tmp_path.iterdir())


def test_a_probe_in_a_folder_that_cannot_be_written_raises(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        local_path(tmp_path / "missing").has_direct_io()


def test_all_files_are_written_and_listed(folder: Path) -> None:
    source = Given([random_bytes(size) for size in SIZES])
    written = FileWriter(WriteOptions()).write(job(folder, source), soon())
    found = {
        str(path.relative_to(folder)): StoredFile(path.stat().st_size, zlib.crc32(path.read_bytes()))
        for path in folder.rglob("*")
        if path.is_file()
    }
    assert written.files == found
    assert set(found) == {"a/b", "default/w/.zarray", *(f"default/w/{n}" for n in range(len(SIZES)))}
    assert json.loads((folder / "default/w/.zarray").read_bytes())["dtype"] == "|u1"
    assert sorted(source.released) == sorted(f"w/{n}" for n in range(len(SIZES)))
    assert written.chunk_bytes == sum(SIZES)


def test_chunks_of_a_store_without_syncs_are_reported_when_written() -> None:
    source = Given([random_bytes(size) for size in (1, 2)])
    FileWriter(WriteOptions()).write(job(FlatPath(FlatStore(), "run/1"), source), soon())
    assert sorted(source.released) == ["w/0", "w/1"]


def test_a_limit_on_bytes_holds_back_chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_begun, two_synced, synced = threading.Event(), threading.Event(), list[StoragePath]()

    def before(operation: str, key: str) -> None:  # small files are under way for as long as the chunk is not begun
        if key.endswith("/w/0"):
            chunk_begun.set()
        assert chunk_begun.wait(60), "the chunk waits for small files"

    def sync(folders: list[StoragePath]) -> None:
        synced.extend(folders)
        if len(synced) == 2:
            two_synced.set()
        assert two_synced.wait(60), "folders are synced one by one"

    store = FlatStore()
    store.before = before
    monkeypatch.setattr(file_writer, "sync_folders", sync)
    given = job(FlatPath(store, "run/1"), Given([random_bytes(1)]))
    written = FileWriter(WriteOptions(write_limit_bytes=1)).write(given, soon(100))
    assert set(written.files) == {"a/b", "default/w/.zarray", "default/w/0"}


def test_one_file_alone_is_written_and_listed(tmp_path: Path) -> None:
    folders = Folders(storage_path(tmp_path), direct=False)
    written = folders.write("a/b", bytes_of(b"words"), Buffer(), lambda: None)
    assert (tmp_path / "a/b").read_bytes() == b"words"
    assert written == StoredFile(5, zlib.crc32(b"words"))


def test_of_another_process_s_chunks_only_checksums_are_taken(tmp_path: Path) -> None:
    source = Given([random_bytes(10)], mine=False)
    written = FileWriter(WriteOptions()).write(job(tmp_path, source), soon())
    assert written.copies == {"default/w/0": zlib.crc32(random_bytes(10).data)}
    assert written.chunk_bytes == 0
    assert not (tmp_path / "default/w/0").exists()
    assert source.released == ["w/0"]


def test_every_file_and_every_folder_is_synced_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[tuple[int, int]] = set()
    real = os.fsync

    def noting(descriptor: int) -> None:
        real(descriptor)
        found = os.fstat(descriptor)
        synced.add((found.st_dev, found.st_ino))

    monkeypatch.setattr(os, "fsync", noting)
    top = tmp_path / "save"
    top.mkdir()
    FileWriter(WriteOptions()).write(job(top, Given([random_bytes(size) for size in SIZES])), soon())
    for path in (tmp_path, top, *top.rglob("*")):
        assert (path.stat().st_dev, path.stat().st_ino) in synced, path


def test_a_folder_that_cannot_be_synced_fails_the_save(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folders: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_writer, "sync_folders", fails)
    with pytest.raises(OSError, match="Input/output error"):
        FileWriter(WriteOptions()).write(job(folder, Given([random_bytes(5)])), soon())


def test_memory_is_reserved_once_and_used_by_every_save(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    anonymous = mmap.mmap

    def noted(descriptor: int, length: int, *rest: Any, **named: Any) -> mmap.mmap:
        if (descriptor, length) == (-1, BLOCK_BYTES):
            made.append(length)
        return anonymous(descriptor, length, *rest, **named)

    monkeypatch.setattr(mmap, "mmap", noted)
    writer = FileWriter(WriteOptions())
    for _ in range(2):
        writer.reserve(storage_path(disk))
    assert len(made) == THREADS
    for number in range(3):
        (disk / str(number)).mkdir()
        writer.write(job(disk / str(number), Given([random_bytes(1 << 20)] * 20)), soon())
    assert len(made) == THREADS
    assert sum(made) <= 64 << 20


@pytest.mark.parametrize("express", [True, False])
def test_memory_is_reserved_only_for_a_writer_that_is_used(
    disk: Path, monkeypatch: pytest.MonkeyPatch, express: bool
) -> None:
    made: list[Buffer] = []

    def make() -> Buffer:
        made.append(Buffer())
        return made[-1]

    monkeypatch.setattr(file_writer, "Buffer", make)
    ChunkWriter(WriteOptions(express=express)).warm(storage_path(disk / "probe"), soon())
    assert len(made) == (THREADS if express else 0)
    assert not list(disk.iterdir())


@pytest.mark.parametrize("express", [True, False])
def test_a_warm_up_writes_with_each_writer_that_a_save_may_use_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, express: bool
) -> None:
    checked, written, store = list[str](), list[tuple[str, bytes]](), FlatStore()
    monkeypatch.setattr(FlatPath, "check_usable", lambda folder: checked.append(folder.key))
    store.after = lambda operation, key: (
        written.append((key, store.objects[key].data)) if operation == "put" and key in store.objects else None
    )
    ChunkWriter(WriteOptions(express=express)).warm(FlatPath(store, "run/warm"), soon())
    assert checked == ["run"]
    assert [data for key, data in written if key == "run/warm/probe/0"] == [bytes(4)] * (2 if express else 1)
    assert {json.loads(data)["shape"][0] for key, data in written if key == "run/warm/probe/.zarray"} == {1}
    assert {key for key, _ in written} == {"run/warm/probe/0", "run/warm/probe/.zarray"}
    assert store.objects == {}


@pytest.mark.parametrize("express", [True, False])
@pytest.mark.parametrize("renames", [True, False])
def test_chunks_are_compressed_where_a_file_does_not_hold_its_values(
    tmp_path: Path, renames: bool, express: bool
) -> None:
    spec = ArraySpec("w", "array", (4096,), "|u1", (4096,), format=Format(zstd_level=1))
    folder = storage_path(tmp_path) if renames else FlatPath(FlatStore(), "run/1")
    given = WriteJob(folder, "default", {0: spec}, [0], Given([np.zeros(4096, np.uint8)]), {})
    written = ChunkWriter(WriteOptions(express=express)).write(given, soon())
    entry = (folder / "default/w/0").entry()
    assert entry is not None
    assert entry.bytes == written.files["default/w/0"].bytes < 100
    assert written.values == {"default/w/0": zlib.crc32(bytes(4096))}


def test_threads_end_with_their_save(tmp_path: Path) -> None:
    before = _writers()
    FileWriter(WriteOptions()).write(job(tmp_path, Given([random_bytes(5)])), soon())
    assert _writers() <= before


@pytest.mark.parametrize("limit_bytes", [None, 1000])
def test_an_error_of_one_file_fails_the_save_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int | None
) -> None:
    def full(descriptor: int, *_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    writer = FileWriter(WriteOptions(write_limit_bytes=limit_bytes))
    monkeypatch.setattr(PosixPath, "has_direct_io", lambda _: True)
    with pytest.raises(OSError, match=r"No space left on device: '.*/(w/\d+|w/\.zarray|a/b)'"):
        writer.write(job(tmp_path, Given([random_bytes(1 << 20)] * 100)), soon())


def test_a_deadline_that_passes_stops_the_threads_between_two_blocks(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock_s = [0.0]
    real, blocks = os.pwrite, []

    def late(descriptor: int, data: Any, offset: int) -> int:
        if len(data) == BLOCK_BYTES:
            blocks.append(offset)
            clock_s[0] = 100.0
        return real(descriptor, data, offset)

    writer = FileWriter(WriteOptions())
    writer.reserve(storage_path(disk))
    monkeypatch.setattr(os, "pwrite", late)
    with pytest.raises(SaveFailed, match=r"only \d+ of \d+ files were written to .* within 50\.0 s"):
        writer.write(job(disk, Given([random_bytes(8 * BLOCK_BYTES)])), Deadline.after(50, lambda: clock_s[0]))
    for thread in threading.enumerate():
        if thread.name.startswith("gracepoint: writes"):
            thread.join(30)
    assert blocks == [0]


def test_a_save_that_is_cancelled_says_so(tmp_path: Path) -> None:
    deadline = soon()

    class Stopped(Given):
        def chunks(self, given: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
            deadline.cancel("the step can be saved instead")
            yield from super().chunks(given)

    with pytest.raises(SaveFailed, match="before it was stopped: the step can be saved instead"):
        FileWriter(WriteOptions()).write(job(tmp_path, Stopped([random_bytes(10)])), deadline)


def test_a_save_that_is_cancelled_waits_for_no_write_and_begins_none(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, goes_on = os.pwrite, threading.Semaphore(0), threading.Event()
    blocks: list[int] = []

    def held(descriptor: int, data: Any, offset: int) -> int:
        blocks.append(offset)
        begun.release()
        assert goes_on.wait(30)
        return real(descriptor, data, offset)

    writer, deadline, outcome = FileWriter(WriteOptions()), soon(), []
    writer.reserve(storage_path(disk))
    monkeypatch.setattr(os, "pwrite", held)

    def save() -> None:
        with pytest.raises(SaveFailed, match="the step can be saved instead") as raised:
            writer.write(job(disk, Given([random_bytes(2 * BLOCK_BYTES)] * 20)), deadline)
        outcome.append(raised.value)

    saving = threading.Thread(target=save)
    saving.start()
    for _ in range(THREADS):
        assert begun.acquire(timeout=30)
    deadline.cancel("the step can be saved instead")
    saving.join(30)
    assert len(outcome) == 1, "it waited for the storage"
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("gracepoint: writes"):
            thread.join(30)
            assert not thread.is_alive()
    assert len(blocks) == THREADS


@pytest.mark.parametrize("allowed", [0, 2])
def test_a_save_is_written_by_as_many_threads_as_the_system_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: int
) -> None:
    before = _writers()
    allow_threads(monkeypatch, allowed, name="gracepoint: writes")
    given = job(tmp_path, Given([random_bytes(size) for size in SIZES]))
    written = FileWriter(WriteOptions()).write(given, soon())
    assert len(written.files) == len(SIZES) + 2
    assert f"in {allowed} threads and not {THREADS}: can't start new thread" in caplog.text
    assert _writers() <= before


def test_an_error_of_the_source_ends_the_threads(tmp_path: Path) -> None:
    class Failing(Given):
        def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
            yield from super().chunks(deadline)
            raise ValueError("the device is gone")

    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="the device is gone"):
        FileWriter(WriteOptions()).write(job(tmp_path, Failing([random_bytes(1 << 20)] * 20)), soon())
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize("processes", [1, 3])
def test_both_writers_make_the_same_files(tmp_path: Path, processes: int) -> None:
    state = {**rich_state(), "large": np.arange(1 << 18, dtype=np.float32), "odd": jnp.arange(100_003, dtype=jnp.int8)}
    found = []
    for express in (True, False):
        root = tmp_path / str(express)

        def run(gang: ProcessGroup, root: Path = root, express: bool = express) -> None:
            save(engine(root, gang, options=WriteOptions(express=express)), 1, state)

        in_gang(processes, run)
        item = root / "1" / "default"
        found.append({str(path.relative_to(item)): path.read_bytes() for path in item.rglob("*") if path.is_file()})
        restored = restore(root, state)
        assert restored is not None
        assert_same(restored.state, state)
    for files in found:
        del files["commit_success.txt"]  # has the path
    assert found[0] == found[1]
