"""Pods of lost nodes are deleted by force: whatever else waits in their namespace, and hundreds at one look."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from gracepoint_operator.kube import client
from gracepoint_operator.kube import objects as kinds
from gracepoint_operator.kube.client import JsonObject, KubeClient, ObjectList
from gracepoint_operator.kube.objects import Pod, read_pod
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.recording.event_recorder import EventRecorder
from gracepoint_operator.recording.wait_recorder import LOOK_S, LostPods
from gracepoint_operator.workloads import BY_PLACE, JOBSETS, Workload, membership_of
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.scene import Scene


def pods_of(count: int) -> list[Pod]:
    """Pods that are being deleted, each on a node of its own."""
    return [read_pod(objects.pod(index, on=f"node-{index}", deleting_at=1.0), membership_of) for index in range(count)]


class Api:
    """Has pods that are being deleted, on nodes with these owners, or on none. An answer comes in a later turn.

    Attributes:
        deleted: The pods that were deleted.
        broken: The node of which nothing can be read.
        most_at_once: How many requests were in progress at once.
        lists: How often something was listed.
    """

    def __init__(self, owners: list[JsonObject] | None) -> None:
        self.owners = owners
        self.deleted: list[str] = []
        self.broken = ""
        self.most_at_once = self.lists = self._now = 0

    async def _answer(self) -> None:
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        await asyncio.sleep(0)
        self._now -= 1

    async def get(self, kind: kinds.Kind, namespace: str | None, name: str) -> JsonObject:
        await self._answer()
        if kind is kinds.NODES:
            if name == self.broken:
                raise client.Unavailable(name)
            if self.owners is None:
                raise client.NotFound(name)
            return {"metadata": {"name": name, "ownerReferences": self.owners}}
        (pod,) = (pod for pod in pods_of(256) if pod.name == name)
        meta = {"name": name, "namespace": namespace, "uid": pod.uid, "resourceVersion": "1", "deletionTimestamp": "x"}
        return {"metadata": meta, "spec": {"nodeName": pod.node}, "status": {"phase": "Failed"}}

    async def list(self, kind: kinds.Kind) -> ObjectList:
        self.lists += 1
        return ObjectList([], {})

    async def delete(self, kind: kinds.Kind, body: JsonObject, *, force: bool) -> None:
        await self._answer()
        self.deleted.append(body["metadata"]["name"])


class Events:
    async def post_on(self, *said: object) -> None:
        pass


def lost_pods_of(api: Api, clock: objects.Clock) -> LostPods:
    return LostPods(cast(KubeClient, api), cast(EventRecorder, Events()), Metrics(), clock, allowed=True)


KARPENTERS = [{"apiVersion": "karpenter.sh/v1", "kind": "NodeClaim", "uid": "a"}]


@pytest.mark.parametrize(
    ("owners", "deletes"),
    [
        pytest.param(None, True, id="no node"),
        pytest.param(KARPENTERS, True, id="no claim"),
        pytest.param(
            [{"apiVersion": "example.com/v1", "kind": "NodeClaim", "uid": "a"}], False, id="another project's"
        ),
    ],
)
async def test_another_gang_that_waits_in_the_namespace_changes_nothing(
    owners: list[JsonObject] | None, deletes: bool
) -> None:
    api, clock, scene = Api(owners), objects.Clock(), Scene(lostNodes={"deletePods": True})
    lost_pods, gang, (pod,) = lost_pods_of(api, clock), scene.cache.gang(objects.JOBSET_UID), pods_of(1)
    other: Any = BY_PLACE[JOBSETS].read(objects.jobset(uid="uid-other"))
    assert gang.workload is not None
    for _ in range(2):
        await lost_pods.look(gang.workload, gang.policy, [pod])
        await lost_pods.look(other, gang.policy, [])
        clock.move(LOOK_S)
    assert api.deleted == [pod.name] * deletes


@pytest.mark.parametrize("owners", [None, KARPENTERS], ids=["no node", "no claim"])
async def test_all_pods_of_a_slice_of_256_hosts_are_deleted_at_the_second_look(owners: list[JsonObject] | None) -> None:
    api, clock, scene = Api(owners), objects.Clock(), Scene(lostNodes={"deletePods": True})
    lost_pods, gang, pods = lost_pods_of(api, clock), scene.cache.gang(objects.JOBSET_UID), pods_of(256)
    assert isinstance(gang.workload, Workload)
    await lost_pods.look(gang.workload, gang.policy, pods)
    assert api.deleted == [], "a node may be registered again"
    clock.move(LOOK_S)
    await lost_pods.look(gang.workload, gang.policy, pods)
    assert sorted(api.deleted) == sorted(pod.name for pod in pods)
    assert api.most_at_once <= 4, "others need the API server, too"
    assert api.lists == (0 if owners is None else 2), "NodeClaims are listed once for all nodes"


async def test_a_pod_of_which_nothing_can_be_known_does_not_hold_up_the_others(clock: objects.Clock) -> None:
    api, scene = Api(None), Scene(lostNodes={"deletePods": True})
    lost_pods, gang, pods = lost_pods_of(api, clock), scene.cache.gang(objects.JOBSET_UID), pods_of(3)
    assert gang.workload is not None
    api.broken = "node-1"
    for _ in range(2):
        with pytest.raises(client.Unavailable):
            await lost_pods.look(gang.workload, gang.policy, pods)
        clock.move(LOOK_S)
    assert sorted(api.deleted) == [pods[0].name, pods[2].name]
