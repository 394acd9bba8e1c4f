"""Evictions of lifecycle.k8s.io: the gang saves, and only then the operator says that its turn is over."""

from __future__ import annotations

import asyncio
import copy
import functools

import pytest

from gracepoint.wire.frames import Notice, Retraction
from gracepoint.wire.messages import Phase
from gracepoint_operator.decisions.decide import End, decide
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.model.eviction_requests import RESPONDER
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE, NOW, Body, Clock, stamp
from tests.unit.operator.fakes.replica import Replica, cluster, frames, running, until

OTHERS = "imperative-eviction.k8s.io/evictor"


def eviction(
    pod_uid: str = "uid-pod-0-0",
    *,
    state: str = "Active",
    name: str = "one",
    namespace: str = NAMESPACE,
    at: float = NOW,
) -> Body:
    """As Kubernetes' controller writes it."""
    target = [
        {"name": RESPONDER, "priority": 20_000, "state": state},
        {"name": OTHERS, "priority": 100, "state": "Inactive"},
    ]
    started = {"startTime": stamp(at)} if state == "Active" else {}
    return {
        "apiVersion": "lifecycle.k8s.io/v1alpha1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": namespace, "uid": f"uid-{name}"},
        "spec": {"target": {"pod": {"name": "train-workers-0-0-0xyz", "uid": pod_uid}}},
        "status": {
            "requesters": [{"name": "example.com/drainer", "intent": "Eviction"}],
            "targetResponders": target,
            "responders": [{"name": RESPONDER, **started}, {"name": OTHERS}],
        },
    }


def ours(api: MemoryApi, name: str = "one") -> JsonObject:
    """The operator's entry in an Eviction."""
    stored = api.objects[kinds.EVICTIONS.path(NAMESPACE, name)]
    return next(item for item in stored["status"]["responders"] if item["name"] == RESPONDER)


async def answered(api: MemoryApi, field: str, name: str = "one") -> JsonObject:
    await until(lambda: field in ours(api, name), f"{field} in {ours(api, name)}")
    return ours(api, name)


async def test_turn_tells_the_gang_and_ends_with_the_commit(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1)
        replica.see(kinds.EVICTIONS, eviction())
        entry = await answered(api, "heartbeatTime")
        assert entry["expectedCompletionTime"] == stamp(NOW + 60), "the policy's bound"
        assert entry["startTime"] == stamp(NOW), "what Kubernetes wrote stays"
        assert "completionTime" not in entry
        (notice,) = await frames(subscriber)
        assert isinstance(notice, Notice)
        assert (notice.cause, notice.signal) == ("Drain", "eviction requested by example.com/drainer")
        assert (await replica.phase("Noticed"))["spec"]["cancelable"] is True
        clock.move(5)
        await replica.report(Phase.WRITTEN)
        assert "completionTime" not in ours(api)
        await replica.report(Phase.COMMITTED)
        entry = await answered(api, "completionTime")
        assert (entry["completionTime"], entry["message"]) == (
            stamp(NOW + 5),
            f"step 40 is saved (Preemption train-{objects.JOBSET_UID[:8]}-1)",
        )


async def test_withdrawn_request_lets_the_gang_train_on(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1)
        replica.see(kinds.EVICTIONS, eviction())
        await answered(api, "heartbeatTime")
        replica.see(kinds.EVICTIONS, eviction(state="Canceled"))
        await replica.phase("Retracted")
        _, retraction = await frames(subscriber)
        assert isinstance(retraction, Retraction)
        assert "completionTime" not in ours(api)


async def test_deleted_eviction_lets_the_gang_train_on(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.EVICTIONS, eviction())
        await replica.phase("Noticed")
        replica.drop(kinds.EVICTIONS, eviction())
        await replica.phase("Retracted")
        clock.move(1)
        replica.see(kinds.EVICTIONS, eviction(name="two", at=clock()))
        await replica.phase("Noticed", epoch=1)
        await answered(api, "heartbeatTime", "two")


async def test_attempt_through_the_other_api_is_not_taken_back(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.EVICTIONS, eviction())
        await replica.phase("Noticed")
        assert await replica.core.evictions.attempted(NAMESPACE, "train-workers-0-0-0xyz", None) is not None
        replica.see(kinds.EVICTIONS, eviction(state="Canceled"))
        await until(lambda: not replica.core.cache.gang(objects.JOBSET_UID).evictions, "the end of the turn")
        assert replica.preemptions[0]["status"]["phase"] == "Noticed"


async def test_the_bound_ends_the_turn_without_a_word_of_the_gang(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.EVICTIONS, eviction())
        await answered(api, "heartbeatTime")
        clock.move(59)
        assert "completionTime" not in ours(api)
        clock.move(1)
        assert "not held any longer" in (await answered(api, "completionTime"))["message"]


async def test_long_hold_gives_signs_of_life(clock: Clock) -> None:
    api = MemoryApi(clock)
    cluster(api, evictionHold={"boundSeconds": 3600})
    async with running(api, clock) as replica:
        replica.see(kinds.EVICTIONS, eviction())
        await answered(api, "heartbeatTime")
        await replica.report(Phase.FROZEN)  # a gang that answers nothing is held for a minute
        for number in (1, 2, 3):
            clock.move(60)
            wanted = stamp(NOW + 60 * number)
            await until(functools.partial(_has_heartbeat, api, wanted), f"the sign of life {number}")
        assert "completionTime" not in ours(api)


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"evictionHold": {"enabled": False}}, id="hold is off"),
        pytest.param({"mode": "Observe"}, id="observed only"),
        pytest.param({"signals": ["NodeTaint"]}, id="evictions do not count"),
    ],
)
async def test_policy_without_a_hold_ends_the_turn_at_once(clock: Clock, policy: Body) -> None:
    api = MemoryApi(clock)
    cluster(api, **policy)
    async with running(api, clock) as replica:
        replica.see(kinds.EVICTIONS, eviction())
        await answered(api, "completionTime")


def passed_on(replica: Replica, name: str = "one", state: str = "Completed", intent: str = "Eviction") -> Body:
    """The Eviction with the operator's answer, as Kubernetes' controller writes it then."""
    body = copy.deepcopy(replica.api.objects[kinds.EVICTIONS.path(NAMESPACE, name)])
    body["status"]["requesters"][0]["intent"] = intent
    body["status"]["targetResponders"][0]["state"] = state
    body["status"]["targetResponders"][1]["state"] = "Active"
    return body


@pytest.mark.parametrize("state", ["Active", "Completed"])
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param({"evictionHold": {"enabled": False}}, id="hold is off"),
        pytest.param({"mode": "Drill"}, id="drill"),
        pytest.param({"mode": "Observe"}, id="observed only"),
        pytest.param({}, id="the bound is over"),
    ],
)
async def test_own_answer_does_not_retract_the_preemption(clock: Clock, policy: Body, state: str) -> None:
    api = MemoryApi(clock)
    cluster(api, **policy)
    async with running(api, clock) as replica:
        subscriber = replica.subscribe(1)
        replica.see(kinds.EVICTIONS, eviction())
        await replica.phase("Noticed")
        clock.move(0 if policy else 60)
        await answered(api, "completionTime")
        replica.see(kinds.EVICTIONS, passed_on(replica, state=state))
        await until(lambda: not _waits(replica), "the end of the turn")
        clock.move(1)
        decided = decide(replica.core.cache.gang(objects.JOBSET_UID), clock())
        assert not [item for item in decided if isinstance(item, End)]
        assert not [frame for frame in await frames(subscriber) if isinstance(frame, Retraction)]
        assert [body["status"]["phase"] for body in replica.preemptions] == ["Noticed"]


@pytest.mark.parametrize("canceled", [{"state": "Canceled"}, {"intent": "Withdrawn"}], ids=["canceled", "withdrawn"])
async def test_request_withdrawn_after_the_answer_retracts(clock: Clock, canceled: dict[str, str]) -> None:
    api = MemoryApi(clock)
    cluster(api, evictionHold={"enabled": False})
    async with running(api, clock) as replica:
        replica.see(kinds.EVICTIONS, eviction())
        await answered(api, "completionTime")
        replica.see(kinds.EVICTIONS, passed_on(replica))
        await replica.phase("Noticed")
        replica.see(kinds.EVICTIONS, passed_on(replica, **canceled))
        await replica.phase("Retracted")


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(eviction(name="two", namespace="team-b"), id="in another namespace"),
        pytest.param(eviction(name="two", state="Inactive"), id="not our turn"),
        pytest.param(eviction(name="two", state="Canceled"), id="canceled"),
    ],
)
async def test_second_eviction_of_a_pod_does_not_hide_the_first(api: MemoryApi, clock: Clock, second: Body) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.EVICTIONS, eviction())
        await answered(api, "heartbeatTime")
        replica.see(kinds.EVICTIONS, second)
        known, key = replica.core.cache.evictions, (second["metadata"]["namespace"], "two")
        await until(lambda: known.named(key), "the second")
        assert _waits(replica)
        replica.drop(kinds.EVICTIONS, second)
        await until(lambda: known.named(key) is None, "the end of the second")
        assert _waits(replica)
        await replica.phase("Noticed")


async def test_what_was_written_is_forgotten_with_a_deleted_eviction(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, under_way, go_on = api.apply_status, asyncio.Event(), asyncio.Event()

    async def slow(kind: kinds.Kind, namespace: str, name: str, body: JsonObject, *, manager: str) -> JsonObject:
        found = await apply(kind, namespace, name, body, manager=manager)
        if kind is kinds.EVICTIONS:
            under_way.set()
            await asyncio.wait_for(go_on.wait(), 60)
        return found

    monkeypatch.setattr(api, "apply_status", slow)
    async with running(api, clock) as replica:
        replica.see(kinds.EVICTIONS, eviction())
        await asyncio.wait_for(under_way.wait(), 60)
        replica.drop(kinds.EVICTIONS, eviction())
        await replica.phase("Retracted")
        go_on.set()
        responder = replica.core._eviction_responder
    assert responder._written == {}


def _waits(replica: Replica) -> bool:
    """Whether an Eviction of the gang waits for the operator."""
    return any(asked.active for asked in replica.core.cache.gang(objects.JOBSET_UID).evictions.values())


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(eviction("uid-somebody"), id="of another pod"),
        pytest.param(eviction(state="Inactive"), id="somebody else's turn"),
        pytest.param(eviction(namespace="team-b"), id="of another namespace"),
    ],
)
async def test_eviction_that_is_not_ours_is_left_alone(api: MemoryApi, clock: Clock, other: Body) -> None:
    async with running(api, clock) as replica:
        before = api.add(kinds.EVICTIONS, other)
        replica.core.feed(kinds.EVICTIONS, "ADDED", before)
        replica.taint()  # what comes after it is decided
        await replica.phase("Noticed")
        assert replica.preemptions[0]["spec"]["cause"] == "SpotTermination"
        assert api.objects[kinds.EVICTIONS.path(other["metadata"]["namespace"], "one")] == before


async def test_pod_that_comes_after_its_eviction_is_saved(api: MemoryApi, clock: Clock) -> None:
    api.remove(kinds.PODS, objects.pod(0))
    api.add(kinds.EVICTIONS, eviction())
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, objects.pod(0))
        await answered(api, "heartbeatTime")
        assert (await replica.phase("Noticed"))["spec"]["pods"] == ["train-workers-0-0-0xyz"]


async def test_two_replicas_write_one_end(api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[str] = []
    apply = api.apply_status

    async def strict(kind: kinds.Kind, namespace: str, name: str, body: JsonObject, *, manager: str) -> JsonObject:
        (entry,) = body["status"].get("responders", [{}])
        if "completionTime" in entry:
            if "completionTime" in ours(api):
                raise client.Refused("status.responders[0].completionTime: field is immutable")
            ends.append(entry["completionTime"])
        return await apply(kind, namespace, name, body, manager=manager)

    monkeypatch.setattr(api, "apply_status", strict)
    async with running(api, clock) as first, running(api, clock, "replica-b") as second:
        for replica in (first, second):
            replica.see(kinds.EVICTIONS, eviction())
        await answered(api, "heartbeatTime")
        await first.report(Phase.COMMITTED)
        await second.report(Phase.COMMITTED)
        await answered(api, "completionTime")
        await until(lambda: _is_over(second) and _is_over(first), "both replicas to know that it is over")
        assert len(ends) == 1


def _has_heartbeat(api: MemoryApi, wanted: str) -> bool:
    return bool(ours(api)["heartbeatTime"] == wanted)


def _is_over(replica: Replica) -> bool:
    """Whether the replica has nothing more to write; its watch brings what is stored."""
    for body in replica.api.of(kinds.EVICTIONS):
        replica.core.feed(kinds.EVICTIONS, "MODIFIED", body)
    return not _waits(replica)
