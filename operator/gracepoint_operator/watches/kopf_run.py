"""One run of kopf on an event loop of its own, from start to end.

The calling thread runs the loop. The loop owns kopf's tasks and sessions, and they end with it. The run ends when kopf
fails, or when the caller sets ``ends``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection, Coroutine, Iterable
from typing import Any, cast

import aiohttp
import kopf

from gracepoint_operator.kube.client import USER_AGENT, KubeClient
from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.observability.logs import about
from gracepoint_operator.watches.discovery import FreshDiscovery
from gracepoint_operator.watches.empty_lists import EmptyLists
from gracepoint_operator.watches.handlers import settings
from gracepoint_operator.watches.pauses import Pauses

log = logging.getLogger(__name__)

#: Seconds for kopf to end by itself. Then its tasks are cancelled, at most this often, with a wait after each time.
_KOPF_ENDS_S = 1.0
_CANCELLATIONS = 4
_CANCELLED_S = 0.5
#: Seconds in which the loop closes connections after it was told to.
_CONNECTIONS_CLOSE_S = 0.1


class Connection(kopf.ConnectionInfo):
    """Sends the operator's own user agent. kopf would send ``kopf``."""

    def as_http_headers(self) -> dict[str, str]:
        return {**super().as_http_headers(), "User-Agent": USER_AGENT}


def run_kopf(
    registry: kopf.OperatorRegistry,
    api: KubeClient,
    trace: aiohttp.TraceConfig,
    logins: Pauses,
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
        trace: Is told of kopf's requests.
        logins: The pauses between two logins.
        ends: Set by another thread to end the run.
        replica: This replica's name.
        watched: The kinds that the handlers are for.
        namespaces: The namespaces that are watched. Empty: all.
        backoffs: The pauses in seconds between the attempts of one request.
    """
    over = asyncio.Event()
    sessions: list[aiohttp.ClientSession] = []

    @kopf.on.login(registry=registry)
    async def login(**_: Any) -> kopf.AiohttpSession:
        # When the API server refuses credentials, kopf asks for new ones at once.
        await asyncio.sleep(logins.next_s(first_s=0.0))
        made = _session(api, trace, watched, namespaces)
        sessions.append(made.aiohttp_session)
        return made

    @kopf.on.cleanup(registry=registry)
    async def release(**_: Any) -> None:
        ends.set()  # kopf waits for the flag in a thread
        over.set()

    watching = kopf.operator(
        registry=registry,
        settings=settings(backoffs, watched),
        clusterwide=not namespaces,
        namespaces=namespaces,
        standalone=True,
        identity=cast(Any, replica),  # a NewType of str that kopf does not export
        stop_flag=ends,
    )
    return _run_on_a_loop(watching, over, sessions)


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
    watching: Coroutine[Any, Any, None], over: asyncio.Event, sessions: list[aiohttp.ClientSession]
) -> str:
    """Runs kopf on a loop of its own. Returns why it ended.

    kopf begins to end when ``over`` is set. If one of its watches has failed, kopf may then wait forever for the
    others: they ignore the first cancellation and wait for credentials that nobody fetches any more. So tasks that have
    not ended in time are cancelled again, and given up in the end. Then ``sessions`` are closed.
    """
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(_log_error)

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
            if session.connector is not None:  # not closed by kopf
                await session.connector.close(abort_ssl=True)  # an API server that hangs does not answer a goodbye
            await session.close()
        await asyncio.sleep(_CONNECTIONS_CLOSE_S)
        if not task.done():
            return "kopf did not end, and was given up"
        if task.cancelled() or task.exception() is None:
            return "told to begin anew"
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
    log.warning("a task of kopf failed", extra=about(error=repr(error)))
