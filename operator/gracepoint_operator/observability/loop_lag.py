"""How late the core's event loop comes to what is due: what blocks it delays every notice.

One task on that loop; it ends when it is cancelled.
"""

from __future__ import annotations

import asyncio

from gracepoint_operator.observability.metrics import Metrics

EVERY_S = 0.25


async def measure(metrics: Metrics) -> None:
    """Observes the lag until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_at = loop.time() + EVERY_S
        await asyncio.sleep(EVERY_S)
        metrics.loop_lag_s.observe(max(loop.time() - due_at, 0.0))
