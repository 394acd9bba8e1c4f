"""kopf's part: it watches, and hands every object to the core. The only module that imports kopf.

Handlers are ``on.event`` only. Those put no finalizer on anything, store nothing in annotations and patch
nothing, so a pod's life is never held up by the operator; and kopf retries none of them, as there is nothing in
them that can fail. Peering is off: both replicas are active. Kinds that the cluster does not have yet are
watched as soon as their CRDs come.

Threads: one for all required kinds, and one for each optional kind, as a kopf that meets an error which it does not
retry ends all its watches. ``Watches.start`` starts them from the main thread. Each runs kopf on an event loop of its
own, and runs it again, after a pause, whatever ends it; only ``Watches.close`` ends the thread. While the API server
cannot be reached, or answers with an error, kopf retries each request without end. How each watch fares is in
``watch_state``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import kopf

from gracepoint.wire.names import API_VERSION, GROUP
from gracepoint_operator.cache.resync import OPTIONAL, SELECTORS
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.backoffs import Backoffs
from gracepoint_operator.kube.client import USER_AGENT, KubeClient
from gracepoint_operator.observability.logs import about
from gracepoint_operator.observability.metrics import Metrics

log = logging.getLogger(__name__)

#: By group, version and plural; without a version kopf watches the one that the cluster prefers.
_KINDS: dict[tuple[str, str | None, str], kinds.Kind] = {
    ("", "v1", "nodes"): kinds.NODES,
    ("", "v1", "pods"): kinds.PODS,
    ("batch", "v1", "jobs"): kinds.JOBS,
    ("jobset.x-k8s.io", "v1alpha2", "jobsets"): kinds.JOBSETS,
    ("karpenter.sh", "v1", "nodeclaims"): kinds.NODE_CLAIMS,
    ("kueue.x-k8s.io", None, "workloads"): kinds.KUEUE_WORKLOADS,
    (GROUP, API_VERSION, "checkpointpolicies"): kinds.POLICIES,
    (GROUP, API_VERSION, "preemptions"): kinds.PREEMPTIONS,
}
_BY_PLURAL = {(group, plural): kind for (group, _, plural), kind in _KINDS.items()}

_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 10.0
#: The API server ends a watch after this, with a bookmark shortly before; kopf then goes on from there.
_WATCH_S = 25  # whole seconds: the API server refuses 25.0
#: A watch on which nothing came for so long is dead, as its connection may be without either side's noticing.
_INACTIVE_S = 30.0
#: Between the attempts of one request.
REQUEST_BACKOFFS = Backoffs(0.2, 5.0)
#: Before kopf is run again, or logs in again.
_RUN_BACKOFFS = Backoffs(0.5, 30.0)
#: kopf may take so long to end by itself; then its tasks are cancelled so often, and waited for so long each time.
_KOPF_ENDS_S = 1.0
_CANCELLATIONS = 4
_CANCELLED_S = 0.5
#: Connections are closed by what the loop does after it was told to close them.
_CONNECTIONS_CLOSE_S = 0.1
#: What ran so long begins with the shortest pause again.
_RAN_WELL_S = 60.0


class _Connection(kopf.ConnectionInfo):
    """Says who we are: kopf's own requests would be of ``kopf``."""

    def as_http_headers(self) -> dict[str, str]:
        return {**super().as_http_headers(), "User-Agent": USER_AGENT}


class Watches:
    """All watches, each group of kinds in a thread of its own.

    Args:
        core: Gets every object.
        api: Its credentials are used.
        metrics: Counts how often a thread began anew.
        replica: This replica's name. kopf's own guess asks for the user's name, which a container's may lack.
        backoffs: The pauses between the attempts of one request.
    """

    def __init__(
        self,
        core: Controller,
        api: KubeClient,
        metrics: Metrics,
        *,
        replica: str,
        backoffs: Iterable[float] = REQUEST_BACKOFFS,
    ) -> None:
        groups = {"required": SELECTORS.keys() - OPTIONAL} | {kind.plural: {kind} for kind in OPTIONAL}
        self._watchers = [
            _Watcher(core, api, metrics, name, watched, replica=replica, backoffs=backoffs)
            for name, watched in sorted(groups.items())
        ]
        core.watches.on_rewind = self.begin_anew

    def start(self) -> None:
        """Begins to watch."""
        for watcher in self._watchers:
            watcher.start()

    def begin_anew(self) -> None:
        """Lists and watches everything anew. Callable from any thread; does not wait for it."""
        for watcher in self._watchers:
            watcher.begin_anew()

    def close(self, timeout_s: float) -> None:
        """Ends all watches; waits for at most ``timeout_s`` for all of them."""
        for watcher in self._watchers:
            watcher.stop()
        until = time.monotonic() + timeout_s
        for watcher in self._watchers:
            watcher.join(max(0.0, until - time.monotonic()))
            if watcher.is_alive():
                log.error("watches did not end", extra=about(thread=watcher.name, waited_s=timeout_s))


class _Watcher(threading.Thread):
    """Runs kopf for some kinds, again and again. ``stop`` and ``begin_anew`` are called from other threads."""

    def __init__(
        self,
        core: Controller,
        api: KubeClient,
        metrics: Metrics,
        name: str,
        watched: Collection[kinds.Kind],
        *,
        replica: str,
        backoffs: Iterable[float],
    ) -> None:
        super().__init__(name=f"watch {name}", daemon=True)
        self._core = core
        self._api = api
        self._metrics = metrics
        self._watched = watched
        self._replica = replica
        self._backoffs = backoffs
        self._stopped = threading.Event()
        self._round_ends = threading.Event()  # of one run of kopf; another one for each

    def stop(self) -> None:
        self._stopped.set()
        self._round_ends.set()

    def begin_anew(self) -> None:
        self._round_ends.set()

    def run(self) -> None:
        self._core.watches.asked(self.name)
        pauses = _Pauses(_RUN_BACKOFFS)
        while not self._stopped.is_set():
            self._round_ends = threading.Event()
            if self._stopped.is_set():  # set between the two lines above, on the event of the round before
                break
            error = self._run_once(self._round_ends)
            if self._stopped.is_set():
                break
            pause_s = pauses.next_s()
            self._metrics.watch_restarts.labels(thread=self.name).inc()
            log.error(
                "watches ended, and begin anew", extra=about(thread=self.name, error=error, in_s=round(pause_s, 1))
            )
            self._core.watches.asked(self.name)
            self._stopped.wait(pause_s)
        self._core.watches.ended(self.name)

    def _run_once(self, ends: threading.Event) -> str:
        """Returns why it ended."""
        registry = kopf.OperatorRegistry()
        logins = _Pauses(_RUN_BACKOFFS)
        over = asyncio.Event()
        sessions: list[aiohttp.ClientSession] = []

        @kopf.on.login(registry=registry)
        async def login(**_: Any) -> kopf.AiohttpSession:
            # Credentials that the API server refuses are asked for again at once.
            await asyncio.sleep(logins.next_s(first_s=0.0))
            made = self._session()
            sessions.append(made.aiohttp_session)
            return made

        @kopf.on.cleanup(registry=registry)
        async def release(**_: Any) -> None:
            ends.set()  # kopf waits for the flag in a thread
            over.set()

        watch_all(registry, self._core, self._watched)
        watching = kopf.operator(
            registry=registry,
            settings=settings(self._backoffs),
            clusterwide=True,
            standalone=True,
            identity=cast(Any, self._replica),  # a NewType of str that kopf does not export
            stop_flag=ends,
        )
        return _run_on_a_loop(watching, over, sessions)

    def _session(self) -> kopf.AiohttpSession:
        """A session of kopf's that tells ``watch_state`` of its requests. Made on the loop that uses it."""
        credentials = self._api.credentials()
        connection = _Connection(
            server=credentials.server,
            ca_path=credentials.ca_path,
            insecure=credentials.insecure,
            scheme=credentials.scheme,
            token=credentials.token,
            certificate_path=credentials.certificate_path,
            private_key_path=credentials.private_key_path,
        )
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=connection.as_ssl_context()),
            headers=connection.as_http_headers(),
            trace_configs=[_trace(self.name, self._core.watches)],
        )
        return kopf.AiohttpSession(server=credentials.server, aiohttp_session=session)


def _run_on_a_loop(
    watching: Coroutine[Any, Any, None], over: asyncio.Event, sessions: list[aiohttp.ClientSession]
) -> str:
    """Runs kopf on a loop of its own; returns why it ended.

    kopf begins to end when ``over`` is set. Where one of its watches has failed it may then wait for ever for the
    others, which swallow a first cancellation and wait for credentials that nobody fetches any more. So what has not
    ended in time is cancelled again, and given up in the end; ``sessions`` are closed then.
    """
    loop = asyncio.new_event_loop()

    async def run() -> str:
        task = asyncio.create_task(watching)
        begins_to_end = asyncio.create_task(over.wait())
        await asyncio.wait({task, begins_to_end}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({task}, timeout=_KOPF_ENDS_S)
        for _ in range(_CANCELLATIONS):
            others = asyncio.all_tasks() - {asyncio.current_task(), task}
            if task.done() and not others:
                break
            for other in others if task.done() else {task, *others}:
                other.cancel()
            await asyncio.wait({task, *others}, timeout=_CANCELLED_S)
        for session in sessions:
            await session.close()
        await asyncio.sleep(_CONNECTIONS_CLOSE_S)
        if not task.done():
            return "kopf did not end, and was given up"
        if task.cancelled() or task.exception() is None:
            return "told to begin anew"
        return repr(task.exception())  # whatever kopf does not retry

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


class _Pauses:
    """Pauses before something is done again; the shortest ones again after it went well for a while."""

    def __init__(self, backoffs: Backoffs, clock: Callable[[], float] = time.monotonic) -> None:
        self._backoffs = backoffs
        self._clock = clock
        self._pauses: Iterator[float] = iter(backoffs)
        self._at: float | None = None

    def next_s(self, *, first_s: float | None = None) -> float:
        """How long to wait now; ``first_s``: the very first time, or after it went well."""
        now, before = self._clock(), self._at
        if before is None or now - before > _RAN_WELL_S:
            self._pauses = iter(self._backoffs)
            pause_s = next(self._pauses) if first_s is None else first_s
        else:
            pause_s = next(self._pauses)
        self._at = now + pause_s
        return pause_s


def _trace(thread: str, watches: WatchState) -> aiohttp.TraceConfig:
    async def begins(_: object, context: SimpleNamespace, params: aiohttp.TraceRequestStartParams) -> None:
        context.kind = _kind_at(params.url.path)
        context.is_list = "watch" not in params.url.query
        since = params.url.query.get("resourceVersion", "")
        watches.asked(thread, context.kind, int(since) if since.isdecimal() else 0)

    async def ends(_: object, context: SimpleNamespace, params: aiohttp.TraceRequestEndParams) -> None:
        if context.kind is None:
            return
        if params.response.status < 400:
            watches.answered(context.kind, listed=context.is_list)
        else:
            why = f"HTTP {params.response.status} {params.response.reason}"
            watches.failed(context.kind, why, optional=context.kind in OPTIONAL)

    async def fails(_: object, context: SimpleNamespace, params: aiohttp.TraceRequestExceptionParams) -> None:
        cancelled = isinstance(params.exception, asyncio.CancelledError)  # by a timeout of kopf's, or as it ends
        if context.kind is not None and not cancelled:
            watches.failed(context.kind, repr(params.exception), optional=context.kind in OPTIONAL)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begins)
    trace.on_request_end.append(ends)
    trace.on_request_exception.append(fails)
    return trace


def _kind_at(path: str) -> kinds.Kind | None:
    """The kind that a request lists or watches; None for anything else."""
    match path.strip("/").split("/"):
        case ["api", _, plural]:
            return _BY_PLURAL.get(("", plural))
        case ["apis", group, _, plural]:
            return _BY_PLURAL.get((group, plural))
    return None


def watch_all(
    registry: kopf.OperatorRegistry, core: Controller, watched: Collection[kinds.Kind] = SELECTORS.keys()
) -> None:
    """Has every object of these kinds handed to the core."""
    for (group, version, plural), kind in _KINDS.items():
        if kind in watched:
            _watch(registry, group, version, plural, kind, core)


def settings(backoffs: Iterable[float] = REQUEST_BACKOFFS) -> kopf.OperatorSettings:
    """kopf's settings for an operator that only watches."""
    made = kopf.OperatorSettings()
    made.posting.enabled = False
    made.posting.level = logging.CRITICAL
    made.peering.standalone = True
    made.persistence.finalizer = f"{GROUP}/never-set"
    made.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    made.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=GROUP)
    made.networking.connect_timeout = _CONNECT_TIMEOUT_S
    made.networking.request_timeout = _REQUEST_TIMEOUT_S
    made.networking.error_backoffs = backoffs
    made.watching.connect_timeout = _CONNECT_TIMEOUT_S
    made.watching.server_timeout = _WATCH_S
    made.watching.client_timeout = _WATCH_S + 30
    made.watching.inactivity_timeout = _INACTIVE_S
    made.queueing.error_delays = (0.1, 0.5, 1, 2, 5)
    made.execution.default_backoff = 1.0
    made.process.ultimate_exiting_timeout = None  # else kopf kills the process when one of its runs ends slowly
    for (group, _, plural), kind in _KINDS.items():
        selector = SELECTORS[kind]
        if selector is not None:
            made.watching.label_selectors[group, plural] = selector
    return made


def _watch(
    registry: kopf.OperatorRegistry, group: str, version: str | None, plural: str, kind: kinds.Kind, core: Controller
) -> None:
    @kopf.on.event(group=group, version=version, plural=plural, id=f"see-{plural}", registry=registry)
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        core.watches.seen(kind)
        core.feed(kind, event["type"], dict(event["object"]))
