"""A bound on bytes that are in flight at once.

Threads take what they need before they start something and give it back when it is over, from whatever thread
that is. What is larger than the bound goes alone.
"""

from __future__ import annotations

import threading

from gracepoint.deadline import Deadline


class ByteLimiter:
    """At most ``max_bytes`` are taken at any time; None: no bound."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._taken = 0
        self._changed = threading.Condition()

    def take(self, size_bytes: int, deadline: Deadline) -> bool:
        """Waits for room; returns False if there was none when the deadline passed, and nothing is taken."""
        if self.max_bytes is None:
            return True
        with self._changed:
            if not deadline.wait_for(self._changed, lambda: self._has_room(size_bytes)):
                return False
            self._taken += size_bytes
            return True

    def take_if_room(self, size_bytes: int) -> bool:
        """Takes without waiting; returns False if there is no room."""
        if self.max_bytes is None:
            return True
        with self._changed:
            if not self._has_room(size_bytes):
                return False
            self._taken += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        if self.max_bytes is None:
            return
        with self._changed:
            self._taken -= size_bytes
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        assert self.max_bytes is not None
        return self._taken == 0 or self._taken + size_bytes <= self.max_bytes
