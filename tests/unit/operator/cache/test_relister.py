"""Which kinds are listed, and how, after watches that may have missed something, and what is told of the lists."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import pytest

from gracepoint_operator.cache import relister
from gracepoint_operator.cache.cluster_cache import ClusterCache
from gracepoint_operator.cache.relister import ALWAYS, Relister, Swept
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.kube import client
from gracepoint_operator.kube.client import ListPage
from gracepoint_operator.kube.objects import JOBS, NODE_CLAIMS, NODES, PODS, REQUESTS, Kind
from gracepoint_operator.metrics import Metrics
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, Clock
from tests.unit.operator.fakes.replica import cluster

WATCHED = frozenset({NODES, PODS, JOBS})


class Lists:
    """Stands for ``sweep``. Remembers which kinds were listed, and whether in full.

    Attributes:
        made: The lists so far.
        refused: Kinds that cannot be listed.
    """

    def __init__(self, refused: set[Kind]) -> None:
        self.made: list[tuple[set[Kind], bool]] = []
        self.refused = refused

    async def __call__(
        self,
        api: object,
        cache: object,
        drop: object,
        watches: object,
        wanted: Collection[Kind],
        begins: Callable[[Kind], Awaitable[None]],
        *,
        findings: object,
        metadata_only: bool,
    ) -> Swept:
        for kind in wanted:
            await begins(kind)
        self.made.append((set(wanted), not metadata_only))
        unlisted = frozenset(self.refused & set(wanted))
        return Swept(unlisted, frozenset(), frozenset(), rewound=False, whole=set(wanted) == WATCHED)


async def lists_after(
    monkeypatch: pytest.MonkeyPatch, gaps: dict[Kind, bool], refused: Collection[Kind] = ()
) -> list[tuple[set[Kind], bool]]:
    """The lists that follow gaps, which all come together after the first list of all kinds."""
    lists = Lists(set(refused))
    monkeypatch.setattr(relister, "sweep", lists)

    async def begin() -> None:
        """Nothing has to be done before the first list."""

    nobody: Any = None
    made = Relister(nobody, nobody, WatchState(Metrics()), lambda uid: set(), begin, lambda swept: None, WATCHED)
    made.gaps_together_s = 0.0
    task = asyncio.create_task(made.run())
    await _let_run()
    for kind, in_full in gaps.items():
        made.look_again(kind, in_full=in_full)
    await _let_run()
    task.cancel()
    await asyncio.wait({task})
    assert lists.made[0] == (set(WATCHED), True)
    return lists.made[1:]


async def _let_run() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_deletions_are_looked_for_next_to_a_list_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = await lists_after(monkeypatch, {NODES: False, PODS: True, JOBS: False})
    assert made == [({PODS}, True), ({NODES, JOBS}, False)]


async def test_deletions_are_looked_for_although_another_kind_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = await lists_after(monkeypatch, {NODES: False}, refused={JOBS})
    assert made == [({JOBS}, True), ({NODES}, False)]


class BrokenLists(MemoryApi):
    """A cluster with a gang, of which a request asks that it leaves. One list fails after its first page.

    Attributes:
        breaks: The kind whose next list fails. None: no list fails.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.breaks: Kind | None = None
        cluster(self)
        self.add(NODE_CLAIMS, objects.node_claim())
        self.add(REQUESTS, objects.request())

    async def pages(self, kind: Kind, *args: Any, **about: Any) -> AsyncIterator[ListPage[Any]]:
        async for page in super().pages(kind, *args, **about):
            yield page
        if kind is self.breaks:
            self.breaks = None
            raise client.Unavailable("the second page does not come")


def taint(api: MemoryApi) -> None:
    api.add(NODES, objects.node("node-1", taints=[objects.taint()]))


def withdraw(api: MemoryApi) -> None:
    api.remove(REQUESTS, objects.request())


def drift(api: MemoryApi) -> None:
    condition = objects.condition("Disrupted", reason="Drifted")
    api.add(NODE_CLAIMS, objects.node_claim(conditions=[condition]))


def restore(api: MemoryApi) -> None:
    """From a backup: all nodes have older versions."""
    for body in api.of(NODES):
        api.objects[NODES.path(None, body["metadata"]["name"])]["metadata"]["resourceVersion"] = "1"


async def told_after_a_list_that_broke(breaks: Kind, change: Callable[[MemoryApi], None]) -> list[Swept]:
    """What is told of two lists of all kinds after a change that no watch has seen. The first one breaks once."""
    clock = Clock()
    api, cache, told = BrokenLists(clock), ClusterCache(clock), list[Swept]()

    async def begin() -> None:
        """Nothing has to be done before the first list."""

    made = Relister(api, cache, WatchState(Metrics()), cache.drop, begin, told.append)
    made.again_s = made.gaps_together_s = 0.0
    task = asyncio.create_task(made.run())
    await _let_run()
    assert len(told) == 1
    change(api)
    api.breaks = breaks
    for _ in range(2):
        for kind in ALWAYS:
            made.look_again(kind)
        await _let_run()
    task.cancel()
    await asyncio.wait({task})
    assert api.breaks is None
    return told[1:]


@pytest.mark.parametrize(
    ("breaks", "change"),
    [
        pytest.param(PODS, taint, id="a taint, and a later kind fails"),
        pytest.param(NODES, taint, id="a taint, and the next page fails"),
        pytest.param(PODS, withdraw, id="a request was withdrawn"),
        pytest.param(NODE_CLAIMS, drift, id="the next page of an optional kind fails"),
    ],
)
async def test_what_a_list_found_before_it_failed_is_handled_once(
    breaks: Kind, change: Callable[[MemoryApi], None]
) -> None:
    first, *others = await told_after_a_list_that_broke(breaks, change)
    assert first.affected == {JOBSET_UID}
    assert others
    assert not any(swept.affected for swept in others)


async def test_a_restore_that_a_failed_list_has_found_is_reported_once() -> None:
    first, *others = await told_after_a_list_that_broke(PODS, restore)
    assert first.rewound
    assert others
    assert not any(swept.rewound for swept in others)
