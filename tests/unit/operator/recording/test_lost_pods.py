"""Pods of lost nodes are deleted by force, whatever else waits in their namespace."""

from __future__ import annotations

from typing import Any, cast

import pytest

from gracepoint_operator.decisions.waiting import StartWait, WaitKind
from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject, KubeClient, ObjectList
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.wait_recorder import LOOK_S, LostPods
from gracepoint_operator.workloads import BY_PLACE, JOBSETS
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.scene import Scene

LOST = StartWait(WaitKind.DELETION, "the end of the pod", 0.0, pod="train-0", node="node-1")
QUEUED = StartWait(WaitKind.SUSPENDED, "the admission", 0.0)


class Api:
    """Has one pod that is being deleted, on a node with these owners, or on none."""

    def __init__(self, owners: list[JsonObject] | None) -> None:
        self.owners = owners
        self.deleted: list[str] = []

    async def get(self, kind: kinds.Kind, namespace: str | None, name: str) -> JsonObject:
        if kind is kinds.NODES:
            if self.owners is None:
                raise client.NotFound(name)
            return {"metadata": {"name": name, "ownerReferences": self.owners}}
        meta = {"name": name, "namespace": namespace, "uid": "uid", "resourceVersion": "1", "deletionTimestamp": "x"}
        return {"metadata": meta, "spec": {"nodeName": "node-1"}, "status": {"phase": "Failed"}}

    async def list(self, kind: kinds.Kind) -> ObjectList:
        return ObjectList([], {})

    async def delete(self, kind: kinds.Kind, body: JsonObject, *, force: bool) -> None:
        self.deleted.append(body["metadata"]["name"])


class Events:
    async def post_on(self, *said: object) -> None:
        pass


@pytest.mark.parametrize(
    ("owners", "deleted"),
    [
        pytest.param(None, ["train-0"], id="no node"),
        pytest.param([{"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "uid": "a"}], ["train-0"], id="no claim"),
        pytest.param([{"apiVersion": "example.com/v1", "kind": "NodeClaim", "uid": "a"}], [], id="of another project"),
    ],
)
async def test_another_gang_that_waits_in_the_namespace_changes_nothing(
    owners: list[JsonObject] | None, deleted: list[str]
) -> None:
    api, clock, scene = Api(owners), objects.Clock(), Scene(lostNodes={"deletePods": True})
    lost_pods = LostPods(cast(KubeClient, api), cast(EventRecorder, Events()), Metrics(), clock, allowed=True)
    gang = scene.cache.gang(objects.JOBSET_UID)
    other: Any = BY_PLACE[JOBSETS].read(objects.jobset(uid="uid-other"))
    assert gang.workload is not None
    for _ in range(2):
        await lost_pods.look(gang.workload, gang.policy, [LOST])
        await lost_pods.look(other, gang.policy, [QUEUED])
        clock.move(LOOK_S)
    assert api.deleted == deleted
