"""The channel's thread: its own event loop, its port, its connections.

Every pod of the cluster can reach the channel. On a loop of its own, TLS handshakes and requests by the thousand delay
neither a webhook's answer nor a decision, which are the core's loop's. Who runs where:

* this thread's loop: accepting, TLS, HTTP, the tasks of requests and streams (``channel``), the certificate's renewal;
* the core's loop: whatever asks or changes what is known. ``channel`` hands such work over and waits for its result.

``start`` and ``stop`` are called on the core's loop, which must run until ``stop`` has returned, as the streams' last
words are handed over to it. The thread ends with ``stop``, or with a failure, which ``ended`` raises.
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

from gracepoint_operator.channel.connections import ConnectionLimits, Connections
from gracepoint_operator.channel.routes import Channel
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics

log = logging.getLogger(__name__)

_BACKLOG = 4096  # as many as the kernel allows (net.core.somaxconn): a gang's pods connect at once
_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0
_CLOSE_CONNECTIONS_S = 1.0


class ChannelThread:
    """Serves the channel.

    Args:
        channel: The routes.
        context: TLS of the server's side; used by this thread alone.
        watch: Runs on this thread's loop meanwhile: renews the certificate in ``context``.
        limits: For connections whose callers have not shown who they are.
        metrics: Counts what is closed.
        host: Address to listen on; None: all.
        port: 0 lets the kernel choose.
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
        self._host = host
        self._port = port
        self._listening: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The thread's event loop; None before it runs."""
        return self._loop

    async def start(self) -> int:
        """Returns the port, once it is listened on.

        Raises:
            OSError: The port cannot be listened on.
            TimeoutError: The thread did not come so far.
        """
        threading.Thread(target=self._main, name="channel", daemon=True).start()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await asyncio.shield(asyncio.wrap_future(self._listening))
        except TimeoutError as error:
            message = f"the channel's thread: not listening on port {self._port} within {_START_TIMEOUT_S:.0f} s"
            raise TimeoutError(message) from error

    async def ended(self) -> None:
        """Waits for the thread's end; raises what ended it."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def stop(self) -> None:
        """Ends the streams, closes the port and ends the thread; waits for a bounded time."""
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
        except BaseException as error:  # whatever it is, the core's loop raises it
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
            # Cancelling a handler when its client goes makes a lost subscriber vanish at once.
            runner = web.AppRunner(
                app,
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=_CLOSE_CONNECTIONS_S,
                # Counted from the handshake on, and not only between two requests.
                keepalive_timeout=self._limits.request_s,
            )
            make = _server_of(runner)
            connections = Connections(make, self._context, self._limits, self._metrics.count_connection_closed)
            self._channel.add_routes(app, lambda request: connections.keep(request.protocol))
            app.on_shutdown.append(self._release_subscribers)
            await runner.setup()
            # In reverse order: first what is pending ends, so that aiohttp gets no new connection while it closes.
            stack.push_async_callback(connections.close)
            stack.push_async_callback(runner.cleanup)
            stack.push_async_callback(connections.close_pending)
            listener = stack.enter_context(_listener(self._host, self._port))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(connections.accept(listener), name="accept")
                tasks.create_task(self._renew(), name="certificate")
                self._listening.set_result(int(listener.getsockname()[1]))

    async def _renew(self) -> None:
        await self._watch()

    async def _release_subscribers(self, app: web.Application) -> None:
        await self._channel.release_subscribers()


def _server_of(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """aiohttp's protocol for a new connection; ``runner`` is set up by then."""

    def make() -> asyncio.Protocol:
        server = runner.server
        assert server is not None
        return server()

    return make


def _listener(host: str | None, port: int) -> socket.socket:
    if host is None and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel knows IPv6, and this network does not
            listener = socket.create_server(("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
            listener.setblocking(False)
            return listener
    listener = socket.create_server((host or "", port), backlog=_BACKLOG)
    listener.setblocking(False)
    return listener
