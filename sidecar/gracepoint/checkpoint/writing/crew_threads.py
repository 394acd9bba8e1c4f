"""How many threads a ``WriteCrew`` has, and what they are given to do. There is no state here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from gracepoint.checkpoint.storage.direct_io import Buffer, UnsyncedFile
from gracepoint.checkpoint.storage.storage_path import StoragePath

#: Writers of a save to a file system. There may be more than cores, as writers mostly wait for the disk.
THREADS = 8
#: Writers of a save to an object store, each with a connection. One connection has a small part of the bandwidth.
OBJECT_THREADS = 16
#: Syncers of a save to a file system. They only wait, and the disk syncs the files of all of them at once. Eight were
#: no faster.
SYNCERS = 4


def threads_for(folder: StoragePath) -> int:
    """Returns how many threads write a save, each with a buffer of its own."""
    return THREADS if folder.backend.renames else OBJECT_THREADS


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
