"""The probes, on a port without TLS, and the metrics, there or on a separate port that asks who calls. The
controller's event loop answers both.

``/healthz`` fails if a restart would help. ``/readyz`` fails if pods and the API server should go to another replica.

The separate port asks as the kubelet's does: the API server says whose token it is (TokenReview), and whether that
user may GET the path (SubjectAccessReview). Answers are remembered, and at most ``_REVIEWS_AT_ONCE`` are asked for at
a time, whoever calls and how often. While the API server does not answer, who was admitted within the last hour is
admitted: that is when the metrics are needed most.

The text of the metrics is made in another thread than the loop's, at most once a second and for a fifth of the time,
however many ask. One task makes it; all requests meanwhile wait for it, or get the last text. The thread is one of the
loop's executor, which ends with the loop. A client that reads more slowly than some new texts are made is disconnected.

``Canary`` is a subscriber of the replica itself, which is sent a notice now and then. The notice takes the way of every
notice: from the controller's loop into the queue of a stream, to the channel's loop, through TLS with the certificate
that is served, to a client that trusts the same authorities as pods. So the canary notices what no other check does: a
blocked loop of the channel, a listener that accepts nothing, a certificate that has expired or that nobody trusts. It
does not see whether the cluster is watched; the ages of the watches show that. It is one task on the controller's event
loop, which runs until it is cancelled. The channel knows the canary by a secret of this process. The canary is no pod:
it counts as none, and no preemption reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import hmac
import logging
import math
import secrets
import ssl
import time
from collections.abc import Callable

from aiohttp import web

from gracepoint.wire import names
from gracepoint.wire.frames import Frame, Notice
from gracepoint.wire.messages import Confidence, Mode, Subscription
from gracepoint_operator.cache.watch_state import HANGS_AFTER_S
from gracepoint_operator.channel.notifier import Outgoing, Subscriber
from gracepoint_operator.controller import Controller
from gracepoint_operator.event_loop import LoopLag
from gracepoint_operator.kube.client import KubeClient, KubeError
from gracepoint_operator.logs import about, seldom
from gracepoint_operator.metrics import Metrics

logger = logging.getLogger(__name__)

#: Seconds between two notices.
EVERY_S = 10.0
#: The replica is not ready when no notice arrived for this time.
SILENT_S = 45.0
#: Seconds for a connection, and for a notice to arrive.
_WITHIN_S = 5.0
#: After this many notices the canary connects again, so that the handshake is tried as well.
_NOTICES_A_STREAM = 30
_WORKLOAD = "gracepoint-canary"


class Canary:
    """A subscriber of the replica itself, which is sent a notice now and then.

    Args:
        metrics: Gets the latency and the failures.
        authorities: Returns the PEM certificates of the authorities that pods trust.
    """

    def __init__(self, metrics: Metrics, authorities: Callable[[], str]) -> None:
        self._metrics = metrics
        self._authorities = authorities
        self._token = secrets.token_urlsafe(32)
        self._subscriber: Subscriber | None = None
        self._heard_at: float | None = None
        self._last_failure = ""
        metrics.canary_age_s.set_function(lambda: self.silent_s)

    @property
    def silent_s(self) -> float:
        """Seconds since the last notice arrived. Infinite if none did: a new replica is not ready before."""
        return math.inf if self._heard_at is None else time.monotonic() - self._heard_at

    def admits(self, authorization: str, subscriber: Subscriber) -> bool:
        """Whether this subscriber is the canary, and not a pod. Runs on the controller's loop."""
        # A header may hold any bytes, which aiohttp makes surrogates.
        header = authorization.encode(errors="surrogateescape")
        if not hmac.compare_digest(header, f"Bearer {self._token}".encode()):
            return False
        self._subscriber = subscriber
        return True

    async def run(self, host: str, port: int, server_name: str) -> None:
        """Runs until cancelled.

        Args:
            host: The address of this replica's channel.
            port: Its port.
            server_name: The name that the certificate is for.
        """
        while True:
            try:
                await self._stream(host, port, server_name)
            except (OSError, EOFError, ValueError, TimeoutError) as error:  # ssl.SSLError is an OSError
                self._metrics.canary_failures.inc()
                failure = repr(error)
                if failure != self._last_failure:
                    logger.error("the canary was not notified", extra=about(error=failure, silent_s=self.silent_s))
                self._last_failure = failure
                await asyncio.sleep(EVERY_S)

    async def _stream(self, host: str, port: int, server_name: str) -> None:
        context = ssl.create_default_context(cadata=self._authorities())
        async with asyncio.timeout(_WITHIN_S):
            reader, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=server_name)
        try:
            async with asyncio.timeout(_WITHIN_S):
                await self._subscribe(reader, writer)
            for number in range(_NOTICES_A_STREAM):
                async with asyncio.timeout(_WITHIN_S):
                    await self._notice(reader, f"canary-{number}")
                if self._last_failure:
                    logger.info("the canary is notified again")
                self._last_failure = ""
                await asyncio.sleep(EVERY_S)
        finally:
            writer.transport.abort()
            self._subscriber = None

    async def _subscribe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = _hello().to_json().encode()
        head = f"POST {names.PATH_SUBSCRIBE} HTTP/1.1\r\nHost: canary\r\nAuthorization: Bearer {self._token}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            raise ValueError(f"expected HTTP 200, found {status!r}")
        while (await reader.readline()).strip():
            pass  # headers

    async def _notice(self, reader: asyncio.StreamReader, name: str) -> None:
        if self._subscriber is None:
            raise EOFError("the stream is not known to the channel")
        began_s = time.monotonic()
        frame = _frame(name)
        self._subscriber.send(Outgoing(lambda: frame))
        while True:
            line = await reader.readline()
            if not line:
                raise EOFError("the stream ended")
            if line.startswith(b"{"):  # the body is in chunks, and the length of each is a line
                with contextlib.suppress(ValueError):
                    incoming = Frame.read(line)
                    if isinstance(incoming, Notice) and incoming.preemption == name:
                        break
        heard_at = time.monotonic()
        self._heard_at = heard_at
        self._metrics.canary_s.observe(heard_at - began_s)


def _hello() -> Subscription:
    return Subscription(
        namespace=_WORKLOAD,
        pod_name=_WORKLOAD,
        pod_uid=_WORKLOAD,
        session=_WORKLOAD,
        workload_uid=_WORKLOAD,
        restart_attempt=0,
        process_index=0,
        process_count=1,
        library_version="",
    )


def _frame(name: str) -> Notice:
    return Notice(
        preemption=name,
        pod_uid=_WORKLOAD,
        session=_WORKLOAD,
        workload_uid=_WORKLOAD,
        cause="Canary",
        signal="canary",
        confidence=Confidence.HINT,
        nodes=[],
        remaining_s=0.0,
        deadline="",
        mode=Mode.OBSERVE,  # a library ignores a notice of this mode
    )


METRICS_PATH = "/metrics"

#: A text of the metrics is used for this time, and for ``_RESTS`` times as long as it took to make.
_FRESH_S = 1.0
_RESTS = 4.0
_SCRAPE_S = 30.0
#: A client that has not read a text when so many newer ones were made is disconnected.
_OLD_TEXTS = 3
_PORTION_BYTES = 64 * 1024
_REVIEWS_AT_ONCE = 2
_GOOD_FOR_S = 60.0
_BAD_FOR_S = 10.0
_BELIEVED_S = 3600.0
_REMEMBERED = 1000
_LONGEST_TOKEN = 16 * 1024
#: A loop is blocked if it has not run for this long. Nothing on it takes so long.
BLOCKED_S = 30.0


class Health:
    """The routes.

    Args:
        core: Knows whether the cluster is known, and the state of the watches.
        channel_lag: When the channel's loop was last seen running.
        canary: The replica's own subscriber. None: there is none.
    """

    def __init__(self, core: Controller, channel_lag: LoopLag, canary: Canary | None) -> None:
        self._core = core
        self._channel_lag = channel_lag
        self._canary = canary

    def add_routes(self, app: web.Application) -> None:
        """Adds the routes to ``app``."""
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)

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
        if (unknown := self._core.why_not_ready()) is not None:
            return unknown
        if self._canary is not None and self._canary.silent_s > SILENT_S:
            if math.isinf(self._canary.silent_s):
                return "the replica's own subscriber got no notice yet; the log says why if that lasts"
            return f"the replica's own subscriber got no notice for {self._canary.silent_s:.0f} s; the log says why"
        return None

    async def _healthz(self, request: web.Request) -> web.Response:
        reason = self.why_dead()
        return web.Response(text="ok") if reason is None else web.Response(status=503, text=reason)

    async def _readyz(self, request: web.Request) -> web.Response:
        reason = self.why_not_ready()
        lines = [reason or "ok"]
        ages = sorted((kind.title, age_s) for kind, age_s in self._core.watches.ages().items())
        lines += [f"{plural}: the API server answered {age_s:.0f} s ago" for plural, age_s in ages]
        return web.Response(status=200 if reason is None else 503, text="\n".join(lines))


class MetricsPage:
    """The route of the metrics.

    Args:
        metrics: What it shows.
        readers: Who may read it. None: anybody.
    """

    def __init__(self, metrics: Metrics, readers: Readers | None = None) -> None:
        self._metrics = metrics
        self._readers = readers
        self._text = b""
        self._fresh_until = -math.inf
        self._making: asyncio.Task[None] | None = None
        self._number = 0  # of the text
        self._reading: dict[asyncio.WriteTransport, int] = {}  # which text each client reads

    def add_routes(self, app: web.Application) -> None:
        """Adds the route to ``app``."""
        app.router.add_get(METRICS_PATH, self._show)

    async def _show(self, request: web.Request) -> web.StreamResponse:
        if self._readers is not None:
            refused = await self._readers.why_not(request.headers.get("Authorization", ""))
            if refused is not None:
                return refused
        if self._making is None and time.monotonic() >= self._fresh_until:
            self._making = asyncio.create_task(self._make_text(), name="metrics")
        if self._making is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SCRAPE_S):
                    await asyncio.shield(self._making)
        if not self._text:
            return web.Response(status=503, text=f"the metrics: no text within {_SCRAPE_S:.0f} s; ask again")
        if request.transport is None:  # the client has gone
            return web.Response()
        transport = request.transport
        self._reading[transport] = self._number
        try:
            return await _in_portions(request, self._text)
        finally:
            del self._reading[transport]

    async def _make_text(self) -> None:
        began = time.monotonic()
        try:
            await self._metrics.update_accounts()
            self._text = await asyncio.to_thread(self._metrics.text)
            self._number += 1
            self._drop_slow_readers()
        finally:
            took_s = time.monotonic() - began
            self._fresh_until = time.monotonic() + max(_FRESH_S, _RESTS * took_s)
            self._making = None

    def _drop_slow_readers(self) -> None:
        """Ends the answers with old texts. So no more texts are in memory, however many clients do not read them."""
        for transport, number in self._reading.items():
            if number < self._number - _OLD_TEXTS:
                transport.abort()


async def _in_portions(request: web.Request, text: bytes) -> web.StreamResponse:
    """Answers with a text. A client that does not read it costs a portion of it, as the transport copies what waits."""
    response = web.StreamResponse(headers={"Content-Type": "text/plain", "Content-Length": str(len(text))})
    with contextlib.suppress(ConnectionError):  # the client has gone, or its connection was closed for another one
        await response.prepare(request)
        for begin in range(0, len(text) if request.method != "HEAD" else 0, _PORTION_BYTES):
            await response.write(text[begin : begin + _PORTION_BYTES])
    return response


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """Why somebody may not read the metrics."""

    status: int
    kind: str
    text: str

    def response(self) -> web.Response:
        logger.warning("a reader of the metrics was refused", extra=seldom(self.kind))
        headers = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return web.Response(status=self.status, text=self.text, headers=headers)


class Readers:
    """Decides who may read the metrics.

    Args:
        api: Reviews tokens, and what their users may do.
        clock: Seconds, of a clock that never goes back.
    """

    def __init__(self, api: KubeClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._clock = clock
        self._good: dict[bytes, float] = {}  # when the API server admitted it, by the token's digest
        self._bad: dict[bytes, tuple[float, _Refusal]] = {}  # when and why it was refused
        self._reviews = asyncio.Semaphore(_REVIEWS_AT_ONCE)

    async def why_not(self, authorization: str) -> web.Response | None:
        """Returns the answer to a caller who may not read the metrics. None: it may.

        Args:
            authorization: The Authorization header.
        """
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not 0 < len(token) <= _LONGEST_TOKEN:
            return _Refusal(401, "no_token", "expected the header Authorization: Bearer <token>").response()
        refusal = await self._decide(token, hashlib.sha256(token.encode()).digest())
        return None if refusal is None else refusal.response()

    async def _decide(self, token: str, digest: bytes) -> _Refusal | None:
        if self._is_known(digest):
            return self._remembered(digest)
        async with self._reviews:
            if self._is_known(digest):  # asked for meanwhile
                return self._remembered(digest)
            try:
                refusal = await self._review(token)
            except KubeError as error:
                if self._clock() - self._good.get(digest, -math.inf) < _BELIEVED_S:
                    return None
                return _Refusal(503, "not_reviewed", f"the token could not be reviewed; try again ({error})")
            self._remember(digest, refusal)
            return refusal

    async def _review(self, token: str) -> _Refusal | None:
        review = await self._api.review_token(token)
        if not review.get("authenticated"):
            return _Refusal(
                401, "bad_token", f"the token is not good: {review.get('error') or 'the API server says so'}"
            )
        user = review.get("user") or {}
        if await self._api.review_access(user, METRICS_PATH):
            return None
        text = (
            f"{user.get('username')} may not get the non-resource URL {METRICS_PATH}; bind a ClusterRole that allows it"
        )
        return _Refusal(403, "not_allowed", text)

    def _is_known(self, digest: bytes) -> bool:
        now = self._clock()
        refused_at = self._bad[digest][0] if digest in self._bad else -math.inf
        return now - refused_at < _BAD_FOR_S or now - self._good.get(digest, -math.inf) < _GOOD_FOR_S

    def _remembered(self, digest: bytes) -> _Refusal | None:
        return self._bad[digest][1] if digest in self._bad else None

    def _remember(self, digest: bytes, refusal: _Refusal | None) -> None:
        """Keeps the last ones of each sort: strangers' tokens take no place of those that are admitted."""
        self._good.pop(digest, None)
        self._bad.pop(digest, None)
        if refusal is None:
            self._good[digest] = self._clock()
        else:
            self._bad[digest] = (self._clock(), refusal)
        for digests in (self._good, self._bad):
            if len(digests) > _REMEMBERED:
                del digests[next(iter(digests))]
