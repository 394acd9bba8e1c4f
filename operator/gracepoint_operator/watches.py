"""The watches: kopf watches the cluster, and every object goes to the controller.

Only this module imports kopf. ``__main__`` starts and ends it. It calls the controller and ``cache.watch_state``.

The handlers are of ``on.event`` only. kopf then puts no finalizer on any object, stores nothing in annotations and
patches nothing, so the operator never delays the deletion of a pod. kopf retries none of them, because nothing in them
can fail. Peering is off, because both replicas are active. kopf begins to watch a kind that the cluster does not have
yet as soon as its CRD is installed.

One thread watches most of the required kinds. Each optional kind has a separate thread, because kopf ends all its
watches when one of them meets an error that kopf does not retry. So has each kind that is a subset of a resource
(``Kind.subset``). ``Watches.start`` starts them from the main thread. Each runs kopf on its own event loop, which owns
the tasks and sessions of that run; they end with it. Whatever ends kopf, the thread runs it again after a pause. Only
``Watches.close`` ends a thread. While the API server cannot be reached, or answers with an error, kopf retries each
request without end. ``WatchState`` holds the state of each watch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import kopf

from gracepoint.wire.names import GROUP
from gracepoint_operator.cache.relister import OPTIONAL, SELECTORS
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import USER_AGENT, KubeClient, RetryPauses
from gracepoint_operator.kube.objects import CRDS, Kind
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_REQUEST_TIMEOUT_S = 10.0
#: The API server ends a watch after this time, and sends a bookmark shortly before. kopf continues from there.
_WATCH_S = 25  # whole seconds: the API server refuses 25.0
#: A watch that has received nothing for this time counts as lost: a connection can break without a sign.
_INACTIVE_S = 30.0
#: kopf keeps a task and a queue for each object for this time after its last event.
_OBJECT_IDLE_S = 0.1
#: The pauses in seconds between the attempts of one request.
REQUEST_BACKOFFS = RetryPauses(0.2, 5.0)


def watch_all(
    registry: kopf.OperatorRegistry, controller: Controller, watched: Collection[objects.Kind] = SELECTORS.keys()
) -> None:
    """Hands every object of these kinds to the controller."""
    for kind in SELECTORS:
        if kind in watched:
            _watch(registry, kind, controller)


def kind_at(path: str, watched: Collection[objects.Kind] = SELECTORS.keys()) -> objects.Kind | None:
    """The kind that a request lists or watches, by the path of its URL. None for other requests.

    Args:
        path: The path.
        watched: The kinds that the thread watches.
    """
    match path.strip("/").split("/"):
        case ["api", _, plural] | ["api", _, "namespaces", _, plural]:
            place = ("", plural)
        case ["apis", group, _, plural] | ["apis", group, _, "namespaces", _, plural]:
            place = (group, plural)
        case _:
            return None
    return next((kind for kind in watched if (kind.group, kind.plural) == place), None)


def namespace_at(path: str) -> str:
    """The namespace in which a request lists or watches, by the path of its URL. "": all of them, or it has none."""
    match path.strip("/").split("/"):
        case ["api", _, "namespaces", namespace, _] | ["apis", _, _, "namespaces", namespace, _]:
            return namespace
    return ""


def settings(
    backoffs: Iterable[float] = REQUEST_BACKOFFS, watched: Collection[objects.Kind] = SELECTORS.keys()
) -> kopf.OperatorSettings:
    """kopf's settings for an operator that only watches.

    Args:
        backoffs: The pauses in seconds between the attempts of one request.
        watched: The kinds that this run watches, at most one at each place in the API.
    """
    kopf_settings = kopf.OperatorSettings()
    kopf_settings.posting.enabled = False
    kopf_settings.posting.level = logging.CRITICAL
    kopf_settings.peering.standalone = True
    kopf_settings.persistence.finalizer = f"{GROUP}/never-set"
    kopf_settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=GROUP)
    kopf_settings.persistence.diffbase_storage = _NoComparison()
    kopf_settings.networking.connect_timeout = _CONNECT_TIMEOUT_S
    kopf_settings.networking.request_timeout = _REQUEST_TIMEOUT_S
    kopf_settings.networking.error_backoffs = backoffs
    kopf_settings.watching.connect_timeout = _CONNECT_TIMEOUT_S
    kopf_settings.watching.server_timeout = _WATCH_S
    kopf_settings.watching.client_timeout = _WATCH_S + 30
    kopf_settings.watching.inactivity_timeout = _INACTIVE_S
    kopf_settings.queueing.error_delays = (0.1, 0.5, 1, 2, 5)
    kopf_settings.queueing.idle_timeout = _OBJECT_IDLE_S
    kopf_settings.execution.default_backoff = 1.0
    kopf_settings.process.ultimate_exiting_timeout = (
        None  # otherwise kopf kills the process when one of its runs ends slowly
    )
    for kind, selector in SELECTORS.items():
        if selector is not None and kind in watched:
            kopf_settings.watching.label_selectors[kind.group, kind.plural] = selector
    return kopf_settings


class _NoComparison(kopf.DiffBaseStorage):
    """Keeps nothing. Otherwise kopf would copy each object at each event, to compare it with the one before."""

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> kopf.BodyEssence:
        return kopf.BodyEssence()

    def fetch(self, *, body: kopf.Body) -> kopf.BodyEssence | None:
        return None

    def store(self, *, body: kopf.Body, patch: kopf.Patch, essence: kopf.BodyEssence) -> None:
        pass


def _watch(registry: kopf.OperatorRegistry, kind: objects.Kind, controller: Controller) -> None:
    # If the kind has no version, kopf watches the one that the cluster prefers.
    @kopf.on.event(
        group=kind.group, version=kind.version, plural=kind.plural, id=f"see-{kind.title}", registry=registry
    )
    async def see(event: kopf.RawEvent, **_: Any) -> None:
        controller.watches.seen(kind, event["object"]["metadata"].get("namespace") or "")
        controller.feed(kind, event["type"], dict(event["object"]))


#: How long a document may be late, in seconds. One or two are usual.
_LATE_AT_MOST_S = 60.0
_CRD_TIMEOUT_S = 5.0


class _DiscoveryIsLate(aiohttp.ClientConnectionError):
    """kopf makes the request again, after the pauses of its settings."""


class FreshDiscovery:
    """Lets kopf find a kind whose CRD was installed meanwhile, although the API server's discovery is late.

    At each event of a CRD, kopf reads the discovery documents of the CRD's group and watches the kinds that they show.
    The API server renews these documents some time after the last event. If kopf reads an older document, it does not
    look again. So a document that lacks a watched kind counts as a failed request if the CRD of that kind is
    established: kopf makes the request again. After a minute the document is taken as it is.

    A middleware of kopf's session. It runs on the event loop of one thread that watches.

    Args:
        watched: The kinds that are watched with the session.
        clock: Seconds, of a clock that never goes back.
    """

    def __init__(self, watched: Collection[Kind], clock: Callable[[], float] = time.monotonic) -> None:
        self._custom = [kind for kind in watched if "." in kind.group]  # the others have no CRD
        self._clock = clock
        self._late_since: dict[tuple[Kind, str], float] = {}  # by kind and path of the document

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        response = await handler(request)
        path = request.url.path
        about_kinds = [kind for kind in self._custom if _is_about(kind, path)]
        if not about_kinds or response.status not in (200, 404):
            return response
        document = await response.json() if response.status == 200 else {}  # kopf can read it again
        for kind in about_kinds:
            if _shows(document, kind) or not await self._is_served(kind, request):
                self._late_since.pop((kind, path), None)
                continue
            late_s = self._clock() - self._late_since.setdefault((kind, path), self._clock())
            if late_s < _LATE_AT_MOST_S:
                raise _DiscoveryIsLate(f"{path} lacks {kind.plural}, although its CRD is established")
            logger.error(
                "discovery lacks a kind, which is not watched until its CRD changes",
                extra=about(kind=kind.title, path=path, late_s=round(late_s, 1)),
            )
        return response

    async def _is_served(self, kind: Kind, request: aiohttp.ClientRequest) -> bool:
        """True if there is an established CRD that serves the version that ``request`` is about. False if not known."""
        url = request.url.with_path(CRDS.path()).with_query(fieldSelector=f"metadata.name={kind.plural}.{kind.group}")
        timeout = aiohttp.ClientTimeout(total=_CRD_TIMEOUT_S)
        async with request.session.get(url, middlewares=(), timeout=timeout) as response:
            definitions = (await response.json())["items"] if response.status == 200 else []
        version = _version(request.url.path) or kind.version
        return any(_serves(definition, version) for definition in definitions)


def _version(path: str) -> str | None:
    """The version that a discovery document is about. None: it is the document of all groups."""
    parts = path.strip("/").split("/")
    return parts[2] if len(parts) == 3 else None


def _is_about(kind: Kind, path: str) -> bool:
    """True if it is the path of a discovery document that shows the kind once that is served."""
    match path.strip("/").split("/"):
        case ["apis"]:
            return True
        case ["apis", group, version]:
            return group == kind.group and kind.version in (None, version)
    return False


def _shows(document: dict[str, Any], kind: Kind) -> bool:
    """True if the document has the kind, or its group if it is the document of all groups."""
    for group in document.get("groups") or ():
        if group["name"] == kind.group and (
            kind.version is None or kind.version in [version["version"] for version in group["versions"]]
        ):
            return True
    return kind.plural in [resource["name"] for resource in document.get("resources") or ()]


def _serves(definition: dict[str, Any], version: str | None) -> bool:
    """True if the CRD is established and serves the version, or any if that is None."""
    if "deletionTimestamp" in definition["metadata"]:
        return False
    conditions = (definition.get("status") or {}).get("conditions") or ()
    versions = {entry["name"] for entry in definition["spec"]["versions"] if entry["served"]}
    return bool(versions if version is None else version in versions) and any(
        condition["type"] == "Established" and condition["status"] == "True" for condition in conditions
    )


#: No name of an object begins with a dash.
_NOTHING = "metadata.name=-"


class EmptyLists:
    """Lets kopf begin its watches without a list of all objects. A middleware of kopf's session.

    kopf lists a kind only to learn the resourceVersion after which its watch begins, and keeps some kilobytes for each
    object that it was shown. The controller lists the objects itself (``cache.relister``): page by page, after the
    watch has its version. So the lists of kopf ask for a name that no object has. They are empty, and still have a
    version.

    If only some namespaces are watched, kopf itself learns from the list of namespaces which of them exist. So that
    list is left as it is.

    Args:
        watched: The kinds that are watched with the session.
        namespaces: The namespaces that are watched. Empty: all.
    """

    def __init__(self, watched: Collection[objects.Kind], namespaces: Collection[str]) -> None:
        self._emptied = [kind for kind in watched if not (namespaces and kind is objects.NAMESPACES)]

    async def __call__(
        self, request: aiohttp.ClientRequest, handler: aiohttp.ClientHandlerType
    ) -> aiohttp.ClientResponse:
        url = request.url
        if request.method == "GET" and "watch" not in url.query and kind_at(url.path, self._emptied) is not None:
            request.url = url.update_query(fieldSelector=_NOTHING)
        return await handler(request)


#: Seconds for kopf to end by itself. Then its tasks are cancelled, at most this often, with a wait after each time.
_KOPF_ENDS_S = 1.0
_CANCELLATIONS = 4
_CANCELLED_S = 0.5
#: Seconds in which the loop closes connections once it was asked to.
_CONNECTIONS_CLOSE_S = 0.1


class Connection(kopf.ConnectionInfo):
    """Sends the operator's own user agent. kopf would send ``kopf``."""

    def as_http_headers(self) -> dict[str, str]:
        return {**super().as_http_headers(), "User-Agent": USER_AGENT}


def run_kopf(
    registry: kopf.OperatorRegistry,
    api: KubeClient,
    trace: aiohttp.TraceConfig,
    logins: RetryPauses,
    ends: threading.Event,
    *,
    replica: str,
    watched: Collection[Kind],
    namespaces: Collection[str],
    backoffs: Iterable[float],
) -> str:
    """Runs kopf until it ends, or until ``ends`` is set. Returns why it ended.

    Args:
        registry: The handlers. Handlers for login and cleanup are added.
        api: Its credentials are used.
        trace: Follows kopf's requests.
        logins: The pauses between two logins.
        ends: Set by another thread to end the run.
        replica: This replica's name.
        watched: The kinds that the handlers are for.
        namespaces: The namespaces that are watched. Empty: all.
        backoffs: The pauses in seconds between the attempts of one request.
    """
    kopf_ends = asyncio.Event()
    sessions: list[aiohttp.ClientSession] = []

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        # When the API server refuses credentials, kopf asks for new ones at once.
        await asyncio.sleep(logins.next_s(first_s=0.0))
        session = _session(api, trace, watched, namespaces)
        sessions.append(session.aiohttp_session)
        return session

    @kopf.on.cleanup(registry=registry)
    async def release(**_: Any) -> None:
        ends.set()  # kopf waits for the flag in a thread
        kopf_ends.set()

    watching = kopf.operator(
        registry=registry,
        settings=settings(backoffs, watched),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        identity=cast(Any, replica),  # a NewType of str that kopf does not export
        stop_flag=ends,
    )
    return _run_on_a_loop(watching, kopf_ends, sessions)


def _session(
    api: KubeClient, trace: aiohttp.TraceConfig, watched: Collection[Kind], namespaces: Collection[str]
) -> kopf.AiohttpSession:
    """A session whose requests are traced. It must be created on the loop that uses it."""
    credentials = api.credentials()
    connection = Connection(
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
        trace_configs=[trace],
        middlewares=[EmptyLists(watched, namespaces), FreshDiscovery(watched)],
    )
    return kopf.AiohttpSession(server=credentials.server, aiohttp_session=session)


def _run_on_a_loop(
    watching: Coroutine[Any, Any, None], kopf_ends: asyncio.Event, sessions: list[aiohttp.ClientSession]
) -> str:
    """Runs kopf on a new loop. Returns why it ended.

    kopf begins to end when ``kopf_ends`` is set. If one of its watches has failed, kopf may then wait forever for the
    others: they ignore the first cancellation and wait for credentials that nobody fetches any more. So tasks that have
    not ended in time are cancelled again, and abandoned in the end. Then ``sessions`` are closed.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_log_error)

    async def run() -> str:
        task = asyncio.create_task(watching)
        begins_to_end = asyncio.create_task(kopf_ends.wait())
        await asyncio.wait({task, begins_to_end}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({task}, timeout=_KOPF_ENDS_S)
        for _ in range(_CANCELLATIONS):
            other_tasks = asyncio.all_tasks() - {asyncio.current_task(), task}
            if task.done() and not other_tasks:
                break
            for other_task in other_tasks if task.done() else {task, *other_tasks}:
                other_task.cancel()
            await asyncio.wait({task, *other_tasks}, timeout=_CANCELLED_S)
        for session in sessions:
            if session.connector is not None:  # not closed by kopf
                await session.connector.close(abort_ssl=True)  # an API server that hangs does not answer a goodbye
            await session.close()
        await asyncio.sleep(_CONNECTIONS_CLOSE_S)
        if not task.done():
            return "kopf did not end in time"
        if task.cancelled() or task.exception() is None:
            return "no error"
        return repr(task.exception())  # an error that kopf does not retry

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


def _log_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs an error of a task that nobody waited for, without its traceback.

    Such errors are reported by finalizers, which the garbage collector may run anywhere. asyncio's own handler formats
    the traceback there, and for that parses source code. Before CPython 3.11.8 this breaks whatever is being parsed in
    the meantime: ``SystemError: AST constructor recursion depth mismatch``.
    """
    error = context.get("exception") or context["message"]
    logger.warning("a task of kopf failed", extra=about(error=repr(error)))


def request_trace(
    thread: str, watches: WatchState, watched: Collection[Kind] = SELECTORS.keys()
) -> aiohttp.TraceConfig:
    """Reports the requests of one thread to ``WatchState``. It runs on that thread's event loop.

    Args:
        thread: The name of the thread.
        watches: Notes each request and its outcome.
        watched: The kinds that the thread watches.
    """

    async def begins(_: object, context: SimpleNamespace, params: aiohttp.TraceRequestStartParams) -> None:
        context.kind = kind_at(params.url.path, watched)
        context.namespace = namespace_at(params.url.path)
        context.is_list = "watch" not in params.url.query
        since = params.url.query.get("resourceVersion", "")
        watches.asked(thread, context.kind, int(since) if since.isdecimal() else 0)

    async def ends(_: object, context: SimpleNamespace, params: aiohttp.TraceRequestEndParams) -> None:
        if context.kind is None:
            return
        if params.response.status < 400:
            watches.answered(context.kind, context.namespace, listed=context.is_list)
        else:
            error = f"HTTP {params.response.status} {params.response.reason}"
            watches.failed(context.kind, error, context.namespace, optional=context.kind in OPTIONAL)

    async def fails(_: object, context: SimpleNamespace, params: aiohttp.TraceRequestExceptionParams) -> None:
        cancelled = isinstance(params.exception, asyncio.CancelledError)  # by a timeout of kopf's, or because it ends
        if context.kind is not None and not cancelled:
            watches.failed(context.kind, repr(params.exception), context.namespace, optional=context.kind in OPTIONAL)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begins)
    trace.on_request_end.append(ends)
    trace.on_request_exception.append(fails)
    return trace


def _run_backoff() -> RetryPauses:
    """The pauses between two runs of kopf, or two logins. After a run of a minute they begin with the shortest."""
    return RetryPauses(0.5, 30.0, forgets_after_s=60.0)


class Watches:
    """All watches. Each group of kinds has its own thread.

    Args:
        controller: Gets every object.
        api: Its credentials are used.
        metrics: Counts how often kopf was run again without having been asked to.
        replica: This replica's name. By default kopf would use the user's name, which a container may not have.
        backoffs: The pauses in seconds between the attempts of one request.
    """

    def __init__(
        self,
        controller: Controller,
        api: KubeClient,
        metrics: Metrics,
        *,
        replica: str,
        backoffs: Iterable[float] = REQUEST_BACKOFFS,
    ) -> None:
        # kopf has one label selector for each resource, so kinds at the same place cannot share a run.
        separate_kinds = {kind for kind in controller.watched if kind in OPTIONAL or kind.subset}
        groups = {"required": controller.watched - separate_kinds} | {kind.title: {kind} for kind in separate_kinds}
        self._threads = [
            _WatchThread(controller, api, metrics, name, watched, replica=replica, backoffs=backoffs)
            for name, watched in sorted(groups.items())
        ]
        controller.watches.on_rewind = self.start_again
        controller.watches.expect(controller.watched)

    def start(self) -> None:
        """Starts all threads."""
        for thread in self._threads:
            thread.start()

    def start_again(self) -> None:
        """Lists and watches everything again. Callable from any thread. Returns at once."""
        for thread in self._threads:
            thread.start_again()

    def close(self, timeout_s: float) -> None:
        """Ends all watches. Waits for at most ``timeout_s`` seconds for all of them together."""
        for thread in self._threads:
            thread.stop()
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is None:
                continue  # never started
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                logger.error("watches did not end", extra=about(thread=thread.name, waited_s=timeout_s))


class _WatchThread(threading.Thread):
    """Runs kopf for some kinds, again and again. Other threads call ``stop`` and ``start_again``.

    Args:
        controller: Gets every object.
        api: Its credentials are used.
        metrics: Counts how often kopf was run again without having been asked to.
        name: Which kinds these are, for the thread's name.
        watched: The kinds.
        replica: This replica's name.
        backoffs: The pauses in seconds between the attempts of one request.
    """

    def __init__(
        self,
        controller: Controller,
        api: KubeClient,
        metrics: Metrics,
        name: str,
        watched: Collection[objects.Kind],
        *,
        replica: str,
        backoffs: Iterable[float],
    ) -> None:
        super().__init__(name=f"watch {name}", daemon=True)
        self._controller = controller
        self._api = api
        self._metrics = metrics
        metrics.watch_restarts.labels(thread=self.name)  # from 0 on, so that increase() sees the first restarts
        self._watched = watched
        self._replica = replica
        self._backoffs = backoffs
        self._stopped = threading.Event()
        self._run_ends = threading.Event()  # ends the current run of kopf; each run has its own
        self._asked: threading.Event | None = None  # that of the run which was asked to start again

    def stop(self) -> None:
        self._stopped.set()
        self._run_ends.set()

    def start_again(self) -> None:
        self._asked = self._run_ends
        self._asked.set()

    def run(self) -> None:
        self._controller.watches.asked(self.name)
        pauses = _run_backoff()
        while not self._stopped.is_set():
            self._run_ends = threading.Event()
            if self._stopped.is_set():  # set between the two lines above, on the event of the run before
                break
            error = self._run_once(self._run_ends)
            if self._stopped.is_set():
                break
            pause_s = pauses.next_s()
            if self._asked is not self._run_ends:
                self._metrics.watch_restarts.labels(thread=self.name).inc()
                logger.error(
                    "watches ended, and start again", extra=about(thread=self.name, error=error, in_s=round(pause_s, 1))
                )
            self._controller.watches.asked(self.name)
            self._stopped.wait(pause_s)
        self._controller.watches.ended(self.name)

    def _namespaces(self) -> Collection[str]:
        """The namespaces in which kopf watches. Empty: all."""
        watches = self._controller.watches
        of_subsets = {place for kind in self._watched if kind.subset for place in watches.places(kind)} - {""}
        return of_subsets or watches.namespaces

    def _run_once(self, ends: threading.Event) -> str:
        """Returns why it ended."""
        registry = kopf.OperatorRegistry()
        watch_all(registry, self._controller, self._watched)
        return run_kopf(
            registry,
            self._api,
            request_trace(self.name, self._controller.watches, self._watched),
            _run_backoff(),
            ends,
            replica=self._replica,
            watched=self._watched,
            namespaces=self._namespaces(),
            backoffs=self._backoffs,
        )
