"""The channel's HTTP routes and its thread: pods subscribe, acknowledge and report (``gracepoint.wire``).

Each request is one task on the event loop of the channel's thread (``ChannelThread``), and reads and writes there.
Everything that reads or changes what the operator knows is handed to the controller's loop (``_on_core``) and awaited.
A method that runs there says so. When a request ends early, the work that it handed over is cancelled.

The task of a subscription lives as long as its stream. It takes frames from the subscriber's queue and writes them.
Its ``Heartbeat`` sends a ping when there is nothing else to send. The task ends when the client disconnects (aiohttp
cancels it), when the pod is deleted or connects again (``closed``), or when a write takes too long. So a stuck pod
delays only itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import logging
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web
from pydantic import ValidationError

from gracepoint.wire import names
from gracepoint.wire.frames import Frame, Hello
from gracepoint.wire.messages import (
    Acknowledgement,
    Forecast,
    Message,
    Report,
    Resumption,
    SaveEvery,
    SnapshotReport,
    Stall,
    Subscription,
    Trouble,
    WireError,
    json_key,
)
from gracepoint_operator.channel.authentication import AuthenticationFailure, Authenticator, RequestRefused
from gracepoint_operator.channel.notifier import (
    HEARTBEAT_S,
    Heartbeat,
    Notifier,
    Subscriber,
    Subscribers,
    TrustNotifier,
    nothing,
)
from gracepoint_operator.channel.reports import ReportHandler, UnknownPreemption
from gracepoint_operator.event_loop import LoopCalls, LoopLag
from gracepoint_operator.kube import client
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.limited_port import CloseReason, ConnectionLimits, LimitedPort
from gracepoint_operator.logs import about, seldom
from gracepoint_operator.metrics import Metrics

logger = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 10.0
#: To record that a frame was written may wait this number of seconds, so that the rest of the gang is notified first.
_KEEP_WITHIN_S = 0.05
#: Enough for a report that names 30,000 processes. The body is read before the caller is known.
_LARGEST_MESSAGE_BYTES = 256 * 1024
#: A peer that disappeared without closing the connection is noticed when TCP acknowledges nothing for this time.
_UNACKNOWLEDGED_MS = 15_000

_Any = TypeVar("_Any", bound=Message)
_Result = TypeVar("_Result")
_FromSession = TypeVar("_FromSession", Acknowledgement, Report, Forecast, Resumption, SnapshotReport, Stall, Trouble)


class Channel:
    """The routes. The parts that they use belong to the controller's event loop.

    Attributes:
        is_canary: Says on the controller's loop whether a subscriber is this replica's own (``Canary``).
    """

    def __init__(
        self,
        authenticator: Authenticator,
        subscribers: Subscribers,
        notifier: Notifier,
        reports: ReportHandler,
        metrics: Metrics,
        replica: str,
        trust: TrustNotifier,
    ) -> None:
        self._authenticator = authenticator
        self._subscribers = subscribers
        self._notifier = notifier
        self._reports = reports
        self._metrics = metrics
        self._replica = replica
        self._trust = trust
        self.is_canary: Callable[[str, Subscriber], bool] = lambda authorization, subscriber: False
        self._core: LoopCalls | None = None
        self._streams: LoopCalls | None = None
        self._keep: Callable[[web.Request], None] = lambda request: None

    def settle(self, core_loop: asyncio.AbstractEventLoop) -> None:
        """Sets the controller's event loop. Until then every request is refused with 503."""
        self._core = LoopCalls(core_loop)

    async def release_subscribers(self) -> None:
        """Ends all streams, so that the pods connect to the other replica at once."""
        await self._on_core(self._close_subscribers())

    def add_routes(self, app: web.Application, keep: Callable[[web.Request], None]) -> None:
        """Adds the routes to ``app``.

        Args:
            app: The application. It may run on another event loop than the controller's.
            keep: Called with the request of an authenticated subscriber, whose connection stays open.
        """
        self._keep = keep
        app.router.add_post(names.PATH_SUBSCRIBE, self._subscribe)
        app.router.add_post(names.PATH_ACKNOWLEDGE, self._acknowledge)
        app.router.add_post(names.PATH_REPORT, self._report)
        app.router.add_post(names.PATH_FORECAST, self._forecast)
        app.router.add_post(names.PATH_RESUMPTION, self._resumption)
        app.router.add_post(names.PATH_SNAPSHOT, self._snapshot)
        app.router.add_post(names.PATH_STALL, self._stall)
        app.router.add_post(names.PATH_TROUBLE, self._trouble)

    async def _subscribe(self, request: web.Request) -> web.StreamResponse:
        subscriber = None
        try:
            hello = await _read(request, Subscription)
            subscriber = Subscriber(hello, self._here())
            await self._on_core(self._admit_subscriber(request.headers.get("Authorization", ""), subscriber))
            self._keep(request)
            return await self._serve(request, subscriber)
        except RequestRefused as refusal:
            return self._refuse(request, refusal)
        finally:
            # Also if the request ended while it was being admitted, or before.
            if subscriber is not None:
                self._post(functools.partial(self._leave, subscriber))

    async def _serve(self, request: web.Request, subscriber: Subscriber) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        response.force_close()  # the connection is not used again
        try:
            _notice_vanished_peers(request)
            await response.prepare(request)
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await _write(response, Hello(replica=self._replica, heartbeat_s=HEARTBEAT_S))
            self._post(functools.partial(self._catch_up, subscriber))
            await self._stream(subscriber, response)
        except (ConnectionError, TimeoutError) as error:
            pod = f"{subscriber.hello.namespace}/{subscriber.hello.pod_name}"
            logger.info("a subscriber was lost", extra=seldom(type(error).__name__, pod=pod, error=repr(error)))
            if request.transport is not None:
                request.transport.abort()  # do not wait for unsent data
        return response

    def _catch_up(self, subscriber: Subscriber) -> None:
        """On the controller's loop."""
        if subscriber.is_pod:
            self._notifier.catch_up(subscriber)
            self._trust.notify([subscriber])

    async def _stream(self, subscriber: Subscriber, response: web.StreamResponse) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as patience:
            heartbeat = Heartbeat(subscriber, lambda: patience.reschedule(loop.time()))
            try:
                while (outgoing := await subscriber.next()) is not None:
                    heartbeat.writing = True
                    await _write(response, outgoing.make())
                    outgoing.sent()
                    heartbeat.writing = False
                    if outgoing.written is not nothing:
                        self._post(outgoing.written, after_s=_KEEP_WITHIN_S)
            finally:
                heartbeat.stop()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(response.write_eof(), _WRITE_TIMEOUT_S)

    async def _acknowledge(self, request: web.Request) -> web.Response:
        return await self._take(request, Acknowledgement)

    async def _report(self, request: web.Request) -> web.Response:
        return await self._take(request, Report)

    async def _forecast(self, request: web.Request) -> web.Response:
        return await self._take(request, Forecast)

    async def _resumption(self, request: web.Request) -> web.Response:
        return await self._take(request, Resumption)

    async def _snapshot(self, request: web.Request) -> web.Response:
        return await self._take(request, SnapshotReport)

    async def _stall(self, request: web.Request) -> web.Response:
        return await self._take(request, Stall)

    async def _trouble(self, request: web.Request) -> web.Response:
        return await self._take(request, Trouble)

    async def _take(self, request: web.Request, kind: type[_FromSession]) -> web.Response:
        """Handles a message of a session that has subscribed before."""
        try:
            message = await _read(request, kind)
            answer = await self._on_core(self._take_in(request.headers.get("Authorization", ""), message))
        except UnknownPreemption as error:
            return self._refuse(request, RequestRefused(404, AuthenticationFailure.UNKNOWN_PREEMPTION, str(error)))
        except client.KubeError as error:
            return self._refuse(request, RequestRefused(503, AuthenticationFailure.NOT_READY, f"try again ({error})"))
        except ValidationError as error:
            return self._refuse(request, RequestRefused(400, AuthenticationFailure.BAD_MESSAGE, str(error)))
        except RequestRefused as refusal:
            return self._refuse(request, refusal)
        return web.Response(status=204) if answer is None else web.Response(text=answer.to_json())

    async def _take_in(self, authorization: str, message: _FromSession) -> SaveEvery | None:
        """On the controller's loop."""
        if isinstance(message, Acknowledgement) and self._subscribers.is_connected(message.pod_uid, message.session):
            # A gang's acknowledgements come all at once, too many to review each token. Only the two ends of an open
            # stream know its session, and the token of this stream was reviewed.
            pod = self._authenticator.living(message.pod_uid)
        else:
            early = isinstance(message, Stall)  # ``attach`` may stall before the session subscribes
            pod = await self._admit(authorization, message.pod_uid, message.session, early=early)
        if not isinstance(message, Acknowledgement) and message.workload_uid != pod.workload_uid:
            raise _mismatch(json_key("workload_uid"), message.workload_uid, pod.workload_uid)
        return await self._reports.take(pod, message)

    async def _admit_subscriber(self, authorization: str, subscriber: Subscriber) -> None:
        """On the controller's loop: connects the subscriber if its message matches its pod."""
        if self.is_canary(authorization, subscriber):
            subscriber.is_pod = False
            return
        hello = subscriber.hello
        pod = await self._admit(authorization, hello.pod_uid, hello.session, early=True)
        for field, value, expected in (
            ("namespace", hello.namespace, pod.namespace),
            ("pod_name", hello.pod_name, pod.name),
            (json_key("workload_uid"), hello.workload_uid, pod.workload_uid),
            ("restart_attempt", hello.restart_attempt, pod.restart_attempt),
        ):
            if value != expected:
                raise _mismatch(field, value, expected)
        self._subscribers.connect(subscriber)
        self._reports.subscribed(pod, hello)
        self._metrics.subscriptions.set(len(self._subscribers))

    def _leave(self, subscriber: Subscriber) -> None:
        """On the controller's loop."""
        self._subscribers.remove(subscriber)
        self._metrics.subscriptions.set(len(self._subscribers))

    async def _close_subscribers(self) -> None:
        """On the controller's loop."""
        self._subscribers.close()

    async def _on_core(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Runs ``work`` on the controller's loop, after what was handed over before. A cancelled request cancels it."""
        if self._core is None:
            work.close()
            raise RequestRefused(503, AuthenticationFailure.NOT_READY, "this replica is still starting; try again")
        return await self._core.run(work, self._here())

    def _post(self, work: Callable[[], None], *, after_s: float = 0.0) -> None:
        """Runs ``work`` on the controller's loop, after everything that was handed over before."""
        if self._core is not None:
            self._core.post(work, after_s=after_s)

    def _here(self) -> LoopCalls:
        """Calls on the loop of the requests."""
        if self._streams is None:
            self._streams = LoopCalls(asyncio.get_running_loop())
        return self._streams

    async def _admit(self, authorization: str, pod_uid: str, session: str, *, early: bool = False) -> Pod:
        """On the controller's loop. ``early``: the session need not have subscribed."""
        if not self._notifier.ready:
            raise RequestRefused(503, AuthenticationFailure.NOT_READY, "this replica is still starting; try again")
        pod = await self._authenticator.admit(authorization, pod_uid)
        subscribers = self._subscribers
        if subscribers.is_stopped(pod_uid, session) or not (early or subscribers.speaks_for(pod_uid, session)):
            message = f"session: found {session!r}; a newer one followed it, or another one of the pod is connected"
            raise RequestRefused(403, AuthenticationFailure.STOPPED_SESSION, message)
        return pod

    def _refuse(self, request: web.Request, refusal: RequestRefused) -> web.Response:
        self._metrics.refused.labels(reason=refusal.reason).inc()
        logger.warning(
            "request refused",
            extra=seldom(refusal.reason, path=request.path, peer=request.remote, why=str(refusal)),
        )
        return web.Response(status=refusal.status, text=str(refusal))


async def _read(request: web.Request, kind: type[_Any]) -> _Any:
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            body = await request.clone(client_max_size=_LARGEST_MESSAGE_BYTES).read()
        return kind.from_json(body)
    except (WireError, RecursionError) as error:  # RecursionError: a body of nothing but brackets
        raise RequestRefused(400, AuthenticationFailure.BAD_MESSAGE, str(error)) from error
    except web.HTTPRequestEntityTooLarge as error:
        message = f"the body: found more than the {_LARGEST_MESSAGE_BYTES} bytes that are expected at most"
        raise RequestRefused(413, AuthenticationFailure.BAD_MESSAGE, message) from error
    except TimeoutError as error:
        message = f"the body: not here within {_READ_TIMEOUT_S:.0f} s; send it again"
        raise RequestRefused(408, AuthenticationFailure.BAD_MESSAGE, message) from error


def _mismatch(field: str, value: object, expected: object) -> RequestRefused:
    message = f"{field}: found {value!r}, expected {expected!r}, as the pod has it"
    return RequestRefused(403, AuthenticationFailure.OTHER_POD, message)


async def _write(response: web.StreamResponse, frame: Frame) -> None:
    await response.write(frame.to_json().encode() + b"\n")


def _notice_vanished_peers(request: web.Request) -> None:
    transport = request.transport
    peer = transport.get_extra_info("socket") if transport is not None else None
    if peer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)


_START_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 5.0


class ChannelThread:
    """Serves the channel on its own thread: an event loop, a port, and the connections.

    Every pod of the cluster can reach the channel. On a separate loop, thousands of TLS handshakes and requests delay
    neither a webhook's answer nor a decision, which belong to the controller's loop. Who runs where:

    * this thread's loop: accepting, TLS, HTTP, the tasks of requests and streams (``Channel``), renewal of the
      certificate, and measuring how late the loop is;
    * the controller's loop: everything that reads or changes what is known. ``Channel`` hands such work over and awaits
      it.

    ``start`` and ``stop`` are called on the controller's loop. It must run until ``stop`` has returned, because the
    streams hand over work as they end. The thread ends with ``stop`` or with a failure, which ``ended`` raises.

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
            logger.error("the channel's thread did not end", extra=about(waited_s=_STOP_TIMEOUT_S))

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError:
            self._ended.set_result(None)
        except BaseException as error:  # ended() raises it on the controller's loop
            logger.exception("the channel's thread failed")
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
