"""Kueue is asked for other nodes than those that a gang leaves, and to start anew where pods are pinned to them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gracepoint.wire.messages import Phase
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.recording.kueue_writer import ANSWERED_S, PINNED_S, assigned_nodes
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Body, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, running, until

PLURAL = kinds.KUEUE_WORKLOADS.of_version("kueue.x-k8s.io/v1beta2")
HOSTNAME = "kubernetes.io/hostname"
QUIET_S = 0.2


def assigned(*nodes: str, unhealthy: tuple[str, ...] = (), version: str = "v1beta2", **conditions: str) -> Body:
    """Kueue's Workload with these nodes."""
    made = objects.workload(
        version=version,
        conditions=[
            objects.condition(name, reason=why) for name, why in {"Admitted": "Admitted", **conditions}.items()
        ],
    )
    topology: Body = {"levels": [HOSTNAME]}
    if version == "v1beta1":
        topology["domains"] = [{"values": [node], "count": 1} for node in nodes]
    else:
        roots = [node.removeprefix("node-") for node in nodes]
        values = [{"individual": {"prefix": "node-", "roots": roots}}]
        topology["slices"] = [{"domainCount": len(nodes), "valuesPerLevel": values, "podCounts": {"universal": 1}}]
    made["status"]["admission"] = {"podSetAssignments": [{"name": "workers", "topologyAssignment": topology}]}
    made["status"]["unhealthyNodes"] = [{"name": node} for node in unhealthy]
    return made


@pytest.fixture
def api(clock: Clock) -> MemoryApi:
    made = MemoryApi(clock)
    cluster(made)
    made.objects["/apis/kueue.x-k8s.io"] = {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2"}}
    made.add(PLURAL, assigned("node-1", "node-2"))
    return made


def stored(api: MemoryApi) -> JsonObject:
    (body,) = api.of(PLURAL)
    return body


def unhealthy(api: MemoryApi) -> list[str]:
    return [item["name"] for item in stored(api)["status"].get("unhealthyNodes", [])]


def kueue_writes(replica: Replica, body: Body) -> None:
    """Kueue has written its Workload, and the watch brings it."""
    replica.core.feed(kinds.KUEUE_WORKLOADS, "MODIFIED", replica.api.add(PLURAL, body))


async def saved(replica: Replica) -> None:
    """The gang leaves the first node."""
    replica.subscribe()
    replica.taint()
    await replica.phase("Noticed")
    await replica.report(Phase.COMMITTED)
    await replica.phase("Committed")


async def test_kueue_replaces_the_node_that_the_gang_leaves_after_its_save(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe()
        replica.taint()
        await replica.phase("Noticed")
        await asyncio.sleep(QUIET_S)
        assert unhealthy(api) == [], "the gang may stay: the signal may be taken back"
        await replica.report(Phase.COMMITTED)
        await until(lambda: unhealthy(api) == ["node-1"], "the node to be named")


async def test_a_node_is_named_once_though_kueue_chooses_it_again(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await saved(replica)
        await until(lambda: unhealthy(api) == ["node-1"], "the node to be named")
        kueue_writes(replica, assigned("node-1", "node-2"))
        await asyncio.sleep(QUIET_S)
        assert unhealthy(api) == []


async def test_nodes_are_named_one_after_the_other_as_kueue_replaces_them(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe()
        for node in ("node-1", "node-2"):
            replica.taint(node)
        await until(lambda: len((replica.preemptions or [{"spec": {"nodes": []}}])[0]["spec"]["nodes"]) == 2, "both")
        await replica.report(Phase.COMMITTED)
        await until(lambda: unhealthy(api) == ["node-1"], "the first node to be named")
        await asyncio.sleep(QUIET_S)
        assert unhealthy(api) == ["node-1"], "Kueue replaces one at a time"
        kueue_writes(replica, assigned("node-3", "node-2", unhealthy=("node-1",)))
        await until(lambda: unhealthy(api) == ["node-2"], "the second node to be named")
        kueue_writes(replica, assigned("node-3", "node-4", unhealthy=("node-2",)))
        await until(lambda: unhealthy(api) == [], "no name to be left")


@pytest.mark.parametrize(
    "conditions", [pytest.param({}, id="replaced"), pytest.param({"Evicted": "NodeFailures"}, id="evicted")]
)
async def test_the_name_is_taken_out_of_the_workload_as_kueue_cannot(
    api: MemoryApi, clock: Clock, conditions: dict[str, str]
) -> None:
    """Else Kueue would no longer look after the Workload, and would assign no nodes at the next admission."""
    async with running(api, clock) as replica:
        await saved(replica)
        await until(lambda: unhealthy(api) == ["node-1"], "the node to be named")
        nodes = ("node-1", "node-2") if conditions else ("node-3", "node-2")
        kueue_writes(replica, assigned(*nodes, unhealthy=("node-1",), **conditions))
        await until(lambda: unhealthy(api) == [], "no name to be left")


async def test_a_node_that_kueue_does_not_replace_is_not_named_for_long(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await saved(replica)
        await until(lambda: unhealthy(api) == ["node-1"], "the node to be named")
        kueue_writes(replica, stored(api))
        clock.move(ANSWERED_S - 1)
        await asyncio.sleep(QUIET_S)
        assert unhealthy(api) == ["node-1"]
        clock.move(2)
        await until(lambda: unhealthy(api) == [], "no name to be left")
        kueue_writes(replica, assigned("node-1", "node-2"))
        await asyncio.sleep(QUIET_S)
        assert unhealthy(api) == [], "once for each preemption"


async def test_what_kueue_itself_has_named_stays(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await saved(replica)
        await until(lambda: unhealthy(api) == ["node-1"], "the node to be named")
        kueue_writes(replica, assigned("node-3", "node-2", unhealthy=("node-1", "node-2")))
        await until(lambda: unhealthy(api) == ["node-2"], "the replaced node to be taken out")
        clock.move(ANSWERED_S + 1)
        await asyncio.sleep(QUIET_S)
        assert unhealthy(api) == ["node-2"]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(objects.workload(conditions=[objects.condition("Admitted")]), id="Kueue assigned no nodes"),
        pytest.param(assigned("node-3", "node-4"), id="Kueue has replaced it already"),
        pytest.param(assigned("node-1", "node-2", Evicted="Preempted"), id="Kueue has evicted it"),
    ],
)
async def test_kueue_is_asked_for_nothing_that_it_would_wait_for(api: MemoryApi, clock: Clock, body: Body) -> None:
    """It leaves a Workload alone while an unhealthy node is named."""
    api.add(PLURAL, body)
    async with running(api, clock) as replica:
        await saved(replica)
        await asyncio.sleep(QUIET_S)
    assert unhealthy(api) == []


def pinned(index: int, node: str, created_at: float) -> Body:
    """A pod of the next attempt that the scheduler can bind nowhere."""
    body = objects.pod(index, attempt=1, on="", created_at=created_at, phase="Pending")
    body["spec"]["nodeSelector"] = {HOSTNAME: node}
    return body


async def started_again(replica: Replica, clock: Clock, node: str) -> None:
    """The gang left the first node, and its new pods are pinned to that node and another one."""
    replica.see(JOBSETS, objects.jobset(restarts=1))
    for index in (0, 1):
        replica.drop(kinds.PODS, objects.pod(index))
    replica.see(kinds.JOBS, objects.job(attempt=1))
    for index, where in enumerate((node, "node-2")):
        replica.see(kinds.PODS, pinned(index, where, clock()))


def evicted(api: MemoryApi) -> str:
    """Why the Workload is evicted."""
    conditions: list[dict[str, Any]] = stored(api)["status"]["conditions"]
    return next((item["reason"] for item in conditions if item["type"] == "Evicted"), "")


async def test_a_workload_whose_pods_are_pinned_to_a_node_that_goes_is_evicted_once(
    api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock) as replica:
        await saved(replica)
        await until(lambda: unhealthy(api) == ["node-1"], "the node to be named")
        kueue_writes(replica, assigned("node-3", "node-2"))
        clock.move(100)
        await started_again(replica, clock, "node-1")
        await asyncio.sleep(QUIET_S)
        assert not evicted(api)
        clock.move(PINNED_S + 1)
        await until(lambda: evicted(api) == "NodeFailures", "the Workload to be evicted")
        kueue_writes(replica, assigned("node-1", "node-2"))
        clock.move(100)
        await asyncio.sleep(QUIET_S)
        assert not evicted(api), "once for each start"


async def test_a_workload_is_evicted_for_each_node_that_goes_also_if_it_is_a_job_whose_restarts_nobody_counts(
    api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock) as replica:
        await saved(replica)
        await until(lambda: unhealthy(api) == ["node-1"], "the node to be named")
        await started_again(replica, clock, "node-1")
        clock.move(PINNED_S + 1)
        await until(lambda: evicted(api) == "NodeFailures", "the Workload to be evicted")
        assert unhealthy(api) == []
        for index, where in enumerate(("node-1", "node-2")):
            replica.drop(kinds.PODS, pinned(index, where, clock()))
        replica.taint("node-2")
        kueue_writes(replica, assigned("node-2"))
        for index in (0, 1):
            again = pinned(index, "node-2", clock())
            again["metadata"]["uid"] += "-again"
            replica.see(kinds.PODS, again)
        clock.move(PINNED_S + 1)
        await until(lambda: evicted(api) == "NodeFailures", "the Workload to be evicted again")


async def test_a_workload_whose_pods_wait_for_another_node_is_left_alone(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await saved(replica)
        await until(lambda: unhealthy(api) == ["node-1"], "the node to be named")
        kueue_writes(replica, assigned("node-3", "node-2"))
        clock.move(100)
        await started_again(replica, clock, "node-3")
        clock.move(PINNED_S + 1)
        await asyncio.sleep(QUIET_S)
        assert not evicted(api)


async def test_each_pod_that_waits_is_read_once(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await saved(replica)
        kueue_writes(replica, assigned("node-3", "node-2"))
        clock.move(100)
        for index in (0, 1):
            api.add(kinds.PODS, pinned(index, "node-3", clock()))
        await started_again(replica, clock, "node-3")
        for _ in range(4):
            clock.move(PINNED_S + 1)
            await asyncio.sleep(QUIET_S)
    reads = [call for call in api.calls if call.startswith("GET") and "/pods/" in call]
    assert len(reads) == len(set(reads)) == 2


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_assigned_nodes_are_read_in_each_version_of_kueue(version: str) -> None:
    assert list(assigned_nodes(assigned("node-1", "node-2", version=version))) == ["node-1", "node-2"]


def test_assigned_nodes_with_a_value_for_all_and_with_a_suffix() -> None:
    body = assigned("node-1")
    (topology,) = (item["topologyAssignment"] for item in body["status"]["admission"]["podSetAssignments"])
    topology["slices"] = [
        {"valuesPerLevel": [{"universal": "alone"}]},
        {"valuesPerLevel": [{"individual": {"suffix": ".example", "roots": ["a", "b"]}}]},
    ]
    assert list(assigned_nodes(body)) == ["alone", "a.example", "b.example"]
    topology["levels"] = ["rack"]
    assert list(assigned_nodes(body)) == [], "it assigns no nodes, but what is above them"
