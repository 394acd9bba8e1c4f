"""The point in time after which work must stop, as an object that is handed down to whatever does the work.

A deadline may move to an earlier time: a preemption's does when a nearer notice comes, and any thread may cancel a
deadline. So work asks ``remaining_s`` again and again instead of keeping a number of seconds, and a wait for a
condition goes through ``wait_for``, which checks the deadline every ``_LOOK_EVERY_S``. A deadline never moves to a
later time: when a preemption is over, its ``left_s`` becomes infinite, and other threads may still work for it then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gracepoint.errors import SaveFailed

_LOOK_EVERY_S = 0.05


class Deadline:
    """A point in time after which work must stop. The clock is injected.

    Args:
        timeout_s: Seconds from now until the deadline.
        clock: Returns monotonic seconds.
        left_s: Returns the seconds that are left now. The deadline is the earliest point in time that it ever gave.
            None if the deadline is fixed.

    Attributes:
        timeout_s: Seconds from the making of this object to the deadline.
        clock: Returns monotonic seconds.
    """

    def __init__(self, timeout_s: float, clock: Callable[[], float], left_s: Callable[[], float] | None = None) -> None:
        self.timeout_s = timeout_s
        self.clock = clock
        self._started_s = clock()
        self._left_s = left_s
        self._until_s = self._started_s + timeout_s
        self._cancelled: str | None = None  # the reason; written once

    @classmethod
    def after(cls, timeout_s: float, clock: Callable[[], float]) -> Deadline:
        """Returns a fixed deadline, ``timeout_s`` from now."""
        return cls(timeout_s, clock)

    @classmethod
    def following(cls, left_s: Callable[[], float], clock: Callable[[], float]) -> Deadline:
        """Returns a deadline that moves to an earlier time when ``left_s`` says so: any thread may ask it."""
        return cls(left_s(), clock, left_s)

    def elapsed_s(self) -> float:
        """Returns the seconds since the deadline was made."""
        return self.clock() - self._started_s

    def remaining_s(self) -> float:
        """Returns the seconds that are left: at least 0, and 0 once the deadline is cancelled."""
        if self._cancelled is not None:
            return 0.0
        now_s = self.clock()
        if self._left_s is not None:
            self._until_s = min(self._until_s, now_s + self._left_s())
        return max(0.0, self._until_s - now_s)

    def passed(self) -> bool:
        """Returns True if no time is left."""
        return self.remaining_s() == 0

    def part(self, fraction: float) -> Deadline:
        """Returns a fixed deadline after ``fraction`` of the time that is left until this one."""
        return Deadline.after(self.remaining_s() * fraction, self.clock)

    def cancel(self, reason: str) -> None:
        """Makes whatever works until this deadline stop now. Any thread may call it; the first reason is kept."""
        if self._cancelled is None:
            self._cancelled = reason

    @property
    def cancelled(self) -> bool:
        """True once ``cancel`` was called."""
        return self._cancelled is not None

    @property
    def ended(self) -> str:
        """How the deadline ended, for messages: ``within 3.0 s``, or ``before it was stopped: ...``."""
        if self._cancelled is not None:
            return f"before it was stopped: {self._cancelled}"
        return f"within {self.elapsed_s() if self._left_s is not None else self.timeout_s:.1f} s"

    def check_not_cancelled(self) -> None:
        """Raises SaveFailed if the deadline is cancelled. Called where work can stop, between two chunks."""
        if self._cancelled is not None:
            raise SaveFailed(f"not done {self.ended}")

    def check(self) -> None:
        """Raises SaveFailed if no time is left."""
        if self.passed():
            raise SaveFailed(f"not done {self.ended}")

    def wait_for(self, condition: threading.Condition, predicate: Callable[[], bool]) -> bool:
        """Waits on a condition that the caller holds, until the predicate is true or the deadline has passed.

        Returns:
            The predicate's last value.
        """
        while not predicate():
            left_s = self.remaining_s()
            if left_s == 0:
                return False
            condition.wait(min(left_s, _LOOK_EVERY_S))
        return True
