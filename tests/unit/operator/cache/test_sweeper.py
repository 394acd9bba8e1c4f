"""Which kinds are listed, and how, after watches that may have missed something."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import pytest

from gracepoint_operator.cache import sweeper
from gracepoint_operator.cache.resync import Swept
from gracepoint_operator.cache.sweeper import Sweeper
from gracepoint_operator.cache.watch_state import WatchState
from gracepoint_operator.kube.kinds import JOBS, NODES, PODS, Kind
from gracepoint_operator.observability.metrics import Metrics

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
        metadata_only: bool,
    ) -> Swept:
        for kind in wanted:
            await begins(kind)
        self.made.append((set(wanted), not metadata_only))
        left_out = frozenset(self.refused & set(wanted))
        return Swept(left_out, frozenset(), frozenset(), rewound=False, whole=set(wanted) == WATCHED)


async def lists_after(
    monkeypatch: pytest.MonkeyPatch, gaps: dict[Kind, bool], refused: Collection[Kind] = ()
) -> list[tuple[set[Kind], bool]]:
    """The lists that follow gaps, which all come together after the first list of all kinds."""
    lists = Lists(set(refused))
    monkeypatch.setattr(sweeper, "sweep", lists)
    monkeypatch.setattr(sweeper, "_GAPS_TOGETHER_S", 0.0)

    async def begin() -> None:
        """Nothing has to be done before the first list."""

    nobody: Any = None
    made = Sweeper(nobody, nobody, WatchState(Metrics()), lambda uid: set(), begin, lambda swept: None, WATCHED)
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


async def test_deletions_are_looked_for_beside_a_list_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = await lists_after(monkeypatch, {NODES: False, PODS: True, JOBS: False})
    assert made == [({PODS}, True), ({NODES, JOBS}, False)]


async def test_deletions_are_looked_for_beside_a_kind_that_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = await lists_after(monkeypatch, {NODES: False}, refused={JOBS})
    assert made == [({JOBS}, True), ({NODES}, False)]
