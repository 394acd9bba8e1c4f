"""One notice is enough: how it reaches every process, and what that costs while nothing happens.

The bell is a log in the store, ``bell/0``, ``bell/1``, ...: each entry is written once, by whoever is first,
and read by all in order, so every process sees the same sequence. An entry is a *notice* (its number is the
number of the epoch that it opens) or the word that a process is *closing*.

Each process's one reading thread is parked in a single request for the next entry, so an idle gang costs the
coordination service nothing but N parked requests: a wait that times out leaks there (see ``store``), and is
thus a day long. A request that is parked in C++ cannot be interrupted from Python, though, and a thread that
comes back from one while the interpreter ends aborts the process. So who closes writes an entry itself, which
wakes its own reader, and everybody else's, once: from then on all readers look twice a second instead of
parking, and later closers write nothing.
"""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

from gracepoint.multihost.store import KeyExists, KeyTimeout, KeyValueStore, StoreUnavailable

log = logging.getLogger(__name__)

_PARK_S = 24 * 3600.0
_LOOK_EVERY_S = 0.5
_RETRY_AT_MOST_S = 10.0


class Bell:
    """The log as one process sees it. ``ring`` from any thread; ``next_notice`` from the reading thread."""

    def __init__(self, store: KeyValueStore, process_index: int) -> None:
        self._store = store
        self._process_index = process_index
        self._next = 0  # number of the first entry that the reading thread has not read
        self._closing_seen = False
        self._closed = threading.Event()

    def ring(self, notice: str) -> None:
        """Tells every process of a notice, unless one that none of us has dealt with is already there.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        self._write({"kind": "notice", "by": self._process_index, "notice": notice}, join="notice")

    def close(self) -> None:
        """Ends this process's reading: ``next_notice`` returns None after what was written before this.

        Raises:
            StoreUnavailable: The store cannot be reached; the reading thread then stays parked.
        """
        self._closed.set()
        if not self._closing_seen:
            self._write({"kind": "closing", "by": self._process_index}, join="closing")

    def next_notice(self) -> tuple[int, int, str] | None:
        """Waits for the next notice: (its number, who rang, what it says); None after ``close``."""
        while (entry := self._read_next()) is not None:
            number, self._next = self._next, self._next + 1
            if entry["kind"] == "notice":
                return number, entry["by"], entry["notice"]
            self._closing_seen = True
        return None

    def _write(self, entry: dict[str, Any], *, join: str) -> None:
        """Appends an entry; content if an unread one of the kind ``join`` is met on the way."""
        number = self._next
        while True:
            try:
                return self._store.set(f"bell/{number}", json.dumps(entry))
            except KeyExists:
                if json.loads(self._store.get(f"bell/{number}", timeout_s=5))["kind"] == join:
                    return
                number += 1

    def _read_next(self) -> dict[str, Any] | None:
        retry_s = _LOOK_EVERY_S
        while True:
            try:
                if self._closing_seen:
                    found = self._store.try_get(f"bell/{self._next}")
                else:
                    found = self._store.get(f"bell/{self._next}", timeout_s=_PARK_S)
                if found is not None:
                    entry: dict[str, Any] = json.loads(found)
                    return entry
                if self._closed.wait(_LOOK_EVERY_S):
                    return None
            except KeyTimeout:
                continue
            except StoreUnavailable as error:
                if self._closed.is_set():
                    return None
                log.warning("cannot read notices of other processes error=%s retry_s=%g", error, retry_s)
                self._closed.wait(retry_s)
                retry_s = min(2 * retry_s, _RETRY_AT_MOST_S)
