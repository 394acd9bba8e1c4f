"""The operator's HTTP servers, and the thread that the controller runs on.

There are three ports: HTTPS for pods (the channel), HTTPS for the API server (the webhooks, on a separate port so
that a NetworkPolicy can separate the two), and plain HTTP for probes and metrics. If readers of the metrics must show
who they are, these have a fourth port, with HTTPS. Each has limits for connections (``limited_port``). All but the
channel are served on the controller's event loop. The channel has a separate thread and loop
(``channel.service``), because every pod can reach it: what pods do there does not delay an answer to the API
server.

``Server`` is started and stopped from the main thread. Its own thread runs ``asyncio.run`` until ``stop`` cancels it,
or until a part of it or the channel's thread fails. Then ``on_failure`` is called, so that the process ends: it must
not live on when it can no longer be reached. ``trust`` renews the certificate of both threads; new connections get the
new one.
"""

from __future__ import annotations

import asyncio
import asyncio.sslproto
import concurrent.futures
import contextlib
import dataclasses
import logging
import threading
import urllib.parse
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from gracepoint_operator.channel.service import ChannelThread
from gracepoint_operator.controller import Controller
from gracepoint_operator.event_loop import collect_in_portions
from gracepoint_operator.health import Canary, Health, MetricsPage, Readers
from gracepoint_operator.limited_port import CloseReason, ConnectionLimits, LimitedPort
from gracepoint_operator.logs import about
from gracepoint_operator.trust.certificates import Certificates, TrustKeeper, TrustPlaces, follow, new_context
from gracepoint_operator.webhooks import Admission
from gracepoint_operator.webhooks import add_routes as add_admission_routes
from gracepoint_operator.webhooks.admission import DEFAULT_REQUESTS_PER_NAMESPACE
from gracepoint_operator.webhooks.installation import log_overlapping_releases

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 30.0
_CERTIFICATE_AGAIN_S = 1.0
_STOP_TIMEOUT_S = 8.0
#: For API servers to call the other replica. One that calls a webhook more rarely hardly does so while this one ends.
_SEND_ON_S = 2.0
#: asyncio holds a buffer of 256 KiB for each TLS connection, which for a thousand pods is more than the operator may
#: use in all. A TLS record has at most this, and the channel's messages are smaller still.
_TLS_BUFFER_BYTES = 16 * 1024
#: The API server's connections are few, and serve many requests each; whoever else connects shows no path that exists.
_WEBHOOK_LIMITS = ConnectionLimits(
    request_s=300.0,
    pending_s=15.0,
    at_once=256,
    at_once_of_address=64,
    a_second_of_address=10.0,
    bytes=128 * 1024,  # of a request whose path has not been looked at yet
    bytes_at_once=4 * 1024 * 1024,
    replaces=True,
    kept=256,
)
#: Probes and scrapes are answered at once.
_HEALTH_LIMITS = ConnectionLimits(
    pending_s=15.0,
    at_once=128,
    at_once_of_address=32,
    a_second_of_address=20.0,
    bytes=16 * 1024,
    bytes_at_once=1024 * 1024,
    replaces=True,
)


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """Where one replica listens, and what it admits.

    Attributes:
        webhook_token: The secret in the webhooks' paths.
        service_url: Where pods reach the channel.
        https_port: Port of the channel. 0: the kernel chooses one.
        webhook_port: Port of the webhooks. 0: the kernel chooses one.
        health_port: Port of probes and metrics. 0: the kernel chooses one.
        metrics_port: Port of the metrics, for readers who may GET them by the API server's own rules. 0: the kernel
            chooses one. None: the metrics are on the health port, for anybody.
        host: Address to listen on. None: all addresses.
        limits: Limits for connections to the channel whose callers are not authenticated.
        trust: Where certificate and trusted authorities are kept in the API.
        requests_per_namespace: At most so many PreemptionRequests are in one namespace.
        canary: True if a subscriber of the replica itself is notified now and then.
    """

    webhook_token: str = dataclasses.field(repr=False)
    service_url: str
    https_port: int = 0
    webhook_port: int = 0
    health_port: int = 0
    metrics_port: int | None = None
    host: str | None = None
    limits: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)
    trust: TrustPlaces = dataclasses.field(default_factory=TrustPlaces)
    requests_per_namespace: int = DEFAULT_REQUESTS_PER_NAMESPACE
    canary: bool = False

    @property
    def service_host(self) -> str:
        """The name by which pods know the channel."""
        return urllib.parse.urlsplit(self.service_url).hostname or "localhost"


class Server:
    """The controller and all ports, on their own thread.

    Args:
        core: The controller, which runs on the server's loop.
        certificates: For both HTTPS ports.
        settings: Where it listens, and what it admits.

    Attributes:
        https_port, webhook_port, health_port, metrics_port: The ports that are listened on, once started.
    """

    def __init__(self, core: Controller, certificates: Certificates, settings: ServerSettings) -> None:
        self._core = core
        self._api = core.api
        self._metrics = core.metrics
        self._certificates = certificates
        self._settings = settings
        self.https_port = settings.https_port
        self.webhook_port = settings.webhook_port
        self.health_port = settings.health_port
        self.metrics_port = settings.metrics_port
        self._admission = Admission(
            core.urgent_api,
            core.cache,
            core.evictions,
            certificates,
            settings.service_url,
            settings.requests_per_namespace,
        )
        context = new_context()
        self._channel = ChannelThread(
            core.channel,
            context,
            lambda: follow(certificates, context),
            settings.limits,
            core.metrics,
            settings.host,
            settings.https_port,
        )
        self._canary = Canary(core.metrics, lambda: certificates.ca) if settings.canary else None
        if self._canary is not None:
            core.channel.is_canary = self._canary.admits
        self._keeper = TrustKeeper(
            core.api, certificates, settings.trust, core.metrics, capability_keys=core.capability_keys
        )
        certificates.on_change = self._trust_changed
        certificates.show_in(core.metrics)
        self._listening = threading.Event()
        self._stopped = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self._canary_task: asyncio.Task[None] | None = None
        self._webhook_port: LimitedPort | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: BaseException | None = None

    def start(self, on_failure: Callable[[], None]) -> None:
        """Returns when all ports are listened on.

        Args:
            on_failure: Called from the server's thread if it ends without ``stop``.

        Raises:
            RuntimeError: It did not come up; says why.
        """
        thread = threading.Thread(target=self._main, args=(on_failure,), name="server", daemon=True)
        thread.start()
        if not self._listening.wait(_START_TIMEOUT_S) or self._failure is not None:
            reason = self._failure or f"not listening after {_START_TIMEOUT_S:.0f} s"
            raise RuntimeError(f"the server did not start: {reason!r}") from self._failure

    def send_on(self) -> None:
        """Ends the channel, so that the pods connect to the other replica at once, and has API servers call that one.
        Waits for a bounded time.

        Call it while the cluster is still watched: a pod must not wait for notices here when nobody looks any more, and
        an API server must not wait for an answer.
        """
        if self._loop is None or self._stopped.is_set():
            return
        with contextlib.suppress(RuntimeError, concurrent.futures.TimeoutError):  # the loop has ended, or is blocked
            asyncio.run_coroutine_threadsafe(self._send_on(), self._loop).result(_STOP_TIMEOUT_S)

    async def _send_on(self) -> None:
        if self._canary_task is not None:
            self._canary_task.cancel()
        webhooks = [] if self._webhook_port is None else [self._webhook_port.send_on(_SEND_ON_S)]
        await asyncio.gather(self._channel.stop(), *webhooks)

    def stop(self) -> None:
        """Ends the core and all ports; waits for the last writes, for a bounded time."""
        if self._loop is not None and self._task is not None and not self._stopped.is_set():
            self._loop.call_soon_threadsafe(self._task.cancel)
            if not self._stopped.wait(_STOP_TIMEOUT_S):
                logger.error("the server did not end", extra=about(waited_s=_STOP_TIMEOUT_S))

    def _main(self, on_failure: Callable[[], None]) -> None:
        try:
            asyncio.run(self._run())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # any error: the process must not live on without its server
            self._failure = error
            logger.exception("the server failed")
            on_failure()
        finally:
            self._stopped.set()
            self._listening.set()

    async def _run(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        asyncio.sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES
        async with self._ports() as ports, asyncio.TaskGroup() as tasks:
            for port in ports:
                tasks.create_task(port.accept(), name="accept")
            tasks.create_task(self._core.run(), name="core")
            tasks.create_task(self._channel.ended(), name="channel")
            tasks.create_task(self._certificates.watch(), name="certificates")
            tasks.create_task(self._keeper.run(), name="trust")
            overlaps = log_overlapping_releases(self._api, self._settings.service_host, self._core.watches.namespaces)
            tasks.create_task(overlaps, name="other releases")
            if self._canary is not None:
                host = self._settings.host or "localhost"
                self._canary_task = tasks.create_task(
                    self._canary.run(host, self.https_port, self._settings.service_host), name="canary"
                )
            tasks.create_task(collect_in_portions(self._is_quiet), name="collector")
            await asyncio.sleep(0)  # the controller accepts objects from its first step on
            self._listening.set()

    def _trust_changed(self) -> None:
        """On the controller's loop."""
        self._core.trust_notifier.set_authorities(self._certificates.ca)
        self._keeper.touch()

    async def _certificate(self) -> None:
        """Waits until there is a certificate to serve. The operator may have to make it first."""
        while self._certificates.served is None:
            await self._keeper.once()
            if self._certificates.served is None:
                await asyncio.sleep(_CERTIFICATE_AGAIN_S)
        self._core.trust_notifier.set_authorities(self._certificates.ca)

    def _is_quiet(self) -> bool:
        return not self._core.cache.preemptions.disrupted_workload_uids()

    @contextlib.asynccontextmanager
    async def _ports(self) -> AsyncIterator[list[LimitedPort]]:
        """Listens on all ports. Those that this loop serves are given."""
        webhooks, plain = web.Application(), web.Application()
        ports: list[LimitedPort] = []
        try:
            await self._certificate()
            context = self._certificates.context
            webhook_port = LimitedPort("webhooks", webhooks, context, _WEBHOOK_LIMITS, self._closed("webhooks"))
            self._webhook_port = webhook_port
            add_admission_routes(
                webhooks,
                self._admission,
                self._settings.webhook_token,
                self._metrics.count_webhook_refused,
                webhook_port.keep,
            )
            health = LimitedPort("health", plain, None, _HEALTH_LIMITS, self._closed("health"), keepalive=False)
            Health(self._core, self._channel.lag, self._canary).add_routes(plain)
            if self.metrics_port is None:
                MetricsPage(self._metrics).add_routes(plain)
            self.https_port = await self._channel.start()
            ports = [webhook_port, health]
            self.webhook_port = await webhook_port.start(self._settings.host, self.webhook_port)
            self.health_port = await health.start(self._settings.host, self.health_port)
            numbers = {"https": self.https_port, "webhooks": self.webhook_port, "health": self.health_port}
            if self.metrics_port is not None:
                secure = web.Application()
                MetricsPage(self._metrics, Readers(self._api)).add_routes(secure)
                ports.append(
                    LimitedPort("metrics", secure, context, _HEALTH_LIMITS, self._closed("metrics"), keepalive=False)
                )
                numbers["metrics"] = self.metrics_port = await ports[-1].start(self._settings.host, self.metrics_port)
            logger.info("listening", extra=about(**numbers))
            yield ports
        finally:
            await asyncio.gather(self._channel.stop(), *(port.close() for port in ports))

    def _closed(self, port: str) -> Callable[[str], None]:
        """Counts the connections to a port that are closed before their callers are known."""
        for reason in CloseReason:  # from 0 on, so that increase() sees the first connections
            self._metrics.port_connections_closed.labels(port=port, reason=reason)
        return lambda reason: self._metrics.port_connections_closed.labels(port=port, reason=reason).inc()
