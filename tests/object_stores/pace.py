"""How fast bytes may pass."""

from __future__ import annotations

import threading
import time

_BURST_S = 0.01
"""Time that a pace which was not used may be made up for."""


class Pace:
    """A limit of bytes a second, which several threads may share.

    Args:
        rate: Bytes a second; None is without a limit.
    """

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, count: int) -> None:
        """Returns when so many bytes may have passed."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_S) + count / self._rate
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)
