"""Reads many small files at once. On network storage each file takes a round trip or more, and little bandwidth.

The calling thread and additional threads read. Each takes the next path that no thread has taken. The additional
threads end with the call. They are daemons: if storage hangs, the process can still exit. If the system starts no more
threads, as when the interpreter is about to end, the threads that exist read all files.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence

from gracepoint.checkpoint.storage import time_limit
from gracepoint.checkpoint.storage.storage_path import StoragePath

logger = logging.getLogger(__name__)

#: Files that are read at once. There may be many threads, as they only wait for the storage.
CONCURRENT_READS = 32


def read_all(paths: Sequence[StoragePath]) -> list[bytes] | None:
    """Returns the contents of all files in order. None if a file is missing; then no further reads are started.

    Raises:
        OSError: A file cannot be read.
    """
    work = _Work(paths, skip_missing=False)
    _read(work, len(paths))
    return None if work.missing else [work.found[position] for position in range(len(paths))]


def read_existing(paths: Sequence[StoragePath]) -> dict[StoragePath, bytes]:
    """Returns the contents of the files that exist, by path.

    Raises:
        OSError: A file cannot be read.
    """
    work = _Work(paths, skip_missing=True)
    _read(work, len(paths))
    return {paths[position]: data for position, data in work.found.items()}


def _read(work: _Work, count: int) -> None:
    limit = time_limit.current()

    def help_() -> None:
        with time_limit.ended_by(limit):
            work.run()

    helpers = []
    for number in range(1, min(count, CONCURRENT_READS)):
        helper = threading.Thread(target=help_, name=f"gracepoint: reads {number}", daemon=True)
        try:
            helper.start()
        except RuntimeError as error:
            logger.debug("%d threads read small files: %s", number, error)
            break
        helpers.append(helper)
    work.run()
    # Each helper ends with the file that it reads. In an object store the read ends with its timeout or with the limit.
    # In a file system it ends when the kernel returns: it has no other bound, in this thread either.
    for helper in helpers:
        helper.join()
    if work.error is not None:
        raise work.error


class _Work:
    """The paths to read, and the results. The threads share it without a lock.

    ``found`` has a separate entry for each path. ``missing`` and ``error`` are set and never reset, and end the work.
    With ``skip_missing``, a missing file has no entry, and the work goes on.
    """

    def __init__(self, paths: Sequence[StoragePath], *, skip_missing: bool) -> None:
        self._paths = paths
        self._skip_missing = skip_missing
        self._next = itertools.count()  # each call takes one number, in any thread
        self.found: dict[int, bytes] = {}
        self.missing = False
        self.error: BaseException | None = None

    def run(self) -> None:
        while not self.missing and self.error is None and (position := next(self._next)) < len(self._paths):
            try:
                self.found[position] = self._paths[position].read_bytes()
            except FileNotFoundError:
                self.missing = not self._skip_missing
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                self.error = error
