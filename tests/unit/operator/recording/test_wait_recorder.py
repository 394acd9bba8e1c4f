"""What a gang shows that waits to start: the policy's status, the Preemption, Events and metrics, within 30 s."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import pytest

from gracepoint.wire.messages import Phase
from gracepoint_operator.decisions import waiting
from gracepoint_operator.decisions.waiting import StartWait
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject, Refused
from gracepoint_operator.recording.wait_recorder import OldestFirst
from gracepoint_operator.resources import WorkloadWaits
from gracepoint_operator.workloads import JOBSETS, Workload
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.api import MemoryApi
from tests.unit.operator.fakes.objects import NAMESPACE, Body, Clock
from tests.unit.operator.fakes.replica import Replica, running, until

NO_NODES = "0/12 nodes are available: 12 Insufficient nvidia.com/gpu"
QUIET_S = 0.2
WAITS, ENDED = "WaitingToStart", "WaitEnded"


def unscheduled(at: float, message: str = NO_NODES) -> Body:
    made = objects.pod(1, on="", phase="Pending", created_at=at)
    made["status"]["conditions"] = [objects.condition("PodScheduled", "False", reason="Unschedulable", message=message)]
    return made


def creating(at: float) -> Body:
    made = objects.pod(1, phase="Pending", created_at=at)
    made["status"]["containerStatuses"] = [{"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}]
    return made


def event(uid: str, reason: str, note: str, at: float) -> Body:
    return {
        "metadata": {"namespace": NAMESPACE, "name": f"e-{reason.lower()}", "uid": f"uid-{reason}"},
        "reason": reason,
        "note": note,
        "regarding": {"kind": "Pod", "uid": uid},
        "deprecatedLastTimestamp": objects.stamp(at),
    }


def status(api: MemoryApi) -> JsonObject:
    (body,) = api.of(kinds.POLICIES)
    found: JsonObject = body.get("status", {})
    return found


def started(body: JsonObject) -> tuple[str, str, str]:
    found = [item for item in body.get("conditions", []) if item["type"] == "Started"]
    return (found[0]["status"], found[0]["reason"], found[0]["message"]) if found else ("", "", "")


def waits(api: MemoryApi) -> list[JsonObject]:
    return [wait for entry in status(api).get("waits", []) for wait in entry["waits"]]


def is_said(api: MemoryApi, text: str) -> bool:
    return text in str(waits(api))


def longest(replica: Replica, kind: str) -> tuple[float | None, float | None]:
    get, labels = replica.metrics.registry.get_sample_value, {"kind": kind}
    return get("gracepoint_waiting_workloads", labels), get("gracepoint_waiting_seconds", labels)


def note_of(api: MemoryApi, reason: str) -> str:
    (body,) = (item for item in api.of(kinds.EVENTS) if item["reason"] == reason)
    return str(body["note"])


async def test_a_missing_node_is_named_everywhere_within_30_s_until_it_is_there(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.drop(kinds.PODS, objects.pod(1))
        replica.see(kinds.PODS, unscheduled(clock()))
        clock.move(5)
        await until(lambda: replica.core.cache.objects.pods["uid-pod-1-0"].holdup, "the pod")
        assert (waits(api), replica.reasons) == ([], []), "every start waits for a moment"
        clock.move(11)
        await until(lambda: waits(api), "the policy's status")
        (wait,) = waits(api)
        assert (wait["kind"], wait["what"], wait["message"]) == ("Node", "node for process 1", NO_NODES)
        assert started(status(api))[:2] == ("False", "WaitingForNode")
        assert "train waits for: node for process 1, since 2026-03-01T12:00:00Z; last: 0/12" in started(status(api))[2]
        await until(lambda: replica.reasons == [WAITS], "the Event")
        assert "node for process 1, since 16 s; last: 0/12 nodes" in note_of(api, WAITS)
        clock.move(884)
        assert longest(replica, "Node") == (1, 900)
        replica.see(kinds.PODS, objects.pod(1))
        await until(lambda: started(status(api))[0] == "True", "the condition's end")
        await until(lambda: replica.reasons == [WAITS, ENDED], "the Event of the end")
        assert (waits(api), longest(replica, "Node")) == ([], (0, 0))


async def test_the_preemption_that_the_gang_restarts_after_says_so_too(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(Phase.COMMITTED)
        body = await replica.phase("Committed")
        replica.watches_bring(body)
        for index in (0, 1):
            replica.drop(kinds.PODS, objects.pod(index))
        replica.drop(kinds.JOBS, objects.job())
        replica.see(JOBSETS, objects.jobset(restarts=1))
        replica.see(kinds.JOBS, objects.job(attempt=1))
        clock.move(20)  # the signal's deadline is over: else it would count again on the same node
        replica.see(kinds.PODS, objects.pod(0, attempt=1, created_at=clock()))
        pending = unscheduled(clock())
        pending["metadata"] = objects.pod(1, attempt=1, created_at=clock())["metadata"]
        replica.see(kinds.PODS, pending)
        clock.move(20)
        await until(lambda: started(replica.preemptions[0]["status"])[0] == "False", "the Preemption's condition")
        assert "node for process 1" in started(replica.preemptions[0]["status"])[2]
        replica.see(kinds.PODS, objects.pod(1, attempt=1, created_at=clock() - 20))
        await until(lambda: started(replica.preemptions[0]["status"])[0] == "True", "the condition's end")


async def test_a_pod_that_never_ends_on_a_dead_node_is_named_though_nothing_happens(
    api: MemoryApi, clock: Clock
) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, objects.pod(1, deleting_at=clock() + 5))
        await until(lambda: replica.core.cache.objects.pods["uid-pod-1-0"].deletion_at, "the pod")
        clock.move(6)
        await asyncio.sleep(QUIET_S)
        assert waits(api) == []
        clock.move(15)
        await until(lambda: is_said(api, "on the node node-2"), "the pod to be named with its node")


async def test_a_volume_that_cannot_be_mounted_is_known_from_the_pods_events(api: MemoryApi, clock: Clock) -> None:
    said = 'MountVolume.SetUp failed for volume "data": rpc error: permission denied'
    async with running(api, clock) as replica:
        api.add(kinds.EVENTS, event("uid-pod-1-0", "FailedMount", said, clock()))
        api.add(kinds.EVENTS, event("uid-pod-0-0", "FailedCreatePodSandBox", "of another pod", clock() + 5))
        replica.see(kinds.PODS, creating(clock()))
        clock.move(20)
        await until(lambda: [wait["kind"] for wait in waits(api)] == ["Volume"], "the volume")
        assert (waits(api)[0]["what"], waits(api)[0]["message"]) == ("a volume of process 1", said)
        await until(lambda: replica.reasons == [WAITS], "the Event")
        assert said in note_of(api, WAITS)
        asked = [call for call in api.calls if call.startswith("GET") and call.endswith("/events")]
        for _ in range(20):
            clock.move(1)
            replica.see(kinds.PODS, creating(clock()))
            await until(lambda: replica.core.cache.objects.pods["uid-pod-1-0"].holdup, "the pod")
        assert [call for call in api.calls if call.startswith("GET") and call.endswith("/events")] == asked, (
            "once in 30 s"
        )


async def test_a_quota_that_refuses_pods_is_known_from_the_jobs_events(api: MemoryApi, clock: Clock) -> None:
    said = 'Error creating: pods "train-workers-0-1-x" is forbidden: exceeded quota: gpus, requested: 8, used: 8'
    async with running(api, clock) as replica:
        api.add(kinds.EVENTS, event("uid-job-0", "FailedCreate", said, clock()))
        replica.drop(kinds.PODS, objects.pod(1))
        await until(lambda: "uid-pod-1-0" not in replica.core.cache.objects.pods, "the deletion")
        clock.move(1)
        replica.see(kinds.JOBS, objects.job())

        def is_known() -> bool:
            clock.move(0.1)  # until the wait has lasted
            return [wait.get("message") for wait in waits(api)] == [said]

        await until(is_known, "the Job's Event")
        assert started(status(api))[1] == "WaitingForPods"


async def test_a_wait_that_lasts_is_reported_twice_an_hour(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, unscheduled(clock()))
        clock.move(20)
        await until(lambda: replica.reasons == [WAITS], "the Event")
        for number in range(5):
            clock.move(60)
            replica.see(kinds.PODS, unscheduled(clock() - 20 - 60 * (number + 1), f"0/12 nodes, try {number}"))
            await until(functools.partial(is_said, api, f"try {number}"), "the newest message")
        assert replica.reasons == [WAITS], "not for each message"
        clock.move(1800)
        await until(lambda: replica.reasons == [WAITS] * 2, "the Event of the next half hour")


async def test_a_wait_that_ended_while_no_replica_ran_is_taken_back(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, unscheduled(clock()))
        clock.move(20)
        await until(lambda: waits(api), "the policy's status")
    api.add(kinds.PODS, objects.pod(1))
    async with running(api, clock):
        await until(lambda: waits(api) == [] and started(status(api))[0] == "True", "the status without it")


async def test_a_suspended_workload_is_in_the_list_and_is_no_failure(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.see(JOBSETS, objects.jobset(suspended=True))
        await until(lambda: replica.core.cache.objects.workloads[objects.JOBSET_UID].suspended, "the suspension")
        clock.move(20)
        await until(lambda: [wait["kind"] for wait in waits(api)] == ["Suspended"], "the list")
        assert started(status(api))[0] == "True"


async def test_a_suspension_is_told_with_what_kueue_says_of_the_quota(api: MemoryApi, clock: Clock) -> None:
    said = "couldn't assign flavors to pod set workers: insufficient unused quota for nvidia.com/gpu, 8 more needed"
    api.objects["/apis/kueue.x-k8s.io"] = {"preferredVersion": {"groupVersion": "kueue.x-k8s.io/v1beta2"}}
    reserved = objects.condition("QuotaReserved", "False", reason="Pending", message=said)
    api.add(kinds.KUEUE_WORKLOADS.of_version("kueue.x-k8s.io/v1beta2"), objects.workload(conditions=[reserved]))
    async with running(api, clock) as replica:
        replica.see(JOBSETS, objects.jobset(suspended=True))
        await until(lambda: replica.core.cache.objects.workloads[objects.JOBSET_UID].suspended, "the suspension")
        clock.move(20)
        await until(lambda: [wait.get("message") for wait in waits(api)] == [said], "Kueue's words")


async def test_events_that_cannot_be_read_leave_what_the_pods_say(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await until(lambda: "Ready" in str(status(api)), "the first status")
        api.failing, api.failing_only = [Refused("events is forbidden")], "GET"
        replica.see(kinds.PODS, creating(clock()))
        clock.move(20)
        await until(lambda: [wait["kind"] for wait in waits(api)] == ["Start"], "the wait")


async def test_a_wait_that_comes_later_is_named_as_soon_as_the_first_one(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        replica.drop(kinds.PODS, objects.pod(0))
        replica.see(kinds.PODS, unscheduled(clock()))
        replica.see(kinds.PODS, objects.pod(0, deleting_at=clock() + 10))
        clock.move(16)
        await until(lambda: is_said(api, "node for process 1"), "the first one")
        clock.move(10)
        await until(lambda: is_said(api, "on the node node-1"), "the one that came ten seconds later")


def queued(number: int) -> Body:
    """One of many JobSets that a queue holds up."""
    made = objects.jobset(uid=f"uid-queued-{number}", suspended=True)
    made["metadata"]["name"] = f"queued-{number:03}"
    return made


async def begin_to_wait(replica: Replica, numbers: range) -> None:
    """Until all up to the last one are named."""
    for number in numbers:
        replica.see(JOBSETS, queued(number))

    def are_named() -> bool:
        replica.clock.move(0.5)
        return longest(replica, "Suspended")[0] == numbers.stop

    await until(are_named, f"{numbers.stop} waits")


def looks_again_in_s(replica: Replica, uid: str) -> float:
    again_at = replica.core.writers.waits.observe(replica.core.cache.gang(uid))
    assert again_at is not None
    return again_at - replica.clock()


async def test_many_gangs_that_wait_take_turns_and_pods_of_lost_nodes_do_not(api: MemoryApi, clock: Clock) -> None:
    async with running(api, clock) as replica:
        await begin_to_wait(replica, range(40))
        assert looks_again_in_s(replica, "uid-queued-0") == 30
        await begin_to_wait(replica, range(40, 200))
        assert looks_again_in_s(replica, "uid-queued-0") == 100, "two in a second"
        replica.see(kinds.PODS, objects.pod(1, deleting_at=clock() - 20))
        await until(lambda: longest(replica, "Deletion")[0] == 1, "the pod that stays")
        assert looks_again_in_s(replica, objects.JOBSET_UID) == 30


async def test_a_gang_that_begins_or_ends_to_wait_costs_no_look_at_the_thousands_that_wait(
    api: MemoryApi, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    in_status = waiting.in_status

    def counted(workload: Workload, waits: Sequence[StartWait], now: float) -> WorkloadWaits:
        made.append(workload.name)
        return in_status(workload, waits, now)

    monkeypatch.setattr(waiting, "in_status", counted)
    async with running(api, clock) as replica:
        await begin_to_wait(replica, range(300))
        await until(lambda: len(status(api).get("waits", [])) == 50, "the first fifty in the policy's status")
        path = "/checkpointpolicies/careful/status"
        writes = sum(call.startswith("PATCH") and call.endswith(path) for call in api.calls)
        # After a write, and before the next one, a look may find that nothing has changed.
        assert len(made) <= 52 * 2 * (writes + 1), "what is written is made, and nothing else"
        assert [entry["name"] for entry in status(api)["waits"]][:2] == ["queued-000", "queued-001"]
        replica.drop(JOBSETS, queued(0))
        await until(lambda: longest(replica, "Suspended")[0] == 299, "the first one to be gone")


def test_the_gang_that_waits_longest_is_known_whoever_ends_to_wait() -> None:
    times = OldestFirst()
    for number in range(100):
        times.put(f"gang-{number}", 1000.0 - number)
    times.put("gang-99", 2000.0)  # it waits for something else now
    times.remove("gang-98")
    times.remove("another")
    assert [len(times), times.oldest] == [99, 903.0]
    for number in range(97, 0, -1):
        times.remove(f"gang-{number}")
    assert [len(times), times.oldest] == [2, 1000.0]
    times.remove("gang-0")
    times.remove("gang-99")
    assert [len(times), times.oldest] == [0, None]
