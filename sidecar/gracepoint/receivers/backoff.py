"""How long to wait before trying again."""

from __future__ import annotations

import random


class Backoff:
    """Doubling pauses with full jitter, so that a thousand pods do not come back at the same moment.

    Args:
        first_s: Longest first pause.
        most_s: Longest pause.
    """

    def __init__(self, first_s: float, most_s: float) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._failures = 0

    def next_s(self) -> float:
        """The next pause, at least a tenth of the longest one it could have been."""
        longest_s = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return random.uniform(0.1 * longest_s, longest_s)

    def reset(self) -> None:
        """It worked: start over at ``first_s``."""
        self._failures = 0
