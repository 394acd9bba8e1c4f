"""A subscriber of the replica itself, which is sent a notice now and then.

It takes the way of every notice: from the controller's loop into the queue of a stream, to the channel's loop, through
TLS with the certificate that is served, to a client that trusts what pods are told to trust. So it notices what no
other check does: a blocked loop of the channel, a listener that accepts nothing, a certificate that has expired or
that nobody trusts. It does not see whether the cluster is watched; the ages of the watches show that.

One task on the controller's event loop, which runs until it is cancelled. The channel knows the canary by a secret of
this process. The canary is no pod: it counts as none, and no preemption reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import logging
import math
import secrets
import ssl
import time
from collections.abc import Callable, Iterable

from gracepoint.wire import names
from gracepoint.wire.frames import Frame, Notice, Ping, Trust, trust_digest
from gracepoint.wire.messages import Confidence, Mode, Subscription
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber, Subscribers
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics

log = logging.getLogger(__name__)

#: Seconds between two notices.
EVERY_S = 10.0
#: The replica is not ready when no notice arrived for this time.
SILENT_S = 45.0
#: Seconds for a connection, and for a notice to arrive.
_WITHIN_S = 5.0
#: After this many notices the canary connects anew, so that the handshake is tried as well.
_NOTICES_A_STREAM = 30
_WORKLOAD = "gracepoint-canary"


class Canary:
    """A subscriber of the replica itself, which is sent a notice now and then.

    Args:
        metrics: Gets the latency and the failures.
        authorities: Returns the PEM certificates that pods are told to trust.
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
                    log.error("the canary was not notified", extra=about(error=failure, silent_s=self.silent_s))
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
                    log.info("the canary is notified again")
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


INTERVAL_S = 5.0
#: A write that has not ended at the third beat has had at least ten seconds.
_BEATS_OF_A_WRITE = 3


# The heartbeat of a subscription's stream: a ping when there is nothing else to send, and the end of a stuck write.
#
# Each stream has one timer, which repeats until ``stop``. The frames do not touch it: a timer for each write, and one
# for each wait for a frame, took a third of the time that it takes to tell a gang. It runs on the stream's event loop.


class Heartbeat:
    """The heartbeat of one stream. It must be created on the stream's event loop.

    Args:
        subscriber: Gets a ping at each beat at which no frame waits and none is written.
        give_up: Called once, if a write is stuck.

    Attributes:
        writing: True while the stream's task writes a frame. The task sets it.
    """

    def __init__(self, subscriber: Subscriber, give_up: Callable[[], None]) -> None:
        self.writing = False
        self._subscriber = subscriber
        self._give_up = give_up
        self._held_up = 0  # how many beats in a row found a write in progress
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._go_on)

    def beat(self) -> None:
        """Handles one beat."""
        self._held_up = self._held_up + 1 if self.writing else 0
        if self._held_up == _BEATS_OF_A_WRITE:
            self._give_up()
        elif self._subscriber.is_idle and not self.writing:
            self._subscriber.send(Outgoing(Ping))

    def stop(self) -> None:
        """Stops the timer."""
        self._timer.cancel()

    def _go_on(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._go_on)
        self.beat()


# Tells pods which authorities to trust. Runs on the controller's event loop.
#
# It is level-based like the notifier: every subscriber whose authorities differ from the operator's is sent these, when
# they change and when it connects.


class TrustNotifier:
    """Sends the authorities.

    Args:
        subscribers: The pods that are connected to this replica.
    """

    def __init__(self, subscribers: Subscribers) -> None:
        self._subscribers = subscribers
        self._authorities = ""
        self._digest = ""

    def change(self, authorities: str) -> None:
        """Tells all subscribers.

        Args:
            authorities: PEM certificates.
        """
        digest = trust_digest(authorities)
        if not authorities or digest == self._digest:
            return
        self._authorities, self._digest = authorities, digest
        self.tell(self._subscribers.all())

    def tell(self, subscribers: Iterable[Subscriber]) -> None:
        """Tells those of the subscribers that have other authorities."""
        pods = 0
        for subscriber in subscribers:
            if self._digest and subscriber.trusts not in (None, self._digest):
                subscriber.trusts = self._digest
                subscriber.send(Outgoing(functools.partial(Trust, authorities=self._authorities)))
                pods += 1
        if pods:
            log.info("pods told which authorities to trust", extra=about(pods=pods, digest=self._digest))
