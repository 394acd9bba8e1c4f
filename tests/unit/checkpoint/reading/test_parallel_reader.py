"""Reading in parallel: each chunk once, within a bound on memory, checked as a whole, and over in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
import pytest
import tensorstore as ts

from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.memory import aligned_empty
from gracepoint.checkpoint.options import ArrayRestoreArgs, RestoreOptions, WriteOptions
from gracepoint.checkpoint.reading import parallel_reader, stored_arrays
from gracepoint.checkpoint.reading.parallel_reader import CONCURRENT_READS, ReadRequest, Values, read_all
from gracepoint.checkpoint.reading.stored_arrays import touched
from gracepoint.checkpoint.restoring.restore_tree import read_tree
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointError
from tests.unit.checkpoint.fakes.engine import chunk_files, engine, flip_bit, save, sharding
from tests.unit.checkpoint.fakes.thread_limit import allow_threads

Box = tuple[tuple[int, int], ...]


def soon() -> Deadline:
    return Deadline.after(60, time.monotonic)


class FakeArrays:
    """Arrays whose values are their positions, in chunks; notes what is read."""

    def __init__(self, shape: Sequence[int], chunk: Sequence[int]) -> None:
        self._shape, self._chunk = tuple(shape), tuple(chunk)
        self.values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        self.read_pieces: list[tuple[str, Index]] = []

    def pieces(self, name: str, boxes: Sequence[Index]) -> list[list[Index]]:
        return [touched(box, self._shape, self._chunk) for box in boxes]

    def extra_bytes(self, name: str, piece: Index) -> int:
        return 0

    def read(self, name: str, piece: Index, out: npt.NDArray[Any], deadline: Deadline) -> None:
        self.read_pieces.append((name, piece))
        out[...] = self.values[tuple(slice(*part) for part in piece)]

    def request(self, name: str, regions: Sequence[Box], into: dict[Box, Any]) -> ReadRequest:
        return ReadRequest(name, self._shape, np.dtype(np.int32), tuple(regions), into.update)


def expected(values: npt.NDArray[Any], region: Box) -> npt.NDArray[Any]:
    """What a region holds: zeros where the array has ended."""
    part = values[tuple(slice(*axis) for axis in region)]
    return np.pad(part, [(0, stop - start - size) for (start, stop), size in zip(region, part.shape, strict=True)])


REGIONS: dict[str, list[Box]] = {
    "the chunks themselves": [((0, 4), (0, 4)), ((0, 4), (4, 8)), ((4, 8), (0, 4)), ((4, 8), (4, 8))],
    "rows of chunks": [((0, 4), (0, 8)), ((4, 8), (0, 8))],
    "thirds that share chunks": [((0, 3), (0, 8)), ((3, 6), (0, 8)), ((6, 8), (0, 8))],
    "columns that share chunks": [((0, 8), (0, 2)), ((0, 8), (2, 4)), ((0, 8), (4, 6)), ((0, 8), (6, 8))],
    "the whole": [((0, 8), (0, 8))],
    "one part": [((5, 7), (3, 6))],
    "more than there is": [((0, 6), (0, 10)), ((6, 12), (0, 10))],
    "all behind the end": [((8, 12), (0, 8))],
    "nothing": [((0, 0), (0, 8))],
}


@pytest.mark.parametrize("regions", REGIONS.values(), ids=REGIONS)
def test_regions_have_their_values_and_no_piece_is_read_twice(regions: list[Box]) -> None:
    source, found = FakeArrays((8, 8), (4, 4)), dict[Box, Any]()
    total_bytes = read_all([source.request("w", regions, found)], source, limit_bytes=None, deadline=soon())
    assert found.keys() == set(regions)
    for region, values in found.items():
        np.testing.assert_array_equal(values, expected(source.values, region))
    assert len(source.read_pieces) == len(set(source.read_pieces))
    assert total_bytes == sum(values.nbytes for values in found.values())


def test_an_array_without_axes_is_one_piece() -> None:
    source, found = FakeArrays((), ()), dict[Box, Any]()
    read_all([source.request("w", [()], found)], source, limit_bytes=None, deadline=soon())
    assert found[()] == source.values


@pytest.mark.parametrize(("together_bytes", "deliveries"), [(8 * 8 * 4, 1), (8 * 8 * 4 - 1, 4)])
def test_small_array_is_delivered_at_once_and_a_larger_one_by_region(together_bytes: int, deliveries: int) -> None:
    source, delivered = FakeArrays((8, 8), (4, 4)), list[Values]()
    request = ReadRequest("w", (8, 8), np.dtype(np.int32), tuple(REGIONS["the chunks themselves"]), delivered.append)
    read_all([request], source, limit_bytes=None, deadline=soon(), together_bytes=together_bytes)
    assert len(delivered) == deliveries
    assert sorted(region for values in delivered for region in values) == sorted(request.regions)


def test_values_are_delivered_in_the_requested_type_by_the_requesting_thread() -> None:
    source, found = FakeArrays((8, 8), (4, 4)), list[tuple[threading.Thread, np.dtype[Any]]]()

    def deliver(values: Values) -> None:
        found.extend((threading.current_thread(), part.dtype) for part in values.values())

    request = ReadRequest("w", (8, 8), np.dtype(np.int32), (((0, 8), (0, 8)),), deliver, np.dtype(np.float16))
    read_all([request], source, limit_bytes=None, deadline=soon())
    assert found == [(threading.current_thread(), np.dtype(np.float16))]


def test_all_reads_are_in_progress_at_once() -> None:
    source = FakeArrays((CONCURRENT_READS << 18,), (1 << 18,))  # pieces of 1 MiB, which are not put together
    meeting = threading.Barrier(CONCURRENT_READS, timeout=60)
    source.read = lambda *_: meeting.wait()  # type: ignore[method-assign, assignment]
    regions = [((i << 18, (i + 1) << 18),) for i in range(CONCURRENT_READS)]
    read_all([source.request("w", regions, {})], source, limit_bytes=None, deadline=soon())


@pytest.mark.parametrize("chunk_rows", [1, 4, 16])
def test_the_memory_of_regions_stays_below_the_bound(monkeypatch: pytest.MonkeyPatch, chunk_rows: int) -> None:
    in_use, most, lock = 0, 0, threading.Lock()

    def noted(shape: Sequence[int], dtype: Any) -> Any:
        nonlocal in_use, most
        memory = aligned_empty(shape, dtype)
        with lock:
            in_use += memory.nbytes
            most = max(most, in_use)
        return memory

    def deliver(values: Values) -> None:
        nonlocal in_use
        with lock:
            in_use -= sum(part.nbytes for part in values.values())

    monkeypatch.setattr(parallel_reader, "aligned_empty", noted)
    source = FakeArrays((16, 1024), (chunk_rows, 1024))  # 64 KiB
    regions = tuple(((row, row + 4), (0, 1024)) for row in range(0, 16, 4))
    requests = [ReadRequest(f"w{i}", (16, 1024), np.dtype(np.int32), regions, deliver) for i in range(32)]
    limit_bytes = 40 << 10 if chunk_rows < 16 else 200 << 10  # there four regions share a chunk, and are one group
    total_bytes = read_all(requests, source, limit_bytes=limit_bytes, deadline=soon())
    assert total_bytes == 32 * (64 << 10)
    assert 0 < most <= limit_bytes
    assert in_use == 0


def test_what_is_larger_than_the_bound_is_read_alone() -> None:
    source, found = FakeArrays((64, 64), (64, 64)), [dict[Box, Any]() for _ in range(3)]
    requests = [source.request(f"w{i}", [((0, 64), (0, 64))], into) for i, into in enumerate(found)]
    read_all(requests, source, limit_bytes=1, deadline=soon())
    assert all(len(into) == 1 for into in found)


@pytest.mark.parametrize("limit_bytes", [None, 1], ids=["unbounded", "one after the other"])
@pytest.mark.parametrize("first", [0, 1, 3, 4])
def test_what_comes_first_is_handed_on_while_others_are_read(first: int, limit_bytes: int | None) -> None:
    source, found = FakeArrays((8, 8), (8, 8)), [dict[Box, Any]() for _ in range(4)]
    handed_on, seen = threading.Event(), list[list[bool]]()
    real = source.read

    def read(name: str, *rest: Any) -> None:
        assert int(name) < first or handed_on.wait(60)
        real(name, *rest)

    def then() -> None:
        seen.append([bool(into) for into in found])
        handed_on.set()

    source.read = read  # type: ignore[method-assign, assignment]
    requests = [source.request(str(i), [((0, 8), (0, 8))], into) for i, into in enumerate(found)]
    read_all(requests, source, limit_bytes=limit_bytes, deadline=soon(), first=first, then=then)
    assert seen == [[i < first for i in range(4)]]
    assert all(found)


def test_an_error_of_handing_on_ends_the_reading() -> None:
    source = FakeArrays((8, 8), (8, 8))

    def then() -> None:
        raise CheckpointError("another process has failed")

    with pytest.raises(CheckpointError, match="another process has failed"):
        read_all([source.request("w", [((0, 8), (0, 8))], {})], source, limit_bytes=None, deadline=soon(), then=then)


def test_after_damage_nothing_more_is_begun_and_it_is_what_is_raised() -> None:
    source, memory_is_short = FakeArrays((64, 1), (1, 1)), threading.Event()
    pieces = source.pieces

    def noted(name: str, boxes: Sequence[Index]) -> list[list[Index]]:
        if name == "w4":  # four fit into the bound
            memory_is_short.set()
        return pieces(name, boxes)

    def read(name: str, piece: Index, *_: Any) -> None:
        assert memory_is_short.wait(60)
        source.read_pieces.append((name, piece))
        raise CheckpointCorrupt(f"{name} is damaged")

    source.pieces, source.read = noted, read  # type: ignore[method-assign, assignment]
    requests = [source.request(f"w{i}", [((0, 64), (0, 1))], {}) for i in range(50)]
    with pytest.raises(CheckpointCorrupt, match=r"w\d+ is damaged"):
        read_all(requests, source, limit_bytes=1 << 10, deadline=soon())
    assert len(source.read_pieces) <= CONCURRENT_READS


@pytest.mark.parametrize("limit_bytes", [None, 1], ids=["unbounded", "one after the other"])
@pytest.mark.parametrize("allowed", [0, 1])
def test_a_restore_reads_in_as_many_threads_as_the_system_allows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, allowed: int, limit_bytes: int | None
) -> None:
    allow_threads(monkeypatch, allowed, name="gracepoint: reading")
    source, found = FakeArrays((8, 8), (4, 4)), [dict[Box, Any]() for _ in range(3)]
    handed_on = []
    requests = [source.request(str(i), REGIONS["rows of chunks"], into) for i, into in enumerate(found)]
    read_all(
        requests,
        source,
        limit_bytes=limit_bytes,
        deadline=soon(),
        first=1,
        then=lambda: handed_on.append(len(found)),
        job_bytes=1,
    )
    for into in found:
        assert into.keys() == set(REGIONS["rows of chunks"])
        for region, values in into.items():
            np.testing.assert_array_equal(values, expected(source.values, region))
    assert handed_on == [3]
    assert caplog.text.count(f"in {allowed} threads and not {CONCURRENT_READS}: can't start new thread") == 1


def test_damage_is_raised_also_if_the_system_allows_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    allow_threads(monkeypatch, 0, name="gracepoint: reading")
    source = FakeArrays((64, 1), (1, 1))

    def read(name: str, piece: Index, *_: Any) -> None:
        source.read_pieces.append((name, piece))
        raise CheckpointCorrupt(f"{name} is damaged")

    source.read = read  # type: ignore[method-assign, assignment]
    requests = [source.request(f"w{i}", [((0, 64), (0, 1))], {}) for i in range(5)]
    with pytest.raises(CheckpointCorrupt, match="w0 is damaged"):
        read_all(requests, source, limit_bytes=None, deadline=soon())
    assert len(source.read_pieces) == 1


def test_storage_that_hangs_ends_with_the_deadline_and_the_leaf_s_name() -> None:
    source, released = FakeArrays((4,), (4,)), threading.Event()
    source.read = lambda *_: released.wait(60)  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(TimeoutError, match="leaf 'slow'"):
            read_all(
                [source.request("slow", [((0, 4),)], {})],
                source,
                limit_bytes=None,
                deadline=Deadline.after(0.1, time.monotonic),
            )
    finally:
        released.set()


def test_a_restore_out_of_time_says_which_leaf_and_how_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(engine(tmp_path), 1, {"w": np.ones(4)})

    def late(*_: Any) -> None:
        raise TimeoutError

    monkeypatch.setattr(stored_arrays, "read_checked", lambda path, *_: late() if path.parent.name == "w" else None)
    with pytest.raises(CheckpointError, match=r"1: leaf 'w' was not read within 7\.0 s"):
        read_tree(storage_path(tmp_path / "1"), {"w": np.ones(4)}, deadline=Deadline.after(7.0, time.monotonic))


# --- real files

W = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
FORMATS = {
    "raw files": WriteOptions(use_ocdbt=False),
    "raw zarr3 files": WriteOptions(use_ocdbt=False, use_zarr3=True),
    "compressed files": WriteOptions(use_ocdbt=False, compression="zstd"),
    "compressed zarr3 files": WriteOptions(use_ocdbt=False, use_zarr3=True, compression="zstd"),
    "OCDBT": WriteOptions(use_ocdbt=True),
    "compressed zarr3 in OCDBT": WriteOptions(use_ocdbt=True, use_zarr3=True, compression="zstd"),
}
TARGETS = {"the same": ("x", "y"), "rows": (("x", "y"),), "columns": (None, ("x", "y")), "all everywhere": ()}


def state() -> dict[str, Any]:
    return {
        "w": jax.device_put(W, sharding("x", "y")),
        "one": jax.device_put(W + 1, jax.devices()[0]),
        "half": jax.device_put(W.astype(jax.numpy.bfloat16), sharding("y")),
    }


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_each_format_is_restored_into_each_sharding(tmp_path: Path, options: WriteOptions) -> None:
    save(engine(tmp_path, options=options), 1, state())
    for spec in TARGETS.values():
        like = {
            name: jax.ShapeDtypeStruct((64, 64), leaf.dtype, sharding=sharding(*spec)) for name, leaf in state().items()
        }
        for limit_bytes in (None, 1 << 13):
            found = read_tree(
                storage_path(tmp_path / "1"), like, options=RestoreOptions(limit_bytes=limit_bytes), deadline=soon()
            )
            np.testing.assert_array_equal(found["w"], W)
            np.testing.assert_array_equal(found["one"], W + 1)
            np.testing.assert_array_equal(found["half"], W.astype(jax.numpy.bfloat16))
            assert all(leaf.sharding == sharding(*spec) for leaf in found.values())


@pytest.mark.parametrize("name", FORMATS)
def test_damage_in_a_part_of_a_chunk_that_nobody_needs_is_found(tmp_path: Path, name: str) -> None:
    save(engine(tmp_path, options=FORMATS[name]), 1, {"w": W, "count": 1})
    item = tmp_path / "1" / "default"
    holder = item / "ocdbt.process_0" / "d" if "OCDBT" in name else item / "w"
    files = [path for path in holder.rglob("*") if path.is_file() and path.name not in (".zarray", "zarr.json")]
    flip_bit(max(files, key=lambda path: path.stat().st_size))  # in the middle
    part = {"w": ArrayRestoreArgs(sharding=sharding(), shape=(2, 64), strict=False)}
    like = {"w": jax.ShapeDtypeStruct((64, 64), np.float32), "count": ...}
    with pytest.raises(CheckpointCorrupt, match="/w/|leaf 'w'"):
        read_tree(storage_path(tmp_path / "1"), like, part, deadline=soon())


def test_a_cut_file_of_an_ocdbt_tree_is_found(tmp_path: Path) -> None:
    save(engine(tmp_path, options=FORMATS["OCDBT"]), 1, {"w": W})
    largest = max((tmp_path / "1" / "default").glob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(CheckpointCorrupt, match="has .* bytes, expected"):
        read_tree(storage_path(tmp_path / "1"), {"w": W}, deadline=soon())


def test_tensorstore_reads_no_chunk_twice_either(tmp_path: Path) -> None:
    # Whatever wrote it: a sharding that cuts through chunks must not cost their bytes again for each device.
    store = ts.open(
        {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": f"{tmp_path}/w/"},
            "metadata": {"shape": [64, 64], "chunks": [32, 32], "dtype": "<f4", "compressor": None},
            "create": True,
        }
    ).result()
    store.write(W).result()
    arrays = stored_arrays.StoredArrays(storage_path(tmp_path), {"w": store})
    regions: list[Box] = [((row, row + 16), (0, 64)) for row in range(0, 64, 16)]
    found: dict[Box, Any] = {}
    before = _bytes_read()
    read_all(
        [ReadRequest("w", (64, 64), np.dtype(np.float32), tuple(regions), found.update)],
        arrays,
        limit_bytes=None,
        deadline=soon(),
    )
    assert _bytes_read() - before == W.nbytes
    for region, values in found.items():
        np.testing.assert_array_equal(values, expected(W, region))


def _bytes_read() -> int:
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(int(value["value"]) for metric in metrics for value in metric["values"])


def test_one_damaged_chunk_of_many_is_named(tmp_path: Path) -> None:
    save(engine(tmp_path, options=FORMATS["raw files"]), 1, state())
    flip_bit(chunk_files(tmp_path, 1, "w")[2])
    with pytest.raises(CheckpointCorrupt, match=r"default/w/1\.0: its contents do not fit its checksum"):
        read_tree(storage_path(tmp_path / "1"), state(), deadline=soon())
