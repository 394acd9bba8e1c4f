"""One word is enough: how it reaches every process, and what that costs while nothing happens.

The bell is a log in the store, ``bell/0``, ``bell/1``, ...: each entry is written once, by whoever is first,
and read by all in order, so every process sees the same sequence (of ``entries``).

Each process's one reading thread is parked in a single request for the next entry, so an idle gang costs the
coordination service nothing but N parked requests: a wait that times out leaks there (see ``store``), and is
thus a day long. A request that is parked in C++ cannot be interrupted from Python, though, and a thread that
comes back from one while the interpreter ends aborts the process. So who closes writes an entry itself, which
wakes its own reader, and everybody else's, once: from the first entry of a process that ends all readers look
twice a second instead of parking, and later ones write nothing.

Entries are removed once all processes have read them, a **page** of ``_PAGE`` entries at a time: each reader says when
it has read a page, and the last one removes it. A process says so only when none of its threads is writing from that
page on: such a thread looks for the first free number, and must find none that all others have passed.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

from gracepoint.multihost.entries import Closing, Entry, Finished, Gone, from_json, to_json
from gracepoint.multihost.store import KeyExists, KeyTimeout, KeyValueStore, StoreUnavailable

log = logging.getLogger(__name__)

_PARK_S = 24 * 3600.0
_LOOK_EVERY_S = 0.5
_RETRY_AT_MOST_S = 10.0
_READ_S = 5.0
_PAGE = 64


class Bell:
    """The log as one process sees it. ``ring`` and ``close`` from any thread; reading from one.

    Args:
        store: Shared by the gang.
        readers: How many processes read it; None: nothing is ever removed.
    """

    def __init__(self, store: KeyValueStore, readers: int | None = None) -> None:
        self._store = store
        self._readers = readers
        self._lock = threading.Lock()
        self._writing: collections.Counter[int] = collections.Counter()  # from which numbers on; under the lock
        self._read_pages = 0  # of which the others were told; the reading thread's
        self._next = 0  # number of the first entry that the reading thread has not read
        self._some_end = False
        self._closed = threading.Event()

    def ring(self, entry: Entry, *, unless: Callable[[Entry], bool] = lambda there: False) -> None:
        """Appends an entry, unless one is met on the way that nobody here has read yet and that says it already.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        with self._lock:
            first = self._next
            self._writing[first] += 1
        try:
            self._write(first, entry, unless)
        finally:
            with self._lock:
                self._writing[first] -= 1
                self._writing += collections.Counter()  # without what is 0

    def _write(self, number: int, entry: Entry, unless: Callable[[Entry], bool]) -> None:
        text = to_json(entry)
        while True:
            try:
                return self._store.set(f"bell/{number}", text)
            except KeyExists:
                if unless(from_json(self._store.get(f"bell/{number}", timeout_s=_READ_S))):
                    return
                number += 1

    def close(self, by: int) -> None:
        """Ends this process's reading: ``next`` returns None after what was written before this.

        Raises:
            StoreUnavailable: The store cannot be reached; the reading thread then stays parked.
        """
        self._closed.set()
        if not self._some_end:
            self.ring(Closing(by), unless=_ends)

    def next(self) -> tuple[int, Entry] | None:
        """Waits for the next entry and its number; None after ``close``."""
        retry_s = _LOOK_EVERY_S
        while True:
            try:
                if not self._some_end:
                    return self._read(self._store.get(f"bell/{self._next}", timeout_s=_PARK_S))
                if (found := self.try_next()) is not None:
                    return found
                if self._closed.wait(_LOOK_EVERY_S):
                    return self.try_next()  # what was written in between
            except KeyTimeout:
                continue
            except StoreUnavailable as error:
                if self._closed.is_set():
                    return None
                log.warning("cannot read notices of other processes error=%s retry_s=%g", error, retry_s)
                self._closed.wait(retry_s)
                retry_s = min(2 * retry_s, _RETRY_AT_MOST_S)

    def try_next(self) -> tuple[int, Entry] | None:
        """The next entry and its number, if it is there already."""
        found = self._store.try_get(f"bell/{self._next}")
        return None if found is None else self._read(found)

    def _read(self, text: str) -> tuple[int, Entry]:
        with self._lock:
            number, self._next = self._next, self._next + 1
            passed = min(self._writing, default=self._next)
        entry = from_json(text)
        self._some_end = self._some_end or _ends(entry)
        if self._readers is not None and (self._read_pages + 1) * _PAGE <= passed:
            self._tell_page_read(self._readers)
        return number, entry

    def _tell_page_read(self, readers: int) -> None:
        page, self._read_pages = self._read_pages, self._read_pages + 1
        try:
            if self._store.increment(f"bell-read/{page}") == readers:
                for number in range(page * _PAGE, (page + 1) * _PAGE):
                    self._store.delete_folder(f"bell/{number}")
                self._store.delete_folder(f"bell-read/{page}")
        except StoreUnavailable as error:  # then this page stays
            log.warning("entries that all have read were not removed error=%s", error)


def _ends(entry: Entry) -> bool:
    return isinstance(entry, Finished | Gone | Closing)
