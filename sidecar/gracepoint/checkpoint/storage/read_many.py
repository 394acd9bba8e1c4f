"""Reads many small files at once: on network storage each takes a round trip or more, and no bandwidth.

The calling thread reads, and helpers that end with the call do, too: each takes the next path that nobody has taken.
They are daemons, as storage that hangs must keep no process from ending. Where the system gives no thread, as at the
end of the interpreter, those that there are read it all.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Sequence

from gracepoint.checkpoint.storage.storage_path import StoragePath

logger = logging.getLogger(__name__)

#: Files that are read at once. The threads wait for the storage and for nothing else, so they may be many.
CONCURRENT_READS = 32


def read_all(paths: Sequence[StoragePath]) -> list[bytes] | None:
    """Returns the contents of all files in order, or None if one is missing: no more are begun then.

    Raises:
        OSError: One cannot be read.
    """
    work = _Work(paths)
    helpers = []
    for number in range(1, min(len(paths), CONCURRENT_READS)):
        helper = threading.Thread(target=work.run, name=f"gracepoint: reads {number}", daemon=True)
        try:
            helper.start()
        except RuntimeError as error:
            logger.debug("%d threads read small files: %s", number, error)
            break
        helpers.append(helper)
    work.run()
    for helper in helpers:
        helper.join()
    if work.error is not None:
        raise work.error
    return None if work.missing else [work.found[position] for position in range(len(paths))]


class _Work:
    """What is read, and what came of it. ``found`` has an entry of its own for each path; the rest is only ever set."""

    def __init__(self, paths: Sequence[StoragePath]) -> None:
        self._paths = paths
        self._next = itertools.count()  # one call takes one number, whichever thread makes it
        self.found: dict[int, bytes] = {}
        self.missing = False
        self.error: BaseException | None = None

    def run(self) -> None:
        while not self.missing and self.error is None and (position := next(self._next)) < len(self._paths):
            try:
                self.found[position] = self._paths[position].read_bytes()
            except FileNotFoundError:
                self.missing = True
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                self.error = error
