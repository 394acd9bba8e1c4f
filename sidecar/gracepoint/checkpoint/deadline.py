"""A point in time until which something may take, by a clock that is passed in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Deadline:
    """``timeout_s`` after ``started_s``, by ``clock``."""

    timeout_s: float
    clock: Callable[[], float]
    started_s: float

    @classmethod
    def after(cls, timeout_s: float, clock: Callable[[], float]) -> Deadline:
        return cls(timeout_s, clock, clock())

    def elapsed_s(self) -> float:
        return self.clock() - self.started_s

    def remaining_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self.timeout_s - self.elapsed_s())

    def passed(self) -> bool:
        return self.remaining_s() == 0

    def part(self, fraction: float) -> Deadline:
        """Returns the deadline after ``fraction`` of what is left of this one."""
        return Deadline.after(self.remaining_s() * fraction, self.clock)
