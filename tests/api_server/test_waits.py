"""What a gang waits for before it runs, on a real API server: named within 30 s, with what Events say of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire.names import LABEL_POLICY
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject
from gracepoint_operator.kube.objects import Kind
from gracepoint_operator.workloads import JOBSETS
from tests.api_server.gang import Gang, Replica, running, until
from tests.api_server.releases import NAMESPACE, may_read, templates
from tests.testcluster.api_server import ApiServer
from tests.testcluster.shell import wait_until

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


async def terminating(gang: Gang, replica: Replica, clock: Shifted) -> None:
    """Process 1's pod is deleted, and no kubelet ends it."""
    gang.server.kubectl("delete", "pod", gang.pod(1), f"--namespace={gang.name}", "--wait=false")
    await replica.watch()
    clock.passed_s += 50.0
    wait = await named(gang, replica, "Deletion")
    assert (wait["pod"], wait["node"]) == (gang.pod(1), gang.node(1))


async def looked_again(gang: Gang, replica: Replica, clock: Shifted, times: int = 3) -> None:
    """Lets looks pass."""
    for _ in range(times):
        clock.passed_s += 31.0
        for _ in range(4):
            await replica.watch()
            await asyncio.sleep(0.1)


async def is_there(gang: Gang) -> bool:
    """Whether process 1's pod is there."""
    names = {body["metadata"]["name"] for body in (await gang.api.list(objects.PODS, namespace=gang.name)).items}
    return gang.pod(1) in names


async def make_with(gang: Gang, **spec: object) -> None:
    await gang.make()
    if spec:
        await gang.api.merge(objects.POLICIES, gang.name, "careful", {"spec": spec})
    ready = {"conditions": [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]}
    await gang.api.merge_status(objects.NODES, None, gang.node(1), {"status": ready})


OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
SWITCH = {"lostNodes": {"deletePods": True}}


async def test_a_pod_of_a_node_that_is_only_not_ready_is_named_and_never_deleted_by_force(gang: Gang) -> None:
    await make_with(gang, **SWITCH)
    clock = Shifted()
    async with running(gang, clock=clock, deletes_pods=True) as replica:
        await terminating(gang, replica, clock)
        await looked_again(gang, replica, clock)
        assert await is_there(gang)
        assert await notes(gang, "LostPodDeleted") == []


@pytest.fixture
def node_claims(server: ApiServer) -> Iterator[None]:
    """The kind of Karpenter's NodeClaims, without Karpenter."""
    names = {"plural": "nodeclaims", "singular": "nodeclaim", "kind": "NodeClaim", "listKind": "NodeClaimList"}
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    version = {"name": "v1", "served": True, "storage": True, "schema": schema}
    spec = {"group": "karpenter.sh", "scope": "Cluster", "names": names, "versions": [version]}
    crd = {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "spec": spec}
    server.define(bodies=(crd | {"metadata": {"name": "nodeclaims.karpenter.sh"}},))
    yield
    server.kubectl("delete", "crd", "nodeclaims.karpenter.sh")


@pytest.mark.usefixtures("node_claims")
# tests/cluster has the taint.
@pytest.mark.parametrize("lost", [pytest.param("taint", marks=pytest.mark.variant), "node", "claim"])
async def test_a_pod_of_a_lost_node_is_deleted_by_force_on_the_policys_switch(gang: Gang, lost: str) -> None:
    gang.name = f"{gang.name[:24]}-{lost}"
    await make_with(gang, **SWITCH)
    clock = Shifted()
    async with running(gang, clock=clock, deletes_pods=True) as replica:
        await terminating(gang, replica, clock)
        if lost == "taint":
            await gang.api.merge(objects.NODES, None, gang.node(1), {"spec": {"taints": [OUT_OF_SERVICE]}})
        elif lost == "node":
            gang.server.kubectl("delete", "node", gang.node(1))
        else:
            owner = {"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "name": "claim", "uid": "gone"}
            await gang.api.merge(objects.NODES, None, gang.node(1), {"metadata": {"ownerReferences": [owner]}})

        async def gone() -> bool:
            await looked_again(gang, replica, clock, times=1)
            return not await is_there(gang)

        await until(gone, "the pod to be deleted by force")
        (note,) = await until(lambda: notes(gang, "LostPodDeleted"), "the Event")
        assert gang.pod(1) in note
        assert gang.node(1) in note
        assert replica.sample("gracepoint_lost_pods_deleted_total") == 1


@pytest.mark.parametrize("why", ["switch", "right", "ready"])
async def test_nothing_is_deleted_by_force_without_switch_and_right_or_while_the_kubelet_lives(
    gang: Gang, why: str
) -> None:
    gang.name = f"{gang.name[:24]}-{why}"
    await make_with(gang, **({} if why == "switch" else SWITCH))
    if why == "ready":
        ready = {"conditions": [{"type": "Ready", "status": "True", "reason": "KubeletReady"}]}
        await gang.api.merge_status(objects.NODES, None, gang.node(1), {"status": ready})
    clock = Shifted()
    async with running(gang, clock=clock, deletes_pods=why != "right") as replica:
        await terminating(gang, replica, clock)
        await gang.api.merge(objects.NODES, None, gang.node(1), {"spec": {"taints": [OUT_OF_SERVICE]}})
        await looked_again(gang, replica, clock)
        assert await is_there(gang)
    ready_condition = await gang.policy_condition("Ready")
    assert (ready_condition["reason"] == "LostPodsNotDeleted") is (why == "right")


OPERATOR = "system:serviceaccount:gp-system:gp-gracepoint"


CONTAINER = {
    "name": "c",
    "image": "one",
    "imageID": "",
    "ready": False,
    "restartCount": 0,
    "state": {"terminated": {"exitCode": 77}},
}


@pytest.fixture
def guarded(server: ApiServer, tmp_path: Path) -> Iterator[ApiServer]:
    """The API server with the chart's role and admission policy for it."""
    files, values = ("pod-deletion.yaml", "rbac.yaml"), ("podDeletion.enabled=true",)
    with templates(server, tmp_path, *files, namespace=NAMESPACE, values=values), may_read(server, "pods/status"):
        yield server


def test_the_operator_deletes_no_pod_but_those_that_have_ended_or_are_lost_and_changes_nothing_else(
    guarded: ApiServer,
) -> None:
    def make(name: str, **labels: str) -> None:
        spec = {"nodeName": "nowhere", "containers": [{"name": "c", "image": "one"}]}
        meta = {"name": name, "namespace": "default", "labels": labels}
        guarded.create({"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})

    def refusal(name: str, *how: str) -> str:
        argv = ("delete", "pod", name, "--namespace=default", *(how or ("--force",)), "--wait=false")
        done = guarded.kubectl(*argv, "--dry-run=server", f"--as={OPERATOR}", check=False)
        return "" if done.returncode == 0 else done.stderr

    def patched(name: str, body: object, *by: str) -> str:
        patch = ("--type=merge", "--subresource=status", f"--patch={json.dumps(body)}")
        done = guarded.kubectl("patch", "pod", name, "--namespace=default", *patch, *by, check=False)
        return "" if done.returncode == 0 else done.stderr

    def marking(name: str, **status: object) -> str:
        return patched(name, {"status": status}, "--dry-run=server", f"--as={OPERATOR}")

    labels = {LABEL_POLICY: "careful"}
    make("trains", **labels)
    make("terminates", **labels)
    make("foreign")
    try:
        for name in ("terminates", "foreign"):
            guarded.kubectl("delete", "pod", name, "--namespace=default", "--wait=false")
        why = "only pods that are being deleted already"
        wait_until("the admission policy", lambda: why in refusal("trains"), timeout_s=60)
        assert "only pods that name a policy" in refusal("foreign")
        assert why in marking("trains", phase="Failed")
        lost = {"type": "DisruptionTarget", "status": "True", "reason": "NodeLost"}
        ready = {"type": "Ready", "status": "False"}
        assert patched("terminates", {"status": {"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]}}) == ""
        others: dict[str, dict[str, Any]] = {
            "another phase": {"phase": "Succeeded"},
            "a field that was there": {"phase": "Failed", "podIP": "10.0.0.2"},
            "a field that was not there": {"phase": "Failed", "message": "all is well"},
            "containers": {"phase": "Failed", "containerStatuses": [CONTAINER]},
            "a condition": {"phase": "Failed", "conditions": [{**ready, "status": "True"}, lost]},
            "a condition taken away": {"phase": "Failed", "conditions": [lost]},
            "another cause": {"phase": "Failed", "conditions": [ready, {**lost, "reason": "EvictionByEvictionAPI"}]},
        }
        for what, status in others.items():
            assert "marks pods as failed only" in marking("terminates", **status), what
        for field in ("labels", "annotations"):
            more = {"metadata": {field: {"more": "x"}}, "status": {"phase": "Failed"}}
            by = ("--dry-run=server", f"--as={OPERATOR}")
            assert "marks pods as failed only" in patched("terminates", more, *by), field
        ended = "only pods that have ended or failed"
        assert ended in refusal("terminates"), "by force, though it is not marked as failed"
        assert ended in refusal("trains", "--cascade=background"), "no container of it has ended"
        assert marking("terminates", phase="Failed", conditions=[ready, lost]) == ""
        failed = {"status": {"phase": "Failed", "conditions": [ready, lost]}}
        assert patched("terminates", failed, f"--as={OPERATOR}") == ""
        assert refusal("terminates") == ""
        assert ended in refusal("terminates", "--grace-period=1"), "nearly by force"
        assert patched("trains", {"status": {"phase": "Running", "containerStatuses": [CONTAINER]}}) == ""
        assert refusal("trains", "--cascade=background") == ""
    finally:
        names = ("trains", "terminates", "foreign")
        guarded.kubectl("delete", "pod", *names, "--namespace=default", "--force", check=False)
