"""The probes and the metrics, on a port without TLS. The controller's event loop answers them.

``/healthz`` fails if a restart would help. ``/readyz`` fails if pods and the API server should go to another replica.

The text of the metrics is made in a thread beside the loop, at most once a second and for a fifth of the time, however
many ask. One task makes it; all requests meanwhile wait for it, or get the last text. The thread is one of the loop's
executor, which ends with the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time

from aiohttp import web

from gracepoint_operator.cache.listing.watch_state import HANGS_AFTER_S
from gracepoint_operator.channel.canary import SILENT_S, Canary
from gracepoint_operator.controller import Controller
from gracepoint_operator.observability.loop_lag import LoopLag
from gracepoint_operator.observability.metrics import Metrics

#: A text of the metrics is used for this time, and for ``_RESTS`` times as long as it took to make.
_FRESH_S = 1.0
_RESTS = 4.0
_SCRAPE_S = 30.0
_PORTION_BYTES = 64 * 1024
#: A loop is blocked if it has not run for this long. Nothing on it takes so long.
BLOCKED_S = 30.0


class Health:
    """The routes.

    Args:
        core: Knows whether the cluster is known, and the state of the watches.
        channel_lag: When the channel's loop was last seen running.
        canary: The replica's own subscriber. None: there is none.
        metrics: Shown at ``/metrics``.
    """

    def __init__(self, core: Controller, channel_lag: LoopLag, canary: Canary | None, metrics: Metrics) -> None:
        self._core = core
        self._channel_lag = channel_lag
        self._canary = canary
        self._metrics = metrics
        self._text = b""
        self._fresh_until = -math.inf
        self._making: asyncio.Task[None] | None = None

    def add_routes(self, app: web.Application) -> None:
        """Adds the routes to ``app``."""
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._show_metrics)

    def why_dead(self) -> str | None:
        """Returns why a restart would help. None: it would not, as when the API server cannot be reached."""
        hanging = self._core.watches.hanging()
        if hanging:
            return f"no request for {HANGS_AFTER_S:.0f} s from: {', '.join(hanging)}"
        if self._channel_lag.silent_s > BLOCKED_S:
            return f"the channel's loop is blocked for {self._channel_lag.silent_s:.0f} s"
        return None

    def why_not_ready(self) -> str | None:
        """Returns why this replica cannot serve. None: it can.

        The ages of the watches do not count: an old view is better than none.
        """
        if not self._core.ready:
            return "the cluster is not known yet"
        if self._canary is not None and self._canary.silent_s > SILENT_S:
            if math.isinf(self._canary.silent_s):
                return "the replica's own subscriber got no notice yet; the log says why if that lasts"
            return f"the replica's own subscriber got no notice for {self._canary.silent_s:.0f} s; the log says why"
        return None

    async def _healthz(self, request: web.Request) -> web.Response:
        why = self.why_dead()
        return web.Response(text="ok") if why is None else web.Response(status=503, text=why)

    async def _readyz(self, request: web.Request) -> web.Response:
        why = self.why_not_ready()
        said = [why or "ok"]
        ages = sorted((kind.title, age_s) for kind, age_s in self._core.watches.ages().items())
        said += [f"{plural}: the API server answered {age_s:.0f} s ago" for plural, age_s in ages]
        return web.Response(status=200 if why is None else 503, text="\n".join(said))

    async def _show_metrics(self, request: web.Request) -> web.StreamResponse:
        if self._making is None and time.monotonic() >= self._fresh_until:
            self._making = asyncio.create_task(self._make_text(), name="metrics")
        if self._making is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SCRAPE_S):
                    await asyncio.shield(self._making)
        if not self._text:
            return web.Response(status=503, text=f"the metrics: no text within {_SCRAPE_S:.0f} s; ask again")
        return await _in_portions(request, self._text)

    async def _make_text(self) -> None:
        began = time.monotonic()
        try:
            await self._metrics.update_accounts()
            self._text = await asyncio.to_thread(self._metrics.text)
        finally:
            took_s = time.monotonic() - began
            self._fresh_until = time.monotonic() + max(_FRESH_S, _RESTS * took_s)
            self._making = None


async def _in_portions(request: web.Request, text: bytes) -> web.StreamResponse:
    """Answers with a text. A client that does not read it costs a portion of it, as the transport copies what waits."""
    response = web.StreamResponse(headers={"Content-Type": "text/plain", "Content-Length": str(len(text))})
    await response.prepare(request)
    if request.method != "HEAD":
        with contextlib.suppress(ConnectionError):
            for begin in range(0, len(text), _PORTION_BYTES):
                await response.write(text[begin : begin + _PORTION_BYTES])
    return response
