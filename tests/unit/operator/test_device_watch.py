"""Kinds that need a right of their own are neither listed nor watched unless the operator is told to."""

from __future__ import annotations

import asyncio

import pytest

from gracepoint_operator.controller import Controller, ControllerSettings
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.watches import Watches
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import JOBSET_UID, NOW, Clock
from tests.unit.operator.fakes.replica import cluster, until


@pytest.mark.parametrize("wanted", [pytest.param(False, id="not wanted"), pytest.param(True, id="wanted")])
async def test_devices_are_listed_and_watched_only_if_wanted(wanted: bool) -> None:
    clock = Clock()
    api = MemoryApi(clock)
    cluster(api)
    api.add(kinds.RESOURCE_CLAIMS, objects.resource_claim())
    broken = objects.taint("example.com/broken", "NoExecute", added_at=NOW)
    api.add(kinds.RESOURCE_SLICES, objects.resource_slice(tpu_0=[broken]))
    core = Controller(api, Metrics(), clock, ControllerSettings("replica-a", tick_s=0.05, watches_devices=wanted))
    task = asyncio.create_task(core.run())
    try:
        await until(lambda: core.ready or task.done(), "the replica to be ready")
        asked = {call.rpartition("/")[2] for call in api.calls}
        devices = {kind.plural for kind in kinds.DEVICES}
        assert asked & devices == (devices if wanted else set())
        assert bool(core.cache.gang(JOBSET_UID).marks) is wanted
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("wanted", [pytest.param(False, id="not wanted"), pytest.param(True, id="wanted")])
def test_each_kind_of_devices_has_a_thread_only_if_wanted(wanted: bool) -> None:
    clock, metrics = Clock(), Metrics()
    api = MemoryApi(clock)
    Watches(
        Controller(api, metrics, clock, ControllerSettings("replica-a", watches_devices=wanted)),
        api,
        metrics,
        replica="replica-a",
    )
    restarts = next(family for family in metrics.registry.collect() if family.name == "gracepoint_watch_restarts")
    names = {sample.labels["thread"] for sample in restarts.samples}
    devices = {f"watch {kind.title}" for kind in kinds.DEVICES}
    assert names & devices == (devices if wanted else set())
