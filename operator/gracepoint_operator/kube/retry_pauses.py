"""Exponential backoff with jitter."""

from __future__ import annotations

import random
from collections.abc import Iterator

_chance = random.Random()


class RetryPauses:
    """An endless series of pauses in seconds: each twice as long as the one before, up to a limit.

    Each ``iter()`` begins with the shortest pause. Each pause is shortened at random by up to half, so that replicas
    which failed together do not try again together.

    Args:
        first_s: The first pause, in seconds.
        most_s: The longest pause, in seconds.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s

    def __iter__(self) -> Iterator[float]:
        pause_s = self._first_s
        while True:
            yield pause_s * _chance.uniform(0.5, 1.0)
            pause_s = min(pause_s * 2, self._most_s)
