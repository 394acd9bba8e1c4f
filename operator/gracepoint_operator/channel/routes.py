"""The channel's HTTP routes: pods subscribe, acknowledge, report. See ``gracepoint.wire``.

Each request is one task on the core's event loop. A subscription's task lives as long as its stream: it takes
frames from the subscriber's own queue and writes them; its ``heart`` puts a ping there where nothing else is to be
said. It ends when the client goes (aiohttp cancels it), when the pod is gone or a newer stream of it came (``closed``),
or when a write does not get through in time. So one stuck pod holds up only itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from typing import TypeVar

from aiohttp import web
from pydantic import ValidationError

from gracepoint.errors import WireError
from gracepoint.wire import names
from gracepoint.wire.messages import Acknowledgement, Forecast, Frame, Hello, Message, Report, Resumption, Subscription
from gracepoint_operator.channel.authentication import AuthenticationFailure, Authenticator, RequestRefused
from gracepoint_operator.channel.heartbeat import INTERVAL_S, Heart
from gracepoint_operator.channel.notifier import Notifier
from gracepoint_operator.channel.reports import ReportHandler, UnknownPreemption
from gracepoint_operator.channel.subscribers import Subscriber, Subscribers
from gracepoint_operator.kube import client
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics

log = logging.getLogger(__name__)

_WRITE_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 10.0
#: A report names every process that took part: room for more than 30,000. Read before anybody knows who calls.
_LARGEST_MESSAGE_BYTES = 256 * 1024
#: A peer that has vanished without a word is noticed when pings are not acknowledged for so long.
_UNACKNOWLEDGED_MS = 15_000

_Any = TypeVar("_Any", bound=Message)
_FromSession = TypeVar("_FromSession", Acknowledgement, Report, Forecast, Resumption)


class Channel:
    """The routes, on parts that live on the same event loop."""

    def __init__(
        self,
        gate: Authenticator,
        subscribers: Subscribers,
        deliverer: Notifier,
        intake: ReportHandler,
        metrics: Metrics,
        replica: str,
    ) -> None:
        self._gate = gate
        self._subscribers = subscribers
        self._deliverer = deliverer
        self._intake = intake
        self._metrics = metrics
        self._replica = replica

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post(names.PATH_SUBSCRIBE, self._subscribe)
        app.router.add_post(names.PATH_ACKNOWLEDGE, self._acknowledge)
        app.router.add_post(names.PATH_REPORT, self._report)
        app.router.add_post(names.PATH_FORECAST, self._forecast)
        app.router.add_post(names.PATH_RESUMPTION, self._resumption)

    async def _subscribe(self, request: web.Request) -> web.StreamResponse:
        try:
            hello = await self._admit_subscription(request)
        except RequestRefused as refusal:
            return self._refuse(request, refusal)
        subscriber = self._subscribers.add(hello)
        self._metrics.subscriptions.set(len(self._subscribers))
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        try:
            _notice_vanished_peers(request)
            await response.prepare(request)
            async with asyncio.timeout(_WRITE_TIMEOUT_S):
                await _write(response, Hello(replica=self._replica, heartbeat_s=INTERVAL_S))
            self._deliverer.catch_up(subscriber)
            await self._stream(subscriber, response)
        except (ConnectionError, TimeoutError) as error:
            pod = f"{hello.namespace}/{hello.pod_name}"
            log.info("a subscriber was lost", extra=about(pod=pod, error=repr(error)))
            if request.transport is not None:
                request.transport.abort()  # what did not get through is not waited for
        finally:
            self._subscribers.remove(subscriber)
            self._metrics.subscriptions.set(len(self._subscribers))
        return response

    async def _stream(self, subscriber: Subscriber, response: web.StreamResponse) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as patience:
            heart = Heart(subscriber, lambda: patience.reschedule(loop.time()))
            try:
                while (outgoing := await subscriber.next()) is not None:
                    heart.writing = True
                    await _write(response, outgoing.make())
                    heart.writing = False
                    outgoing.written()
            finally:
                heart.stop()
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

    async def _take(self, request: web.Request, kind: type[_FromSession]) -> web.Response:
        """Any message of a session that is known already."""
        try:
            message = await _read(request, kind)
            if isinstance(message, Acknowledgement) and self._subscribers.is_connected(
                message.pod_uid, message.session
            ):
                # A gang's receipts come at once, too many to review each one's token. Only the two ends of an open
                # stream know its session, and the token of this one was reviewed.
                pod = self._gate.living(message.pod_uid)
            else:
                pod = await self._admit(request, message.pod_uid, message.session)
            if not isinstance(message, Acknowledgement) and message.workload_uid != pod.workload_uid:
                raise _mismatch("jobset_uid", message.workload_uid, pod.workload_uid)
            await self._intake.take(pod, message)
        except UnknownPreemption as error:
            return self._refuse(request, RequestRefused(404, AuthenticationFailure.UNKNOWN_PREEMPTION, str(error)))
        except client.KubeError as error:
            return self._refuse(request, RequestRefused(503, AuthenticationFailure.NOT_READY, f"try again ({error})"))
        except ValidationError as error:
            return self._refuse(request, RequestRefused(400, AuthenticationFailure.BAD_MESSAGE, str(error)))
        except RequestRefused as refusal:
            return self._refuse(request, refusal)
        return web.Response(status=204)

    async def _admit_subscription(self, request: web.Request) -> Subscription:
        hello = await _read(request, Subscription)
        pod = await self._admit(request, hello.pod_uid, hello.session, subscribes=True)
        for field, found, expected in (
            ("namespace", hello.namespace, pod.namespace),
            ("pod_name", hello.pod_name, pod.name),
            ("jobset_uid", hello.workload_uid, pod.workload_uid),
            ("restart_attempt", hello.restart_attempt, pod.restart_attempt),
        ):
            if found != expected:
                raise _mismatch(field, found, expected)
        return hello

    async def _admit(self, request: web.Request, pod_uid: str, session: str, *, subscribes: bool = False) -> Pod:
        if not self._deliverer.ready:
            raise RequestRefused(503, AuthenticationFailure.NOT_READY, "this replica is still starting; try again")
        pod = await self._gate.admit(request.headers.get("Authorization", ""), pod_uid)
        known = self._subscribers
        stopped = known.is_stopped(pod_uid, session)
        if stopped or not (subscribes or known.speaks_for(pod_uid, session)):
            message = f"session: found {session!r}, which is not the pod's newest; it stopped, or never began"
            raise RequestRefused(403, AuthenticationFailure.STOPPED_SESSION, message)
        return pod

    def _refuse(self, request: web.Request, refusal: RequestRefused) -> web.Response:
        self._metrics.refused.labels(reason=refusal.reason).inc()
        log.warning(
            "request refused",
            extra=about(path=request.path, peer=request.remote, reason=refusal.reason, why=str(refusal)),
        )
        return web.Response(status=refusal.status, text=str(refusal))


async def _read(request: web.Request, kind: type[_Any]) -> _Any:
    try:
        async with asyncio.timeout(_READ_TIMEOUT_S):
            body = await request.clone(client_max_size=_LARGEST_MESSAGE_BYTES).read()
        return kind.from_json(body)
    except (WireError, RecursionError) as error:  # the latter by a body of nothing but brackets
        raise RequestRefused(400, AuthenticationFailure.BAD_MESSAGE, str(error)) from error
    except web.HTTPRequestEntityTooLarge as error:
        message = f"the body: found more than the {_LARGEST_MESSAGE_BYTES} bytes that are expected at most"
        raise RequestRefused(413, AuthenticationFailure.BAD_MESSAGE, message) from error
    except TimeoutError as error:
        message = f"the body: not here within {_READ_TIMEOUT_S:.0f} s; send it again"
        raise RequestRefused(408, AuthenticationFailure.BAD_MESSAGE, message) from error


def _mismatch(field: str, found: object, expected: object) -> RequestRefused:
    message = f"{field}: found {found!r}, expected {expected!r}, as the pod has it"
    return RequestRefused(403, AuthenticationFailure.OTHER_POD, message)


async def _write(response: web.StreamResponse, frame: Frame) -> None:
    await response.write(frame.to_json().encode() + b"\n")


def _notice_vanished_peers(request: web.Request) -> None:
    transport = request.transport
    peer = transport.get_extra_info("socket") if transport is not None else None
    if peer is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
