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
import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable

from aiohttp import web

from gracepoint_operator.channel.endpoint.accepted_connections import ChannelConnections, CloseReason, ConnectionLimits
from gracepoint_operator.channel.endpoint.runner_close import CLOSE_CONNECTIONS_S
from gracepoint_operator.channel.routes import Channel
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.loop_lag import LoopLag
from gracepoint_operator.observability.metrics import Metrics

log = logging.getLogger(__name__)

_BACKLOG = 4096  # as many as the kernel allows (net.core.somaxconn): a gang's pods connect at once
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
        async with contextlib.AsyncExitStack() as stack:
            app = web.Application()
            # A handler is cancelled when its client disconnects, so that a lost subscriber is removed at once.
            runner = web.AppRunner(
                app,
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=CLOSE_CONNECTIONS_S,
                # It also counts from the handshake to the first request.
                keepalive_timeout=self._limits.request_s,
            )
            make = _server_of(runner)
            connections = ChannelConnections(make, self._context, self._limits, self._metrics.count_connection_closed)
            self._channel.add_routes(app, lambda request: connections.keep(request.protocol))
            app.on_shutdown.append(self._release_subscribers)
            await runner.setup()
            # In reverse order: first what is pending ends, so that aiohttp gets no new connection while it closes.
            stack.push_async_callback(connections.close)
            stack.push_async_callback(runner.cleanup)
            stack.push_async_callback(connections.close_pending)
            listener = stack.enter_context(_listener(self._host, self._port))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._renew(), name="certificate")  # first, as no handshake succeeds without it
                tasks.create_task(connections.accept(listener), name="accept")
                tasks.create_task(self.lag.measure(), name="loop lag")
                self._listening.set_result(int(listener.getsockname()[1]))

    async def _renew(self) -> None:
        await self._watch()

    async def _release_subscribers(self, app: web.Application) -> None:
        await self._channel.release_subscribers()


def _server_of(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """Makes aiohttp's protocol for each new connection. ``runner`` must be set up when it is called."""

    def make() -> asyncio.Protocol:
        server = runner.server
        assert server is not None
        return server()

    return make


def _listener(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel supports IPv6, but this network does not
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
            listener.setblocking(False)
            return listener
    listener = socket.create_server((host or "", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
