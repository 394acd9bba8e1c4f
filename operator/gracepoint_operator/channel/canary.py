"""A subscriber of the replica itself, which is sent a notice now and then.

The notice takes the way of every notice: from the controller's loop into the queue of a stream, to the channel's loop,
through TLS with the certificate that is served, to a client that trusts the same authorities as pods. So the canary
notices what no other check does: a blocked loop of the channel, a listener that accepts nothing, a certificate that has
expired or that nobody trusts. It does not see whether the cluster is watched; the ages of the watches show that.

One task on the controller's event loop, which runs until it is cancelled. The channel knows the canary by a secret of
this process. The canary is no pod: it counts as none, and no preemption reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import math
import secrets
import ssl
import time
from collections.abc import Callable

from gracepoint.wire import names
from gracepoint.wire.frames import Frame, Notice
from gracepoint.wire.messages import Confidence, Mode, Subscription
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber
from gracepoint_operator.logs import about
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
