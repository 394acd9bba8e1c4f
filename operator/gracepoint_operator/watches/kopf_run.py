"""The threads that watch the cluster with kopf.

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
from collections.abc import Collection, Coroutine, Iterable
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import kopf

from gracepoint_operator.cache.relister import OPTIONAL, SELECTORS
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.controller import Controller
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import USER_AGENT, KubeClient, RetryPauses
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.logs import about
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.watches.event_handlers import (
    REQUEST_BACKOFFS,
    EmptyLists,
    FreshDiscovery,
    kind_at,
    namespace_at,
    settings,
    watch_all,
)

logger = logging.getLogger(__name__)

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
            return "asked to start again"
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
        metrics: Counts how often kopf was run again.
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
        metrics: Counts how often kopf was run again.
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

    def stop(self) -> None:
        self._stopped.set()
        self._run_ends.set()

    def start_again(self) -> None:
        self._run_ends.set()

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
            self._metrics.watch_restarts.labels(thread=self.name).inc()
            logger.error(
                "watches ended, and start again", extra=about(thread=self.name, error=error, in_s=round(pause_s, 1))
            )
            self._controller.watches.asked(self.name)
            self._stopped.wait(pause_s)
        self._controller.watches.ended(self.name)

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
            namespaces=self._controller.watches.namespaces,
            backoffs=self._backoffs,
        )
