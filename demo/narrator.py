"""Tells the person who watches what happens, a line at a time, with the time since the start."""

from __future__ import annotations

import time
from collections.abc import Callable


class Narrator:
    """Prints lines such as ``[ 12.3 s] the node gets its taint``.

    Args:
        clock: Monotonic seconds.
        write: Where a finished line goes.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = lambda line: print(line, flush=True),
    ) -> None:
        self._clock = clock
        self._write = write
        self._began_s = clock()

    def __call__(self, text: str) -> None:
        """Prints one line; further lines of ``text`` are indented below it."""
        stamp = f"[{self.elapsed_s:6.1f} s] "
        self._write(stamp + text.replace("\n", "\n" + " " * len(stamp)))

    def chapter(self, title: str) -> None:
        """Prints the headline of what comes next."""
        self._write(f"\n== {title}")

    @property
    def elapsed_s(self) -> float:
        """Seconds since this narrator was made."""
        return self._clock() - self._began_s
