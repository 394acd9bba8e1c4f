"""How many threads a ``WritePool`` has, and what they are given to do. This module has no state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gracepoint import machine
from gracepoint.checkpoint.storage.direct_io import Buffer, UnsyncedFile
from gracepoint.checkpoint.storage.storage_path import StoragePath

#: Writers of a save to a file system. There may be more than cores, as writers mostly wait for the disk.
THREADS = 8
#: Writers of a save to an object store, each with a connection. One connection has a small part of the bandwidth.
OBJECT_THREADS = 16
#: Syncers of a save to a file system. They only wait, and the disk syncs the files of all of them at once. Eight were
#: no faster.
SYNCERS = 4


@dataclasses.dataclass(frozen=True)
class PoolSize:
    """How many threads a pool has.

    Attributes:
        writers: Each has a buffer of its own.
        syncers: 0 if the store does not sync.
    """

    writers: int
    syncers: int


def size_for(folder: StoragePath) -> PoolSize:
    """Returns how many threads write a save as fast as they can."""
    return PoolSize(THREADS, SYNCERS) if folder.backend.renames else PoolSize(OBJECT_THREADS, 0)


def size_beside_training(cores: int | None = None) -> PoolSize:
    """Returns how many threads write a save to a file system that nobody waits for.

    On two cores, each thread beyond two slowed the training step down: by 16% with eight writers and four syncers, and
    by 0.4% with two writers and one syncer (``python -m benchmarks.async_calls``; docs/benchmarks.md).

    Args:
        cores: How many cores there are. None: as many as this process can use.
    """
    cores = machine.available_cores() if cores is None else cores
    return PoolSize(min(THREADS, max(2, cores)), min(SYNCERS, max(1, cores // 2)))


@dataclasses.dataclass(frozen=True)
class Finish:
    """What is left to do of a file that is written.

    Attributes:
        file: The file. It must be synced or dropped.
        then: Called after the sync.
    """

    file: UnsyncedFile
    then: Callable[[], None]


#: Writes something with the thread's buffer. Returns what is left to do; None: nothing.
Act = Callable[[Buffer], Finish | None]
