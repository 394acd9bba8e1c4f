"""What ``benchmarks.emergency_save`` compares: Gracepoint's two writers, Orbax's two ways, and the machine's limits.

Each saves one state at once, with nothing else to do: as after a notice, at the agreed point.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks import checkpoint_engines
from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.groups import JoinedGroup
from gracepoint.checkpoint.saving.planner import SavePlanner, SaveSettings
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.buffers import ALIGNMENT_BYTES, BLOCK_BYTES, Buffer
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.deadline import Deadline

EXPRESS = "express writer"
TENSORSTORE = "TensorStore writer"
ORBAX = checkpoint_engines.ORBAX
ORBAX_PLAIN = checkpoint_engines.ORBAX_PLAIN
WRITE_LIMIT = "writing the same bytes"
MEMCPY = "memcpy"

_TIMEOUT_S = 300.0
_LIMIT_THREADS = 2


class Saves(Protocol):
    """One way of saving."""

    def prepare(self, state: Any) -> None:
        """Does what comes before training."""

    def save(self, step: int, state: Any) -> Path:
        """Returns what is to be deleted afterwards, once all is on the disk, in all processes or in this one."""

    def close(self) -> None:
        """Ends it."""


class Gracepoint:
    """An emergency save as the session makes it; there are no background saves.

    Attributes:
        on_stage: Called with the name of each stage of a save.
    """

    def __init__(self, root: Path, joined: JoinedGroup, *, express: bool) -> None:
        self._root = root
        self.on_stage: Callable[[str], None] = lambda stage: None
        self._checkpointer = StepCheckpointer(
            Layout(storage_path(root)),
            gang=joined.gang,
            attempt=joined.attempt,
            retention=Retention(keep_last=1_000_000),
            settings=SaveSettings(WriteOptions(express=express), processes=joined.processes),
        )

    def prepare(self, state: Any) -> None:
        self._checkpointer.prepare(state, in_background=False)

    def save(self, step: int, state: Any) -> Path:
        self._checkpointer.save(
            step, state, {}, deadline=Deadline.after(_TIMEOUT_S, time.monotonic), on_stage=self.on_stage
        )
        return self._root / str(step)

    def close(self) -> None:
        self._checkpointer.close(_TIMEOUT_S)


class Orbax:
    """Orbax's ``AsyncCheckpointer``, waited for."""

    def __init__(self, root: Path, *, use_compression: bool) -> None:
        self._engine = checkpoint_engines.Orbax(root, use_compression=use_compression)

    def prepare(self, state: Any) -> None:
        self._engine.prepare(state)

    def save(self, step: int, state: Any) -> Path:
        self._engine.save(step, state)
        self._engine.wait()
        return self._engine.folder(step)

    def close(self) -> None:
        self._engine.close()


class WriteLimit:
    """As many bytes as this process writes, from one block of touched memory into one file, synced.

    Past the page cache where the file system lets it; two threads, each its half of the file.
    """

    def __init__(self, root: Path, joined: JoinedGroup) -> None:
        self._root = root
        self._joined = joined
        self._buffers = [Buffer() for _ in range(_LIMIT_THREADS)]
        self._bytes = 0

    def prepare(self, state: Any) -> None:
        self._bytes = mine_bytes(state, self._joined)
        self._flag = os.O_DIRECT if PosixPath(str(self._root)).has_direct_io() else 0

    def save(self, step: int, state: Any) -> Path:
        path = self._root / f"{step}.{self._joined.gang.process_index}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | self._flag, 0o644)
        blocks = self._bytes // BLOCK_BYTES
        rest_bytes = self._bytes % BLOCK_BYTES // ALIGNMENT_BYTES * ALIGNMENT_BYTES

        def write(which: int) -> None:
            for block in range(which, blocks, _LIMIT_THREADS):
                os.pwrite(descriptor, self._buffers[which].bytes.data, block * BLOCK_BYTES)
            if which == 0 and rest_bytes:
                os.pwrite(descriptor, self._buffers[0].bytes[:rest_bytes].data, blocks * BLOCK_BYTES)

        in_threads(write)
        os.fsync(descriptor)
        os.close(descriptor)
        return path

    def close(self) -> None:
        self._buffers = []


class Memcpy:
    """Copies as many bytes as this process writes into touched memory, block by block."""

    def __init__(self, joined: JoinedGroup) -> None:
        self._joined = joined
        self._buffers = [Buffer() for _ in range(_LIMIT_THREADS)]

    def prepare(self, state: Any) -> None:
        self._source = np.zeros(mine_bytes(state, self._joined), np.uint8)
        self._source.fill(1)

    def save(self, step: int, state: Any) -> Path:
        def copy(which: int) -> None:
            for start in range(which * BLOCK_BYTES, len(self._source), _LIMIT_THREADS * BLOCK_BYTES):
                part = self._source[start : start + BLOCK_BYTES]
                np.copyto(self._buffers[which].bytes[: len(part)], part)

        in_threads(copy)
        return Path(os.devnull)

    def close(self) -> None:
        self._buffers = []


def make(name: str, root: Path, joined: JoinedGroup) -> Saves:
    """Returns the way of saving of that name below ``root``; the folder exists."""
    match name:
        case "express writer":
            return Gracepoint(root, joined, express=True)
        case "TensorStore writer":
            return Gracepoint(root, joined, express=False)
        case "writing the same bytes":
            return WriteLimit(root, joined)
        case "memcpy":
            return Memcpy(joined)
    return Orbax(root, use_compression=name == ORBAX)


def mine_bytes(state: Any, joined: JoinedGroup) -> int:
    """Returns how many bytes this process writes of ``state``."""
    planner = SavePlanner(joined.gang, joined.attempt, SaveSettings(processes=joined.processes))
    return sum(chunk.bytes for chunk in planner.plan(state)[1].plan.chunks if chunk.mine)


def in_threads(act: Callable[[int], None]) -> None:
    """Calls ``act`` in a few threads at once."""
    threads = [threading.Thread(target=act, args=(which,)) for which in range(_LIMIT_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
