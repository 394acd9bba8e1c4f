"""A clock that a test moves ahead, to end a wait without waiting."""

from __future__ import annotations

import time


class MovedClock:
    """The real time, and what is added to it.

    Attributes:
        ahead_s: Seconds that are added.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s
