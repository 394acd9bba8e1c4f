"""kopf's own lists are empty; its other requests are as they were."""

from __future__ import annotations

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gracepoint_operator.cache.relister import SELECTORS
from gracepoint_operator.watches import EmptyLists


@pytest.mark.parametrize(
    ("path", "query", "selector", "namespaces"),
    [
        pytest.param("/api/v1/pods", {"labelSelector": "a=b"}, "metadata.name=-", (), id="list of a watched kind"),
        pytest.param("/apis/gracepoint.dev/v1beta1/preemptions", {}, "metadata.name=-", (), id="list of our kind"),
        pytest.param("/api/v1/pods", {"watch": "true", "resourceVersion": "7"}, None, (), id="watch"),
        pytest.param(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", {}, None, (), id="list that kopf needs itself"
        ),
        pytest.param("/apis", {}, None, (), id="discovery"),
        pytest.param("/api/v1/namespaces", {}, "metadata.name=-", (), id="list of namespaces"),
        pytest.param(
            "/api/v1/namespaces",
            {},
            None,
            ("a",),
            id="kopf's list of namespaces to watch",
        ),
    ],
)
async def test_lists_of_watched_kinds_ask_for_nothing(
    path: str, query: dict[str, str], selector: str | None, namespaces: tuple[str, ...]
) -> None:
    seen: list[dict[str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(dict(request.query))
        return web.json_response({"items": [], "metadata": {"resourceVersion": "7"}})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession(middlewares=[EmptyLists(SELECTORS.keys(), namespaces)]) as session,
        session.get(server.make_url(path).with_query(query)) as response,
    ):
        assert response.status == 200
    assert seen == [{**query, **({} if selector is None else {"fieldSelector": selector})}]
