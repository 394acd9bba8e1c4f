"""A bound on the bytes that are in flight at once.

A thread takes bytes before it starts an operation. Any thread may give them back when the operation has ended. An
operation that is larger than the bound runs alone.
"""

from __future__ import annotations

import threading

from gracepoint.deadline import Deadline


class ByteLimiter:
    """At most ``max_bytes`` are taken at any time, unless one operation alone needs more. None: no bound."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._taken = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def take(self, size_bytes: int, deadline: Deadline) -> bool:
        """Waits for room and takes it. Returns False and takes nothing if there was no room before the deadline."""
        if self.max_bytes is None:
            return True
        with self._lock:
            if not deadline.wait_for(self._changed, lambda: self._has_room(size_bytes)):
                return False
            self._taken += size_bytes
            return True

    def take_if_room(self, size_bytes: int) -> bool:
        """Takes room without waiting. Returns False and takes nothing if there is none."""
        if self.max_bytes is None:
            return True
        with self._lock:
            if not self._has_room(size_bytes):
                return False
            self._taken += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        if self.max_bytes is None:
            return
        with self._lock:
            self._taken -= size_bytes
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        assert self.max_bytes is not None
        return self._taken == 0 or self._taken + size_bytes <= self.max_bytes
