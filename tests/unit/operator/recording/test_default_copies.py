"""The CheckpointPolicies that the operator keeps for a cluster's default, with the status in them."""

from __future__ import annotations

import pytest

from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.resources import CheckpointPolicy
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, frames, running, until

DEFAULT = {"mode": "Enforce", "evictionHold": {"boundSeconds": 90}}


@pytest.fixture
def api(clock: Clock) -> MemoryApi:
    """A gang whose policy is the default of the cluster."""
    made = MemoryApi(clock)
    cluster(made)
    made.remove(kinds.POLICIES, objects.policy())
    made.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("careful", default=DEFAULT))
    return made


def copies(api: MemoryApi) -> list[JsonObject]:
    return api.of(kinds.POLICIES)


def seen(replica: Replica) -> None:
    for body in replica.api.of(kinds.POLICIES):
        replica.core.feed(kinds.POLICIES, "MODIFIED", body)


async def test_a_namespace_whose_workload_uses_the_default_gets_its_copy_with_a_status(
    api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock), running(api, clock, "replica-b"):
        await until(lambda: copies(api) and copies(api)[0].get("status"), "the copy with its status")
    (body,) = copies(api)
    assert (body["metadata"]["namespace"], body["metadata"]["name"]) == (NAMESPACE, "careful")
    (owner,) = body["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("ClusterCheckpointPolicy", "careful", True)
    assert CheckpointPolicy.of(body).spec.eviction_hold.bound_seconds == 90
    assert body["status"]["jobSets"]["names"] == ["train"]


async def test_a_gang_is_notified_before_the_copy_is_there(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.core.cache.policies.drop((NAMESPACE, "careful"))
        api.failing, api.failing_only = [client.Unavailable("HTTP 503") for _ in range(1000)], "POST"
        subscriber = replica.subscribe(0)
        replica.taint()
        assert await frames(subscriber)


async def test_an_edit_of_the_default_reaches_its_copies_and_nobody_elses_policy(api: MemoryApi, clock: Clock) -> None:
    mine = objects.policy(mode="Drill")
    mine["metadata"] |= {"name": "mine", "uid": "uid-mine"}
    api.add(kinds.POLICIES, mine)
    async with running(api, clock) as replica:
        await until(lambda: len(copies(api)) == 2, "the copy")
        seen(replica)
        edited = objects.cluster_policy("careful", default={"mode": "Observe", "signals": ["NodeTaint"]})
        replica.see(kinds.CLUSTER_POLICIES, edited)
        await until(lambda: copies(api)[0]["spec"]["mode"] == "Observe", "the copy to follow")
        replica.see(kinds.CLUSTER_POLICIES, objects.cluster_policy("careful", default={"mode": "Observe"}))
        await until(lambda: "signals" not in copies(api)[0]["spec"], "what the default has no more to be gone")
    assert api.of(kinds.POLICIES)[1]["spec"] == mine["spec"]


async def test_a_copy_that_somebody_changes_is_put_right(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await until(lambda: copies(api), "the copy")
        body = copies(api)[0]
        body["spec"]["mode"] = "Observe"
        body["metadata"]["generation"] = 2
        replica.see(kinds.POLICIES, body)
        await until(lambda: copies(api)[0]["spec"]["mode"] == "Enforce", "the copy to be right again")


async def test_a_workload_that_comes_later_brings_the_copy(api: MemoryApi, clock: Clock) -> None:
    api.remove(JOBSETS, objects.jobset())
    async with running(api, clock) as replica:
        assert copies(api) == []
        replica.see(JOBSETS, objects.jobset())
        await until(lambda: copies(api), "the copy")


async def test_nothing_is_made_where_the_default_is_not_for_the_namespace(api: MemoryApi, clock: Clock) -> None:
    selector = {"matchLabels": {"tier": "gold"}}
    api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("careful", selector, default=DEFAULT))
    async with running(api, clock) as replica:
        replica.see(JOBSETS, objects.jobset(restarts=1))
        await until(lambda: replica.core.cache.objects.workloads[objects.JOBSET_UID].restarts == 1, "the JobSet")
        assert replica.core.cache.policies.get((NAMESPACE, "careful")) is None
    assert copies(api) == []
