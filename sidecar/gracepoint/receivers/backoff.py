"""Pauses between retries."""

from __future__ import annotations

import random

#: Not the generator of ``random`` itself: whoever trains may have seeded that one.
_chance = random.Random()


class Backoff:
    """Doubling pauses with full jitter, so that many pods do not retry at the same time.

    Args:
        first_s: Upper limit of the first pause, in seconds.
        most_s: Upper limit of all pauses, in seconds.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def next_s(self) -> float:
        """Returns the next pause in seconds. It is at least a tenth of its upper limit."""
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return _chance.uniform(0.1 * longest_s, longest_s)

    def reset(self) -> None:
        """Starts over at ``first_s``. Call it after a success."""
        self._failures = 0
