"""The channel's thread: its own event loop, its port, its connections.

Every pod of the cluster can reach the channel. On a loop of its own, thousands of TLS handshakes and requests delay
neither a webhook's answer nor a decision, which belong to the controller's loop. Who runs where:

* this thread's loop: accepting, TLS, HTTP, the tasks of requests and streams (``routes``), renewal of the certificate,
  and measuring how late the loop is;
* the controller's loop: everything that reads or changes what is known. ``routes`` hands such work over and awaits it.

``start`` and ``stop`` are called on the controller's loop. It must run until ``stop`` has returned, because the streams
hand over work as they end. The thread ends with ``stop`` or with a failure, which ``ended`` raises.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import ssl
import threading
from collections.abc import Awaitable, Callable

from aiohttp import web

from gracepoint_operator.channel.routes import Channel
from gracepoint_operator.limited_port import CloseReason, ConnectionLimits, LimitedPort
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.loop_lag import LoopLag
from gracepoint_operator.observability.metrics import Metrics

log = logging.getLogger(__name__)

_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0


class ChannelThread:
    """Serves the channel.

    Args:
        channel: The routes.
        context: The server's TLS context. Only this thread uses it.
        watch: Renews the certificate in ``context``. Runs on this thread's loop.
        limits: Limits for connections whose callers are not authenticated.
        metrics: Counts closed connections.
        host: Address to listen on. None: all addresses.
        port: Port to listen on. 0: the kernel chooses one.

    Attributes:
        lag: How late this thread's loop is.
    """

    def __init__(
        self,
        channel: Channel,
        context: ssl.SSLContext,
        watch: Callable[[], Awaitable[None]],
        limits: ConnectionLimits,
        metrics: Metrics,
        host: str | None,
        port: int,
    ) -> None:
        self._channel = channel
        self._context = context
        self._watch = watch
        self._limits = limits
        self._metrics = metrics
        for reason in CloseReason:  # from 0 on, so that increase() sees the first connections
            metrics.connections_closed.labels(reason=reason)
        self._host = host
        self._port = port
        self._listening: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.lag = LoopLag(metrics, "channel")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The thread's event loop. None before it runs."""
        return self._loop

    async def start(self) -> int:
        """Starts the thread. Returns the port once the thread listens on it.

        Raises:
            OSError: The port cannot be listened on.
            TimeoutError: The thread does not listen in time.
        """
        threading.Thread(target=self._main, name="channel", daemon=True).start()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await asyncio.shield(asyncio.wrap_future(self._listening))
        except TimeoutError as error:
            message = f"the channel's thread: not listening on port {self._port} within {_START_TIMEOUT_S:.0f} s"
            raise TimeoutError(message) from error

    async def ended(self) -> None:
        """Waits until the thread ends. Raises the error that ended it."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def stop(self) -> None:
        """Ends the streams, closes the port and ends the thread. Waits for a bounded time."""
        if self._loop is None or self._task is None or self._ended.done():
            return
        self._loop.call_soon_threadsafe(self._task.cancel)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self.ended()
        except TimeoutError:
            log.error("the channel's thread did not end", extra=about(waited_s=_STOP_TIMEOUT_S))

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError:
            self._ended.set_result(None)
        except BaseException as error:  # ended() raises it on the controller's loop
            log.exception("the channel's thread failed")
            if not self._listening.done():
                self._listening.set_exception(error)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)

    async def _run(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        app = web.Application()
        port = LimitedPort("channel", app, self._context, self._limits, self._metrics.count_connection_closed)
        self._channel.add_routes(app, port.keep)
        app.on_shutdown.append(self._release_subscribers)
        try:
            number = await port.start(self._host, self._port)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew(), name="certificate")  # first, as no handshake succeeds without it
                tasks.create_task(port.accept(), name="accept")
                tasks.create_task(self.lag.measure(), name="loop lag")
                self._listening.set_result(number)
        finally:
            await port.close()

    async def _renew(self) -> None:
        await self._watch()

    async def _release_subscribers(self, app: web.Application) -> None:
        await self._channel.release_subscribers()
