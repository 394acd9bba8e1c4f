"""Threads of a save stop between two blocks of bytes: when others take over, and when the save is stopped."""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk
from gracepoint.checkpoint.format.records import StoredFile
from gracepoint.checkpoint.storage import buffers, posix
from gracepoint.checkpoint.storage.buffers import BLOCK_BYTES
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.writing import chunk_writer
from gracepoint.checkpoint.writing.chunk_writer import FileWriter
from gracepoint.checkpoint.writing.pool import THREADS, IdlePriority, WriteJob
from gracepoint.checksum import crc32
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from tests.waiting import until

_TIMEOUT_S = 60.0


class Numbered:
    """Chunks of one leaf, named by their numbers."""

    def __init__(self, values: list[npt.NDArray[Any]], *, mine: bool) -> None:
        self._values = values
        self._mine = mine
        self.released: list[str] = []

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        for number, values in enumerate(self._values):
            yield Chunk(0, f"w/{number}", ((0, 1),), mine=self._mine, bytes=values.nbytes), values

    def written(self, chunk: Chunk) -> None:
        self.released.append(chunk.file)

    def job(self, folder: Path, is_urgent: Callable[[], bool] | None = None) -> WriteJob:
        specs = {0: ArraySpec("w", "array", (1,), "|u1", (1,))}
        return WriteJob(storage_path(folder), "default", specs, [], self, {}, is_urgent=is_urgent)


def nobody_writes() -> bool:
    return not any(thread.name.startswith("gracepoint: writes") for thread in threading.enumerate())


def test_files_that_new_threads_take_over_are_whole_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urgent, blocks = threading.Event(), list[int]()
    ways: list[IdlePriority] = []

    def interrupted(block: Any, checksum: int) -> int:
        if os.sched_getscheduler(0) == os.SCHED_IDLE:
            blocks.append(len(block))
            urgent.set()
            until(lambda: ways[0].must_end(), "other threads to take over")
        return crc32(block, checksum)

    def noted(is_urgent: Callable[[], bool]) -> IdlePriority:
        ways.append(IdlePriority(is_urgent))
        return ways[0]

    monkeypatch.setattr(chunk_writer, "IdlePriority", noted)
    monkeypatch.setattr(posix, "crc32", interrupted)
    values = [np.random.default_rng(n).integers(0, 256, 2 * BLOCK_BYTES + 5, np.uint8) for n in range(THREADS + 4)]
    source = Numbered(values, mine=True)
    written = FileWriter(WriteOptions()).write(
        source.job(tmp_path, urgent.is_set), Deadline.after(2 * _TIMEOUT_S, time.monotonic)
    )
    assert 0 < sum(blocks) <= THREADS * BLOCK_BYTES, "each thread that gives way ends after the block that it is at"
    assert sorted(source.released) == sorted(f"w/{n}" for n in range(len(values)))
    for number, data in enumerate(values):
        assert (tmp_path / "default" / "w" / str(number)).read_bytes() == data.tobytes()
        assert written.files[f"default/w/{number}"] == StoredFile(data.nbytes, zlib.crc32(data.data))


def test_a_save_that_is_stopped_takes_no_more_of_a_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deadline, blocks = Deadline.after(_TIMEOUT_S, time.monotonic), list[int]()

    def stops(block: Any, checksum: int) -> int:
        blocks.append(len(block))
        deadline.cancel("the job is told to stop")
        return crc32(block, checksum)

    monkeypatch.setattr(buffers, "crc32", stops)
    source = Numbered([np.zeros(4 * BLOCK_BYTES, np.uint8)], mine=False)
    with pytest.raises(SaveFailed, match="the job is told to stop"):
        FileWriter(WriteOptions()).write(source.job(tmp_path), deadline)
    until(nobody_writes, "the threads to end")
    assert blocks == [BLOCK_BYTES]
