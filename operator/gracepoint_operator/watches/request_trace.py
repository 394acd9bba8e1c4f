"""Reports the requests of a kopf session to ``WatchState``. Runs on the event loop of the thread that watches."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace

import aiohttp

from gracepoint_operator.cache.listing.resync import OPTIONAL, SELECTORS
from gracepoint_operator.cache.listing.watch_state import WatchState
from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.watches.handlers import kind_at, namespace_at


def request_trace(
    thread: str, watches: WatchState, watched: Collection[Kind] = SELECTORS.keys()
) -> aiohttp.TraceConfig:
    """Traces the requests of one thread.

    Args:
        thread: The name of the thread.
        watches: Is told of each request and its outcome.
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
            why = f"HTTP {params.response.status} {params.response.reason}"
            watches.failed(context.kind, why, context.namespace, optional=context.kind in OPTIONAL)

    async def fails(_: object, context: SimpleNamespace, params: aiohttp.TraceRequestExceptionParams) -> None:
        cancelled = isinstance(params.exception, asyncio.CancelledError)  # by a timeout of kopf's, or because it ends
        if context.kind is not None and not cancelled:
            watches.failed(context.kind, repr(params.exception), context.namespace, optional=context.kind in OPTIONAL)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begins)
    trace.on_request_end.append(ends)
    trace.on_request_exception.append(fails)
    return trace
