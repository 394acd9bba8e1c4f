"""Pods that have ended without an error of their program, and no preemption is about them: an Event says why."""

from __future__ import annotations

import asyncio

import pytest

from gracepoint.wire.messages import Phase
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


def told(api: MemoryApi, reason: str = "PodDisrupted") -> list[JsonObject]:
    return [event for event in api.of(kinds.EVENTS) if event["reason"] == reason]


def left(index: int, code: int, reason: str = "Error") -> objects.Body:
    body = objects.pod(index, phase="Failed")
    state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": objects.stamp(objects.NOW)}}
    body["status"]["containerStatuses"] = [{"name": "trainer", "state": state}]
    return body


LEFT = {
    77: "it has saved",
    78: "it was to save, and has not in time",
    79: "it did not get into the job, or another process was lost",
}


@pytest.mark.parametrize("code", LEFT)
async def test_processes_that_leave_by_a_code_of_the_library_are_named_once(
    api: MemoryApi, clock: Clock, code: int
) -> None:
    async with running(api, clock) as replica, running(api, clock, "replica-b") as other:
        for index in (0, 1):
            replica.see(kinds.PODS, left(index, code))
            other.core.feed(kinds.PODS, "MODIFIED", left(index, code))
        await until(lambda: told(api, "ProcessLeft"), "the Event")
        await asyncio.sleep(QUIET_S)
        (event,) = told(api, "ProcessLeft")
    assert (event["regarding"]["kind"], event["regarding"]["name"], event["type"]) == ("JobSet", "train", "Normal")
    expected = f"on node-1 left with exit code {code}: {LEFT[code]}; this does not count"
    assert event["note"].endswith(expected)


@pytest.mark.parametrize(("code", "reason"), [(1, "Error"), (134, "Error"), (137, "OOMKilled"), (255, "Error")])
async def test_a_program_that_failed_has_not_left(api: MemoryApi, clock: Clock, code: int, reason: str) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, left(0, code, reason))
        await asyncio.sleep(QUIET_S)
    assert told(api, "ProcessLeft") == told(api, "ContainerLost") == []


@pytest.mark.parametrize(
    ("code", "reason", "why"),
    [
        (137, "ContainerStatusUnknown", "its pod was deleted before it was started, or its node lost it"),
        (128, "StartError", "the runtime could not start it"),
        (255, "Unknown", "its node was reset"),
    ],
)
async def test_what_counts_though_no_program_failed_is_named(
    api: MemoryApi, clock: Clock, code: int, reason: str, why: str
) -> None:
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, left(0, code, reason))
        await until(lambda: told(api, "ContainerLost"), "the Event")
    (event,) = told(api, "ContainerLost")
    counts = "this counts, as a Job cannot tell it from an error of the program"
    assert event["note"].endswith(f"on node-1 has exit code {code} ({reason}): {why}; {counts}")
    assert event["type"] == "Warning"


@pytest.mark.parametrize(
    ("reason", "restarts", "named"),
    [
        pytest.param("ContainerStatusUnknown", 1, True, id="the kubelet of a fresh machine counts a restart"),
        pytest.param("ContainerStatusUnknown", 2, False, id="it was started again before"),
        pytest.param("Unknown", 1, False, id="it was started again"),
    ],
)
async def test_a_container_that_a_fresh_machine_does_not_know_is_named(
    api: MemoryApi, clock: Clock, reason: str, restarts: int, named: bool
) -> None:
    body = left(0, 137, reason)
    (status,) = body["status"]["containerStatuses"]
    status |= {"restartCount": restarts, "lastState": status["state"]}
    async with running(api, clock) as replica:
        replica.see(kinds.PODS, body)
        replica.see(kinds.PODS, left(1, 128, "StartError"))  # another one, which is named whatever becomes of the first
        await until(lambda: [event for event in told(api, "ContainerLost") if "exit code 128" in event["note"]], "it")
        if named:
            await until(lambda: len(told(api, "ContainerLost")) == 2, "the Event")
    assert any(f"({reason})" in event["note"] for event in told(api, "ContainerLost")) is named


@pytest.mark.parametrize("phase", [Phase.COMMITTED, Phase.DURABLE], ids=["ended", "whose end is not known yet"])
async def test_processes_that_leave_for_a_preemption_are_not_named_again(
    api: MemoryApi, clock: Clock, phase: Phase
) -> None:
    async with running(api, clock) as replica:
        replica.subscribe(0)
        replica.taint()
        await replica.phase("Noticed")
        await replica.report(phase)
        replica.watches_bring(await replica.phase(phase))
        replica.see(kinds.PODS, left(0, 77))
        await asyncio.sleep(QUIET_S)
    assert told(api, "ProcessLeft") == []


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
