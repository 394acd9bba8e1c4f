"""How late an event loop runs what is due. Whatever blocks a loop delays every notice.

One task on each loop that takes part in notices: the controller's and the channel's. It ends when it is cancelled. The
health port, on the controller's loop, reads when a loop was last seen running.
"""

from __future__ import annotations

import asyncio
import time

from gracepoint_operator.observability.metrics import Metrics

EVERY_S = 0.25


class LoopLag:
    """The lag of one loop.

    Args:
        metrics: Gets the lag.
        loop: The loop's name in the metric: ``controller`` or ``channel``.
    """

    def __init__(self, metrics: Metrics, loop: str) -> None:
        self._lag_s = metrics.loop_lag_s.labels(loop=loop)
        self._seen_at: float | None = None

    @property
    def silent_s(self) -> float:
        """Seconds since the loop was last seen running. 0 before it runs. Callable from any thread."""
        seen_at = self._seen_at
        return 0.0 if seen_at is None else time.monotonic() - seen_at

    async def measure(self) -> None:
        """Observes the lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._seen_at = time.monotonic()
            due_at = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            self._lag_s.observe(max(loop.time() - due_at, 0.0))
