"""How many threads write a save, and how they are started. There is no state here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gracepoint.checkpoint.storage.storage_path import StoragePath

logger = logging.getLogger(__name__)

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


def start_threads(threads: list[threading.Thread], wanted: int, run: Callable[[], None], what: str) -> bool:
    """Starts threads, and adds them to ``threads``. Returns False if the system does not allow all of them.

    Args:
        threads: Where the threads are added.
        wanted: How many are started.
        run: What each of them runs.
        what: What they do, for their names.
    """
    for number in range(wanted):
        thread = threading.Thread(target=run, name=f"gracepoint: {what} {number}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # a limit on threads, or no memory for their stacks
            logger.warning("a save %s files in %d threads and not %d: %s", what, number, wanted, error)
            return False
        threads.append(thread)
    return True
