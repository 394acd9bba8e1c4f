"""Pods are protected from autoscalers while the newest checkpoint of their gang is too old."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from gracepoint.wire.messages import Spent
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.kube.objects import PROTECTING, SET_BY_US
from gracepoint_operator.workloads import JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE, Body, Clock
from tests.unit.operator.fakes.replica import Replica, cluster, kept_of, running, started, subscription, until

KARPENTER = "karpenter.sh/do-not-disrupt"
YOUNG = {"checkpointYoungerThanSeconds": 600}
JOINED = Spent(now_s=2.0, joined_s=1.0)
RESTORED = Spent(now_s=100.0, joined_s=1.0, restored_s=100.0)


@pytest.fixture
def api(clock: Clock) -> MemoryApi:
    made = MemoryApi(clock)
    cluster(made, voluntaryDisruption=YOUNG)
    return made


def annotations_of(api: MemoryApi, index: int = 0) -> Body:
    stored = api.objects[kinds.PODS.path(NAMESPACE, objects.pod(index)["metadata"]["name"])]
    return dict(stored["metadata"].get("annotations", {}))


def pod_writes(api: MemoryApi) -> list[str]:
    return [call for call in api.calls if call.startswith("PATCH") and "/pods/" in call]


def echo(replica: Replica) -> None:
    """The watches bring what is stored."""
    for kind in (kinds.POLICIES, kinds.PODS):
        for body in replica.api.of(kind):
            replica.core.feed(kind, "MODIFIED", body)


async def protected(replica: Replica, expected: bool) -> None:
    def reached() -> bool:
        echo(replica)
        return all((annotations_of(replica.api, index).get(KARPENTER) == "true") is expected for index in (0, 1))

    await until(reached, f"protected: {expected}; found {[annotations_of(replica.api, index) for index in (0, 1)]}")


def hear(replica: Replica, spent: Spent) -> None:
    pod = replica.core.cache.objects.pods["uid-pod-0-0"]
    replica.core.reports.subscribed(pod, dataclasses.replace(subscription(), spent=spent))


async def test_pods_are_open_while_the_checkpoint_is_young(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        hear(replica, JOINED)
        await protected(replica, True)  # it has not restored yet
        hear(replica, RESTORED)
        await protected(replica, False)
        clock.move(600)
        await protected(replica, True)
        hear(replica, dataclasses.replace(RESTORED, now_s=700.0, restored_s=100.0, trained_s=101.0, saved_s=650.0))
        await protected(replica, False)
        clock.move(549)
        await asyncio.sleep(0.2)
        assert KARPENTER not in annotations_of(api)
        clock.move(1)
        await protected(replica, True)


async def test_two_replicas_agree_and_write_each_pod_once(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as first, running(api, clock, "replica-b") as second:
        hear(first, JOINED)
        await protected(first, True)
        await protected(second, True)
        hear(first, RESTORED)
        await protected(first, False)
        await protected(second, False)
        assert len(pod_writes(api)) <= 8


async def test_setting_that_is_taken_back_leaves_no_annotation(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        hear(replica, JOINED)
        await protected(replica, True)
        replica.see(kinds.POLICIES, objects.policy())
        await protected(replica, False)
        assert SET_BY_US not in annotations_of(api)


async def test_policy_without_the_setting_touches_no_pod(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api)
    async with running(api, clock) as replica:
        replica.taint()
        await replica.phase("Noticed")
        hear(replica, RESTORED)
        await asyncio.sleep(0.1)
        assert pod_writes(api) == []


async def test_new_life_is_protected_until_it_has_restored(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        hear(replica, RESTORED)
        await protected(replica, False)
        clock.move(60)
        for index in (0, 1):
            replica.drop(kinds.PODS, objects.pod(index))
        replica.see(JOBSETS, objects.jobset(restarts=1))
        replica.see(kinds.JOBS, objects.job(attempt=1))
        new = [objects.pod(index, attempt=1, created_at=clock()) for index in (0, 1)]
        for body in new:
            replica.see(kinds.PODS, body)
        pods = replica.core.cache.objects.pods
        await until(lambda: "uid-pod-0-1" in pods, "the new pods to be seen")
        joined = dataclasses.replace(subscription(session="s-1", attempt=1), spent=JOINED)
        replica.core.reports.subscribed(pods["uid-pod-0-1"], joined)

        def reached() -> bool:
            echo(replica)
            stored = [api.objects[kinds.PODS.path(NAMESPACE, body["metadata"]["name"])] for body in new]
            return all(body["metadata"].get("annotations", {}).get(KARPENTER) == "true" for body in stored)

        await until(reached, "the new pods to be protected")


async def test_operator_without_the_right_writes_no_pod_and_says_so(api: MemoryApi, clock: Clock) -> None:
    async with started(Replica(api, clock, "replica-a", protects_pods=False)) as replica:

        def reason() -> str:
            (policy,) = api.of(kinds.POLICIES)
            conditions = policy.get("status", {}).get("conditions", [])
            return next((item["reason"] for item in conditions if item["type"] == "Ready"), "")

        await until(lambda: reason() == "PodsNotProtected", "the policy's status to say so")
        hear(replica, JOINED)
        echo(replica)
        await asyncio.sleep(0.1)
        assert pod_writes(api) == []


@pytest.mark.parametrize("processes_start", [False, True], ids=["nothing is known of it", "its library tells no times"])
async def test_gang_without_an_account_is_not_protected(clock: Clock, *, processes_start: bool) -> None:
    api = MemoryApi(clock)
    cluster(api, voluntaryDisruption=YOUNG)
    async with running(api, clock) as replica:
        if processes_start:
            replica.subscribe()
        clock.move(10_000)
        for _ in range(10):
            echo(replica)
            await asyncio.sleep(0.02)
        assert pod_writes(api) == []


async def test_first_report_of_a_known_life_protects_its_gang(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:

        def seen() -> bool:
            echo(replica)
            policy = replica.core.cache.policies.get((objects.NAMESPACE, "careful"))
            return policy is not None and any(entry.lives for entry in policy.status.goodput or ())

        await until(seen, "the gang's life to be in the policy's status")
        hear(replica, JOINED)
        await protected(replica, True)


async def test_policy_that_is_deleted_leaves_the_annotations_as_they_are(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        hear(replica, JOINED)
        await protected(replica, True)
        replica.drop(kinds.POLICIES, objects.policy())
        await asyncio.sleep(0.2)
        assert annotations_of(api)[KARPENTER] == "true"


async def test_policy_that_cannot_be_read_changes_no_annotation(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        hear(replica, JOINED)
        await protected(replica, True)
    body = api.add(kinds.POLICIES, objects.policy() | {"spec": {"checkpoint": {"directory": 7}}})
    async with running(api, clock) as replica:
        assert replica.core.cache.unreadable_policies(), body
        echo(replica)
        await asyncio.sleep(0.2)
        assert annotations_of(api)[KARPENTER] == "true"


class SlowApi(MemoryApi):
    """Patches of pods wait until they may go on."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.under_way = 0
        self.most = 0
        self.go = asyncio.Event()

    async def merge(self, kind: kinds.Kind, namespace: str | None, name: str, body: JsonObject) -> JsonObject:
        if kind is not kinds.PODS:
            return await super().merge(kind, namespace, name, body)
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.go.wait()
            return await super().merge(kind, namespace, name, body)
        finally:
            self.under_way -= 1


@pytest.fixture
def slow(clock: Clock) -> SlowApi:
    made = SlowApi(clock)
    cluster(made, voluntaryDisruption=YOUNG)
    return made


async def writes_begin(slow: SlowApi, replica: Replica, count: int) -> None:
    """A process has joined; waits until so many writes of pods are under way."""
    hear(replica, JOINED)

    def begun() -> bool:
        echo(replica)
        return slow.under_way >= count

    await until(begun, f"{count} writes of pods to be under way")


async def test_writes_of_a_large_gang_leave_threads_for_others(slow: SlowApi, clock: Clock) -> None:
    for index in range(2, 40):
        slow.add(kinds.PODS, objects.pod(index))
    async with running(slow, clock) as replica:
        await writes_begin(slow, replica, 1)
        await asyncio.sleep(0.2)
        assert slow.under_way <= 2
        slow.go.set()

        def done() -> bool:
            echo(replica)
            return all(annotations_of(slow, index).get(KARPENTER) == "true" for index in range(40))

        await until(done, "all pods to be protected")
        assert slow.most <= 2


async def test_pod_that_the_other_replica_has_written_is_left_out(slow: SlowApi, clock: Clock) -> None:
    for index in range(2, 40):
        slow.add(kinds.PODS, objects.pod(index))
    async with running(slow, clock) as replica:
        await writes_begin(slow, replica, 2)
        for index in range(40):
            body = objects.pod(index)
            body["metadata"]["annotations"] = {**PROTECTING, SET_BY_US: ",".join(PROTECTING)}
            replica.see(kinds.PODS, body)
        await asyncio.sleep(0)  # the watch's events are handled
        slow.go.set()
        await asyncio.sleep(0.2)
        assert len(pod_writes(slow)) == 2


async def test_write_that_ends_after_its_pod_is_forgotten(slow: SlowApi, clock: Clock) -> None:
    async with running(slow, clock) as replica:
        await writes_begin(slow, replica, 2)
        for index in (0, 1):
            replica.core.feed(kinds.PODS, "DELETED", objects.pod(index))
        await until(lambda: not replica.core.cache.objects.pods, "the pods to be forgotten")
        slow.go.set()
        await until(lambda: slow.under_way == 0, "the writes to end")
        await asyncio.sleep(0)
        assert kept_of(replica, "uid-pod-0-0") == []
