"""Until when something may take, by a clock that is passed in.

A deadline may move to an earlier time: one that follows ``left_s`` asks it again and again, and whoever owns a deadline
may cancel it from any thread. So what waits for a condition does so by ``wait_for``, which looks every
``_LOOK_EVERY_S``. It never moves to a later time: what ``left_s`` goes by may be over for another thread already.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gracepoint.errors import SaveFailed

_LOOK_EVERY_S = 0.05


class Deadline:
    """``timeout_s`` from now on, by ``clock``; or the earliest that ``left_s`` ever said, where that is given.

    Attributes:
        timeout_s: How long it was at first.
        clock: Monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float], left_s: Callable[[], float] | None = None) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self._started_s = clock()
        self._left_s = left_s
        self._until_s = self._started_s + timeout_s
        self._cancelled: str | None = None  # why; written once

    @classmethod
    def after(cls, timeout_s: float, clock: Callable[[], float]) -> Deadline:
        return cls(timeout_s, clock)

    @classmethod
    def of(cls, timeout_s: float | Callable[[], float], clock: Callable[[], float]) -> Deadline:
        """A deadline that moves where ``timeout_s`` is a function: of the seconds that are left when it is asked."""
        return cls(timeout_s(), clock, timeout_s) if callable(timeout_s) else cls(timeout_s, clock)

    def elapsed_s(self) -> float:
        return self.clock() - self._started_s

    def remaining_s(self) -> float:
        """Seconds left, at least 0; none once it is cancelled."""
        if self._cancelled is not None:
            return 0.0
        now_s = self.clock()
        if self._left_s is not None:
            self._until_s = min(self._until_s, now_s + self._left_s())
        return max(0.0, self._until_s - now_s)

    def passed(self) -> bool:
        return self.remaining_s() == 0

    def part(self, fraction: float) -> Deadline:
        """Returns the deadline after ``fraction`` of what is left of this one."""
        return Deadline.after(self.remaining_s() * fraction, self.clock)

    def cancel(self, reason: str) -> None:
        """Whoever works until this deadline is to stop. From any thread; the first reason stands."""
        if self._cancelled is None:
            self._cancelled = reason

    @property
    def cancelled(self) -> bool:
        return self._cancelled is not None

    @property
    def ended(self) -> str:
        """How it ended, in words: ``within 3.0 s``, or ``before it was stopped: ...``."""
        if self._cancelled is not None:
            return f"before it was stopped: {self._cancelled}"
        return f"within {self.elapsed_s() if self._left_s is not None else self.timeout_s:.1f} s"

    def check_not_cancelled(self) -> None:
        """Raises SaveFailed if it is cancelled: asked where work can stop, at the border of two chunks."""
        if self._cancelled is not None:
            raise SaveFailed(f"not done {self.ended}")

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> bool:
        """Waits in a condition that the caller holds; returns the predicate's last value."""
        while not predicate():
            left_s = self.remaining_s()
            if left_s == 0:
                return False
            condition.wait(min(left_s, _LOOK_EVERY_S))
        return True
