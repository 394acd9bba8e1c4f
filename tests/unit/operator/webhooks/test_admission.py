"""What the webhooks ask of the operator: who uses a policy, and which policy a workload may name."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.read_errors import Unreadable
from gracepoint_operator.resources import ClusterCheckpointPolicy
from gracepoint_operator.trust.certificates import Certificates
from gracepoint_operator.webhooks import Admission
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, running, until


def admission(replica: Replica) -> Admission:
    core = replica.core
    return Admission(
        cast(KubeClient, replica.api), core.cache, core.evictions, cast(Certificates, None), "https://o:443"
    )


async def test_who_deletes_a_policy_gets_a_warning_that_names_its_users(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api)
    async with running(api, clock) as replica:
        assert admission(replica).users_of(NAMESPACE, "careful") == ["JobSet train"]
        assert admission(replica).users_of(NAMESPACE, "another") == []
        replica.see(JOBSETS, objects.jobset(finished="Completed"))
        await until(lambda: not admission(replica).users_of(NAMESPACE, "careful"), "the JobSet to be seen as finished")


async def test_who_deletes_a_policy_of_the_cluster_gets_a_warning_that_names_the_users_of_its_default(
    clock: Clock,
) -> None:
    api = MemoryApi(clock)
    cluster(api)
    api.remove(kinds.POLICIES, objects.policy())
    api.add(kinds.NAMESPACES, objects.namespace())
    api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("careful", default={}))
    async with running(api, clock) as replica:
        assert admission(replica).users_of("", "careful") == [f"JobSet {NAMESPACE}/train"]
        replica.see(kinds.POLICIES, objects.policy())
        await until(lambda: not admission(replica).users_of("", "careful"), "the namespace's own policy to come first")


async def test_a_policy_of_the_cluster_may_be_named_where_it_is_for_the_namespace(clock: Clock) -> None:
    api = MemoryApi(clock)
    api.add(kinds.NAMESPACES, objects.namespace(tier="gold"))
    api.add(kinds.NAMESPACES, objects.namespace("other"))
    gold = {"matchLabels": {"tier": "gold"}}
    api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("gold", gold, default={"mode": "Observe"}))
    api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("limits", longestHoldSeconds=5))
    async with running(api, clock) as replica:
        asked = admission(replica)
        found = await asked.policy(NAMESPACE, "gold")
        assert found is not None
        assert (found.name, found.spec.mode, found.spec.eviction_hold.bound_seconds) == ("gold", "Observe", 60)
        assert asked.limited(found).spec.eviction_hold.bound_seconds == 5, "what is kept in workloads has no limits"
        assert await asked.policy("other", "gold") is None, "it is not for this namespace"
        assert await asked.policy(NAMESPACE, "limits") is None, "it has no default"
        api.add(
            kinds.POLICIES, {**(own := objects.policy(mode="Drill")), "metadata": {**own["metadata"], "name": "gold"}}
        )
        found = await asked.policy(NAMESPACE, "gold")
        assert found is not None
        assert found.spec.mode == "Drill", "the namespace's own comes first"


async def test_the_default_is_the_first_by_name_of_those_for_the_namespace(clock: Clock) -> None:
    api = MemoryApi(clock)
    api.add(kinds.NAMESPACES, objects.namespace(tier="gold"))
    api.add(kinds.NAMESPACES, objects.namespace("other"))
    gold = {"matchLabels": {"tier": "gold"}}
    async with running(api, clock) as replica:
        asked = admission(replica)
        assert await asked.default_policy(NAMESPACE) is None
        api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("a-limits", longestHoldSeconds=5))
        assert await asked.default_policy(NAMESPACE) is None
        for name, selector in (("z-for-all", {}), ("gold-b", gold), ("gold-a", gold)):
            api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy(name, selector, default={}))
        found = [await asked.default_policy(namespace) for namespace in (NAMESPACE, "other")]
        assert [policy and policy.name for policy in found] == ["gold-a", "z-for-all"]


async def test_a_withdrawn_default_is_named_in_the_refusal_and_in_the_status_of_its_copy(clock: Clock) -> None:
    api = MemoryApi(clock)
    api.add(kinds.NAMESPACES, objects.namespace())
    original = objects.cluster_policy("for-all", default={})
    copied = ClusterCheckpointPolicy.of(original).copy_for(NAMESPACE)
    copied["metadata"]["uid"] = "uid-copy"
    api.add(kinds.POLICIES, copied)
    api.add(kinds.CLUSTER_POLICIES, objects.cluster_policy("for-all"))

    def ready() -> Any:
        conditions = api.of(kinds.POLICIES)[0].get("status", {}).get("conditions", [])
        return next((item for item in conditions if item["type"] == "Ready"), {})

    async with running(api, clock) as replica:
        with pytest.raises(Unreadable, match=r"withdrawn: found no spec\.default .* expected a default\. Let an admin"):
            await admission(replica).policy(NAMESPACE, "for-all")
        await until(lambda: ready().get("reason") == "DefaultWithdrawn", "the copy to say so")
        assert ready()["status"] == "False"
        assert "create one of your own" in ready()["message"]


async def test_a_copy_that_was_changed_by_hand_is_not_what_new_workloads_get(clock: Clock) -> None:
    api = MemoryApi(clock)
    api.add(kinds.NAMESPACES, objects.namespace())
    original = objects.cluster_policy("for-all", default={})
    api.add(kinds.CLUSTER_POLICIES, original)
    copied = ClusterCheckpointPolicy.of(original).copy_for(NAMESPACE)
    copied["metadata"]["uid"], copied["spec"]["mode"] = "uid-copy", "Observe"
    api.add(kinds.POLICIES, copied)
    async with running(api, clock) as replica:
        found = await admission(replica).default_policy(NAMESPACE)
        assert found is not None
        assert found.spec.mode == "Enforce"
