"""The pauses before kopf is run again or logs in again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from gracepoint_operator.kube.retry_pauses import RetryPauses

#: After a run of this length the pauses begin with the shortest again.
_RAN_WELL_S = 60.0


class Pauses:
    """Pauses that grow with each failure. They begin with the shortest again after a run without failure.

    Args:
        retry_pauses: The pauses in seconds.
        clock: Seconds, of a clock that never goes back.
    """

    def __init__(self, retry_pauses: RetryPauses, clock: Callable[[], float] = time.monotonic) -> None:
        self._retry_pauses = retry_pauses
        self._clock = clock
        self._pauses: Iterator[float] = iter(retry_pauses)
        self._at: float | None = None

    def next_s(self, *, first_s: float | None = None) -> float:
        """Seconds to wait now.

        Args:
            first_s: Seconds to wait the first time, or after a run without failure. None: the shortest pause.
        """
        now, before = self._clock(), self._at
        if before is None or now - before > _RAN_WELL_S:
            self._pauses = iter(self._retry_pauses)
            pause_s = next(self._pauses) if first_s is None else first_s
        else:
            pause_s = next(self._pauses)
        self._at = now + pause_s
        return pause_s
