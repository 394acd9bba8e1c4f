"""A discovery document that lacks a kind whose CRD is established is a failed request, which kopf makes again."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gracepoint_operator.kube import objects
from gracepoint_operator.watches import FreshDiscovery
from tests.unit.operator.fakes.objects import Body, Clock

WATCHED = (objects.NODE_CLAIMS, objects.PODS)
GROUPS = "/apis"
KARPENTER = "/apis/karpenter.sh/v1"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SHOWN: dict[str, Body] = {
    GROUPS: {"groups": [{"name": "karpenter.sh", "versions": [{"version": "v1"}]}]},
    KARPENTER: {"resources": [{"name": "nodeclaims"}]},
}
LACKING: dict[str, Body] = {
    GROUPS: {"groups": [{"name": "karpenter.sh", "versions": [{"version": "v1beta1"}]}, {"name": "x", "versions": []}]},
    KARPENTER: {"resources": [{"name": "nodepools"}]},
}


def definition(*, established: str = "True", served: bool = True, version: str = "v1", **metadata: str) -> Body:
    return {
        "metadata": {"name": "nodeclaims.karpenter.sh", **metadata},
        "spec": {"versions": [{"name": version, "served": served}]},
        "status": {"conditions": [{"type": "Established", "status": established}]},
    }


class Cluster:
    """Answers with these documents and definitions. A document that is None is not found."""

    def __init__(self, documents: dict[str, Body], *definitions: Body) -> None:
        self.documents: dict[str, Body | None] = dict(documents)
        self.definitions = definitions
        self.status = 200
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(request.path_qs)
        if request.path == CRDS:
            return web.json_response({"items": self.definitions}, status=self.status)
        found = self.documents.get(request.path)
        return web.json_response(found or {}, status=200 if found else 404)


@contextlib.asynccontextmanager
async def session(cluster: Cluster, clock: Clock) -> AsyncIterator[Callable[[str], Any]]:
    """Gives a function that gets a document as kopf does."""
    app = web.Application()
    app.router.add_get("/{path:.*}", cluster.answer)
    async with (
        TestServer(app) as server,
        aiohttp.ClientSession(middlewares=[FreshDiscovery(WATCHED, clock)]) as made,
    ):

        async def get(path: str) -> Any:
            async with made.get(server.make_url(path)) as response:
                return response.status, await response.json()

        yield get


@pytest.mark.parametrize("path", [GROUPS, KARPENTER])
async def test_document_is_asked_for_again_until_it_shows_the_kind(path: str, clock: Clock) -> None:
    cluster = Cluster(LACKING, definition())
    async with session(cluster, clock) as get:
        found: list[Body | None] = [LACKING[path], None]
        for document in found:
            cluster.documents[path] = document
            with pytest.raises(aiohttp.ClientConnectionError, match=f"{path} lacks nodeclaims"):
                await get(path)
        cluster.documents[path] = SHOWN[path]
        cluster.asked.clear()
        assert await get(path) == (200, SHOWN[path])
        assert cluster.asked == [path], "and nothing else is asked for"


@pytest.mark.parametrize(
    "definitions",
    [
        pytest.param([], id="no CRD"),
        pytest.param([definition(established="False")], id="a CRD that is not established yet"),
        pytest.param([definition(deletionTimestamp="2026-01-01T00:00:00Z")], id="a CRD that is being deleted"),
        pytest.param([definition(version="v1beta1")], id="another version"),
        pytest.param([definition(served=False)], id="a version that is not served"),
    ],
)
@pytest.mark.parametrize("path", [GROUPS, KARPENTER])
async def test_document_that_cannot_show_the_kind_is_taken(path: str, definitions: list[Body], clock: Clock) -> None:
    async with session(Cluster(LACKING, *definitions), clock) as get:
        assert await get(path) == (200, LACKING[path])


async def test_document_is_taken_if_crds_must_not_be_listed(clock: Clock) -> None:
    cluster = Cluster(LACKING, definition())
    cluster.status = 403
    async with session(cluster, clock) as get:
        assert await get(KARPENTER) == (200, LACKING[KARPENTER])


async def test_document_that_stays_late_is_taken_after_a_minute(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    async with session(Cluster(LACKING, definition()), clock) as get:
        for _ in range(2):
            with pytest.raises(aiohttp.ClientConnectionError):
                await get(KARPENTER)
            clock.move(30)
        assert await get(KARPENTER) == (200, LACKING[KARPENTER])
    assert "discovery lacks a kind" in caplog.text


@pytest.mark.parametrize("path", ["/apis/kueue.x-k8s.io/v1beta2", "/apis/karpenter.sh/v1beta1", "/api", CRDS])
async def test_requests_about_other_things_are_left_alone(path: str, clock: Clock) -> None:
    cluster = Cluster(LACKING, definition())
    async with session(cluster, clock) as get:
        await get(path)
    assert cluster.asked == [path]
