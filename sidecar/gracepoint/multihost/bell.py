"""The bell: a log in the key-value store that delivers the same entries to every process in the same order.

The keys are ``bell/0``, ``bell/1``, ... Each entry is written once, by the first process that writes it. All
processes read the entries in order, so every process sees the same sequence (``ledger`` says what the entries mean).

Each process has one reading thread, which blocks in a single request for the next entry. So idle processes cost the
coordination service only N blocked requests. A wait that times out leaks memory there (see ``store``), so the timeout
is one day. A request that blocks in C++ cannot be interrupted from Python, and a thread that returns from one while
the interpreter ends aborts the process. So ``close`` writes an entry itself, which wakes the readers of all processes.
After the first entry which says that a process ends, all readers poll instead of blocking, and processes that close
later write nothing. They poll twice a second, or less often if there are more than 200 of them, so that all readers
together ask at most 400 times a second.

Entries are removed after all processes have read them, one **page** of ``_PAGE`` entries at a time. Each reader counts
itself when it has read a page, and the last one removes the page. A process counts itself only when none of its threads
is in a write that began in that page or an earlier one. Such a thread looks for the first free number, and must not
find a number that all processes have already read.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

from gracepoint.deadline import Backoff
from gracepoint.multihost.ledger import Closing, Entry, Finished, Gone, from_json, to_json
from gracepoint.multihost.store import KeyExists, KeyTimeout, KeyValueStore, StoreUnavailable

logger = logging.getLogger(__name__)

_PARK_S = 24 * 3600.0
_LOOK_EVERY_S = 0.5
_LOOKS_PER_S = 400
_RETRY_AT_MOST_S = 10.0
_READ_S = 5.0
_PAGE = 64


class Bell:
    """The log, as one process sees it.

    Any thread may call ``ring`` and ``close``. Only one thread reads.

    Args:
        store: The key-value store that the gang shares.
        readers: The number of processes that read the log. None: entries are never removed.
    """

    def __init__(self, store: KeyValueStore, readers: int | None = None) -> None:
        self._store = store
        self._readers = readers
        self._look_every_s = max(_LOOK_EVERY_S, (readers or 0) / _LOOKS_PER_S)
        self._lock = threading.Lock()
        self._writing: collections.Counter[int] = collections.Counter()  # first number tried -> writers; under the lock
        self._read_pages = 0  # pages that this process has counted as read; only for the reading thread
        self._next = 0  # number of the first entry that the reading thread has not read
        self._some_end = False
        self._closed = threading.Event()

    def ring(self, entry: Entry, *, unless: Callable[[Entry], bool] = lambda there: False) -> None:
        """Appends an entry, unless an equivalent entry exists that this process has not read yet.

        Args:
            entry: The entry.
            unless: Returns True for an entry that makes this one unnecessary.

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
                self._writing += collections.Counter()  # removes counts of 0

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
        """Ends reading in this process. ``next`` returns the entries that were written before, and then None.

        Raises:
            StoreUnavailable: The store cannot be reached. The reading thread then stays blocked.
        """
        self._closed.set()
        if not self._some_end:
            self.ring(Closing(by), unless=_ends)

    def next(self) -> tuple[int, Entry] | None:
        """Waits for the next entry. Returns its number and the entry. None after ``close``."""
        backoff = Backoff(_LOOK_EVERY_S, _RETRY_AT_MOST_S)
        while True:
            try:
                if not self._some_end:
                    return self._read(self._store.get(f"bell/{self._next}", timeout_s=_PARK_S))
                if (entry := self.try_next()) is not None:
                    return entry
                if self._closed.wait(self._look_every_s):
                    return self.try_next()  # an entry may have been written in between
            except KeyTimeout:
                continue
            except StoreUnavailable as error:
                if self._closed.is_set():
                    return None
                retry_s = backoff.next_s()
                logger.warning("cannot read notices of other processes error=%s retry_s=%.1f", error, retry_s)
                self._closed.wait(retry_s)

    def try_next(self) -> tuple[int, Entry] | None:
        """Returns the next entry and its number, without a wait. None if it is not written yet."""
        text = self._store.try_get(f"bell/{self._next}")
        return None if text is None else self._read(text)

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
        except StoreUnavailable as error:  # the page is not removed
            logger.warning("could not remove entries that all processes have read error=%s", error)


def _ends(entry: Entry) -> bool:
    return isinstance(entry, Finished | Gone | Closing)
