"""Pods that were ended from outside in one moment: no preemption can be about them, so an Event says why they ended."""

from __future__ import annotations

import asyncio

import pytest

from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.replica import cluster, running, until

QUIET_S = 0.2


@pytest.fixture
def api(clock: Clock) -> MemoryApi:
    made = MemoryApi(clock)
    cluster(made)
    return made


def told(api: MemoryApi) -> list[JsonObject]:
    return [event for event in api.of(kinds.EVENTS) if event["reason"] == "PodDisrupted"]


async def test_a_pod_that_the_kubelet_evicts_is_named_with_node_and_reason(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica, running(api, clock, "replica-b") as other:
        body = objects.pod(0, phase="Failed", disruption="TerminationByKubelet")
        replica.see(kinds.PODS, body)
        other.core.feed(kinds.PODS, "MODIFIED", body)
        await until(lambda: told(api), "the Event")
        await asyncio.sleep(QUIET_S)
        (event,) = told(api)
    assert (event["regarding"]["kind"], event["regarding"]["name"]) == ("JobSet", "train")
    name = body["metadata"]["name"]
    assert event["note"] == (
        f"the pod {name} on node-1 was ended from outside: condition DisruptionTarget (TerminationByKubelet); "
        "the restart does not count"
    )


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(objects.pod(0, phase="Failed"), id="its program failed"),
        pytest.param(objects.pod(0, phase="Failed", disruption="x", labelled=False), id="it is of no policy"),
    ],
)
async def test_other_pods_are_not_named(api: MemoryApi, clock: Clock, body: JsonObject) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, body)
        await asyncio.sleep(QUIET_S)
    assert told(api) == []


async def test_a_pod_that_a_preemption_names_is_not_named_again(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        replica.see(kinds.PODS, objects.pod(0, phase="Failed", disruption="DeletionByTaintManager"))
        await asyncio.sleep(QUIET_S)
    assert told(api) == []
