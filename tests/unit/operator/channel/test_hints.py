"""Hints: signs that a disruption may be near are told to those who understand them, once, and recorded nowhere."""

from __future__ import annotations

import dataclasses

import pytest

from gracepoint.wire.frames import Frame, Hint
from gracepoint_operator.channel.notifier import Subscriber
from gracepoint_operator.kube import objects as kinds
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import Clock
from tests.unit.operator.fakes.replica import Replica, cluster, frames, running, subscription, until


def subscribe(replica: Replica, index: int = 0, *, takes_hints: bool = True) -> Subscriber:
    hello = dataclasses.replace(subscription(index, f"s-{index}"), takes_hints=takes_hints)
    return replica.core.subscribers.add(hello)


def cordon(replica: Replica, name: str = "node-1") -> None:
    replica.see(kinds.NODES, objects.node(name, unschedulable=True))


async def hints(subscriber: Subscriber) -> list[Frame]:
    found = await frames(subscriber)
    assert all(isinstance(frame, Hint) for frame in found)
    return found


async def test_hint_is_sent_to_the_gang_once_without_a_preemption(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        gang = [subscribe(replica, index) for index in (0, 1)]
        cordon(replica)
        for index, subscriber in enumerate(gang):
            (hint,) = await hints(subscriber)
            assert isinstance(hint, Hint)
            assert (hint.pod_uid, hint.session) == (f"uid-pod-{index}-0", f"s-{index}")
            assert (hint.cause, hint.signal, hint.nodes) == ("Drain", "Node spec.unschedulable=true", ["node-1"])
        cordon(replica)  # the node is written again, for whatever reason
        clock.move(5)
        replica.see(kinds.PODS, objects.pod(0))
        assert [await hints(subscriber) for subscriber in gang] == [[], []]
        assert replica.preemptions == []


async def test_a_sign_that_goes_away_and_comes_again_is_announced_again(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = subscribe(replica)
        for _ in range(2):
            cordon(replica)
            assert len(await hints(subscriber)) == 1
            replica.see(kinds.NODES, objects.node("node-1"))
            assert await hints(subscriber) == []


async def test_a_hint_that_came_during_an_outage_is_sent_after_it(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        cordon(replica)
        await until(lambda: any(replica.core.cache.gang(objects.JOBSET_UID).marks.values()), "the cordon to be seen")
        late = subscribe(replica)
        replica.core.notifier.catch_up(late)
        await until(lambda: late.hinted, "the hint")
        assert len(await hints(late)) == 1


async def test_another_sign_is_another_hint_and_simultaneous_ones_are_one_frame(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = subscribe(replica)
        cordon(replica, "node-1")
        cordon(replica, "node-2")
        (both,) = await hints(subscriber)
        assert isinstance(both, Hint)
        assert (len(both.hints), both.nodes) == (2, ["node-1", "node-2"])
        taint = objects.taint("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule")
        replica.see(kinds.NODES, objects.node("node-1", unschedulable=True, taints=[taint]))
        (third,) = await hints(subscriber)
        assert isinstance(third, Hint)
        assert third.cause == "ScaleDown"
        assert not set(third.hints) & set(both.hints)


async def test_both_replicas_give_a_hint_the_same_name(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock, "replica-a") as first, running(api, clock, "replica-b") as second:
        names = []
        for replica in (first, second):
            subscriber = subscribe(replica)
            cordon(replica)
            (hint,) = await hints(subscriber)
            assert isinstance(hint, Hint)
            names.append(hint.hints)
        assert names[0] == names[1]


async def test_a_library_from_before_hints_is_sent_none(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        old, new = subscribe(replica, 0, takes_hints=False), subscribe(replica, 1)
        cordon(replica)
        assert len(await hints(new)) == 1
        assert await hints(old) == []


async def test_node_cordoned_before_the_pod_is_no_hint(api: MemoryApi, clock: Clock) -> None:
    owned = objects.node("node-1", unschedulable=True)
    entry = {
        "manager": "kubectl",
        "time": objects.stamp(objects.NOW - 500),
        "fieldsV1": {"f:spec": {"f:unschedulable": {}}},
    }
    owned["metadata"]["managedFields"] = [entry]
    api.add(kinds.NODES, owned)
    async with running(api, clock) as replica:
        subscriber = subscribe(replica)
        replica.see(kinds.PODS, objects.pod(0))
        assert await hints(subscriber) == []


@pytest.mark.parametrize("policy", [{"mode": "Observe"}, {"signals": ["NodeTaint"]}], ids=["observed", "not chosen"])
async def test_a_policy_that_does_not_want_it_keeps_the_hint_away(clock: Clock, policy: dict[str, object]) -> None:
    api = MemoryApi(clock)
    cluster(api, **policy)
    async with running(api, clock) as replica:
        subscriber = subscribe(replica)
        cordon(replica)
        await until(lambda: any(replica.core.cache.gang(objects.JOBSET_UID).marks.values()), "the cordon to be seen")
        assert await hints(subscriber) == []
