"""A workload in Kueue's queue is suspended: Kueue's own Workload says why, in whatever order the watches bring it."""

from __future__ import annotations

import pytest

from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NOW, Body, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, kept_of, running, until

QUEUE = Kind("/apis/kueue.x-k8s.io/v1beta2", "workloads")
WHO = "Preempted to accommodate a workload (UID: 4711, JobUID: 0815) due to prioritization in the ClusterQueue"


@pytest.fixture
def api(clock: Clock) -> MemoryApi:
    """The usual cluster with Kueue, which has admitted the JobSet."""
    made = MemoryApi(clock)
    cluster(made)
    made.objects["/apis/kueue.x-k8s.io"] = {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2"}}
    made.add(QUEUE, objects.workload())
    return made


def evicted(at: float = NOW) -> Body:
    return objects.workload(conditions=[objects.condition("Evicted", reason="Preempted", message=WHO, at=at)])


def calls_for_queue(api: MemoryApi) -> list[str]:
    return [call for call in api.calls if "kueue" in call]


async def cause_and_signal(replica: Replica, epoch: int = 0) -> tuple[str, str]:
    spec: JsonObject = (await replica.phase("Noticed", epoch))["spec"]
    return spec["cause"], spec["signal"]


async def test_suspension_seen_before_the_eviction_has_its_cause(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        api.add(QUEUE, evicted())  # the watch has not brought it
        replica.see(JOBSETS, objects.jobset(suspended=True))
        cause, signal = await cause_and_signal(replica)
        assert cause == "PriorityPreemption"
        assert "JobUID: 0815" in signal


async def test_deletion_of_pods_seen_first_has_the_cause_of_the_eviction(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        api.add(QUEUE, evicted())
        api.add(JOBSETS, objects.jobset(suspended=True))
        replica.see(kinds.PODS, objects.pod(0, deleting_at=NOW + 30))
        cause, signal = await cause_and_signal(replica)
        assert cause == "PriorityPreemption"
        assert "JobUID: 0815" in signal


async def test_suspension_without_an_eviction_stays_a_suspension(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(JOBSETS, objects.jobset(suspended=True))
        assert await cause_and_signal(replica) == ("Suspension", "JobSet spec.suspend=true")


async def test_workload_outside_of_the_queue_is_not_looked_up(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api)
    async with running(api, clock) as replica:
        api.calls.clear()
        replica.see(JOBSETS, objects.jobset(suspended=True))
        assert (await cause_and_signal(replica))[0] == "Suspension"
        assert calls_for_queue(api) == []


async def test_refused_look_at_kueue_leaves_the_suspension(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(api, clock) as replica:
        api.add(QUEUE, evicted())

        async def refuse(kind: Kind) -> Kind:
            raise client.Refused(f"{kind.plural}: forbidden")

        monkeypatch.setattr(api, "preferred", refuse)
        replica.see(JOBSETS, objects.jobset(suspended=True))
        assert (await cause_and_signal(replica))[0] == "Suspension"


async def test_each_suspension_is_looked_up_again(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(JOBSETS, objects.jobset(suspended=True))
        await replica.phase("Noticed")
        replica.see(JOBSETS, objects.jobset())
        clock.move(100)
        await replica.phase("Expired")
        suspensions = replica.core.cache.suspensions
        await until(lambda: not suspensions.of(objects.JOBSET_UID), "the end of the suspension")
        clock.move(1)
        api.add(QUEUE, evicted(clock()))
        api.calls.clear()
        replica.see(JOBSETS, objects.jobset(suspended=True))
        assert (await cause_and_signal(replica, epoch=1))[0] == "PriorityPreemption"
        assert calls_for_queue(api) != []


async def test_lost_jobset_leaves_no_explanation_behind(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(JOBSETS, objects.jobset(suspended=True))
        await replica.phase("Noticed")
        (mark,) = replica.core.cache.suspensions.of(objects.JOBSET_UID)
        assert kept_of(replica, mark)
        replica.drop(JOBSETS, objects.jobset(suspended=True))
        await until(lambda: not kept_of(replica, mark), "the deletion of the JobSet")
