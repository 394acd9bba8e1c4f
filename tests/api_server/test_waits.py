"""What a gang waits for before it runs, on a real API server: named within 30 s, with what Events say of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.workloads import JOBSETS
from tests.api_server.gang import Gang, Replica, running, until

NO_NODES = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
#: As kubelets and controllers post them.
CORE_EVENTS = Kind("/api/v1", "events")


class Shifted:
    """The clock of the machine, and what a test has let pass."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.passed_s


async def remake(gang: Gang, *, node: str | None, **status: Any) -> str:
    """Another pod in the place of process 1. Returns its UID."""
    body = await gang.api.get(objects.PODS, gang.name, gang.pod(1))
    gang.server.kubectl("delete", "pod", gang.pod(1), f"--namespace={gang.name}", "--force")
    spec = gang.pod_spec(1)
    if node is None:
        del spec["nodeName"]
    meta = {field: body["metadata"][field] for field in ("name", "labels")}
    made = await gang.api.create(objects.PODS, gang.name, {"metadata": meta, "spec": spec})
    await gang.api.merge_status(objects.PODS, gang.name, gang.pod(1), {"status": status})
    return str(made["metadata"]["uid"])


async def waits(gang: Gang) -> list[JsonObject]:
    status = (await gang.api.get(objects.POLICIES, gang.name, "careful")).get("status", {})
    return [wait for entry in status.get("waits", []) for wait in entry["waits"]]


async def named(gang: Gang, replica: Replica, kind: str) -> JsonObject:
    """The wait of this kind, once the watches have brought it and 16 s have passed."""

    async def found() -> JsonObject | None:
        await replica.watch()
        return next((wait for wait in await waits(gang) if wait["kind"] == kind), None)

    shown: JsonObject = await until(found, f"a wait of the kind {kind}")
    return shown


async def notes(gang: Gang, reason: str) -> list[str]:
    events = (await gang.api.list(objects.EVENTS, namespace=gang.name)).items
    return [event["note"] for event in events if event["reason"] == reason]


async def say(gang: Gang, kind: str, name: str, uid: str, reason: str, message: str) -> None:
    """Posts an Event as controllers and kubelets do."""
    about = {"kind": kind, "namespace": gang.name, "name": name, "uid": uid}
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    meta = {"name": f"{name}.{reason.lower()}", "namespace": gang.name}
    body = {"metadata": meta, "involvedObject": about, "reason": reason, "message": message, "type": "Warning"}
    times = {"firstTimestamp": at, "lastTimestamp": at, "count": 1, "source": {"component": "a test"}}
    await gang.api.create(CORE_EVENTS, gang.name, body | times)


async def test_a_missing_node_is_in_the_status_an_event_and_a_metric(gang: Gang) -> None:
    await gang.make()
    clock = Shifted()
    async with running(gang, clock=clock) as replica:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": NO_NODES}
        await remake(gang, node=None, conditions=[condition])
        await replica.watch()
        clock.passed_s = 16.0
        wait = await named(gang, replica, "Node")
        assert (wait["what"], wait["message"]) == ("node for process 1", NO_NODES)
        started = await gang.policy_condition("Started")
        assert (started["status"], started["reason"]) == ("False", "WaitingForNode")
        (note,) = await until(lambda: notes(gang, "WaitingToStart"), "the Event")
        assert NO_NODES in note
        assert 15 <= replica.sample("gracepoint_waiting_seconds", kind="Node") < 30 + 60
        assert replica.sample("gracepoint_waiting_workloads", kind="Node") == 1
        await remake(gang, node=gang.node(1), phase="Running", conditions=[{"type": "Ready", "status": "True"}])

        async def over() -> bool:
            await replica.watch()
            return (await gang.policy_condition("Started"))["status"] == "True" and await waits(gang) == []

        await until(over, "the end of the wait")
        await until(lambda: notes(gang, "WaitEnded"), "the Event of the end")


@pytest.mark.parametrize(
    ("reason", "kind"), [("FailedMount", "Volume"), ("FailedCreatePodSandBox", "Network"), ("Pulling", "Start")]
)
async def test_what_only_events_of_the_pod_say_is_read_there(gang: Gang, reason: str, kind: str) -> None:
    gang.name = f"{gang.name}-{kind.lower()}"
    await gang.make()
    clock = Shifted()
    async with running(gang, clock=clock) as replica:
        creating = {"name": "c", "state": {"waiting": {"reason": "ContainerCreating"}}, "image": "i", "imageID": ""}
        status = creating | {"ready": False, "restartCount": 0}
        uid = await remake(gang, node=gang.node(1), containerStatuses=[status])
        other = await gang.api.get(objects.PODS, gang.name, gang.pod(0))
        await say(gang, "Pod", gang.pod(1), uid, reason, f"{reason} of process 1")
        await say(gang, "Pod", gang.pod(0), other["metadata"]["uid"], "FailedAttachVolume", "of another pod")
        await replica.watch()
        clock.passed_s = 16.0
        assert (await named(gang, replica, kind))["message"] == f"{reason} of process 1"


async def test_a_quota_that_refuses_pods_is_named_from_the_jobs_event(gang: Gang) -> None:
    await gang.make()
    clock = Shifted()
    said = 'Error creating: pods "train-workers-0-1" is forbidden: exceeded quota: gpus'
    async with running(gang, clock=clock) as replica:
        gang.server.kubectl("delete", "pod", gang.pod(1), f"--namespace={gang.name}", "--force")
        job = await gang.api.get(objects.JOBS, gang.name, "train-workers-0")
        await say(gang, "Job", "train-workers-0", job["metadata"]["uid"], "FailedCreate", said)
        await replica.watch()
        await until(lambda: replica.core.cache.objects.pod_named(gang.name, gang.pod(1)) is None, "the deletion")
        clock.passed_s = 16.0
        wait = await named(gang, replica, "Pods")
        assert (wait["what"], wait["message"]) == ("pods of the Job train-workers-0: 1 of 2 exist", said)


async def test_a_suspended_workload_is_listed(gang: Gang) -> None:
    await gang.make()
    clock = Shifted()
    async with running(gang, clock=clock) as replica:
        await gang.api.merge(JOBSETS, gang.name, "train", {"spec": {"suspend": True}})
        await replica.watch()
        clock.passed_s = 16.0
        await named(gang, replica, "Suspended")
