"""Signals that are new in Kubernetes, by the controller and the scheduler of its newest version: devices with taints,
and groups of pods that take each other's place."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from gracepoint_operator.kube import objects
from gracepoint_operator.kube.client import JsonObject, KubeClient
from gracepoint_operator.kube.objects import Kind, parse_time
from gracepoint_operator.metrics import Metrics
from gracepoint_operator.watches import Watches
from tests.api_server.components import component
from tests.api_server.gang import Body, Gang, Replica, running, until
from tests.testcluster.api_server import ApiServer

pytestmark = [pytest.mark.newest, pytest.mark.timeout(300)]

GROUPS = Kind("/apis/scheduling.k8s.io/v1beta1", "podgroups")
PRIORITIES = Kind("/apis/scheduling.k8s.io/v1", "priorityclasses")
DRIVER = "tpu.example.com"
BROKEN = "example.com/broken"
GRACE_S = 30  # the API server's default
#: Longer than the operator takes to see a taint and to write a record on a loaded machine.
TOLERATED_S = 20


@pytest.fixture(scope="module")
def busy(newest: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """The API server with the scheduler, and with the controller that deletes pods whose devices have taints."""
    folder = tmp_path_factory.mktemp("components")
    newest.create({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": DRIVER}, "spec": {}})
    with (
        component(newest, folder, "kube-scheduler"),
        component(newest, folder, "kube-controller-manager", "--controllers=device-taint-eviction-controller"),
    ):
        yield newest


class ScheduledGang(Gang):
    """A gang on nodes of its own, with one processor each, whose pods the scheduler binds."""

    async def make_nodes(self) -> None:
        for index in (0, 1):
            name = self.node(index)
            labels = {"kubernetes.io/hostname": name, "gang": self.name}
            await self.api.create(objects.NODES, None, {"metadata": {"name": name, "labels": labels}})
            size = {"cpu": "1", "memory": "1Gi", "pods": "10"}
            status = {"capacity": size, "allocatable": size}
            await self.api.merge(objects.NODES, None, name, {"spec": {"taints": None}})  # that it is not ready
            await self.api.merge_status(objects.NODES, None, name, {"status": status})

    def pod_spec(self, index: int) -> Body:
        spec = super().pod_spec(index)
        del spec["nodeName"]
        (container,) = spec["containers"]
        container = {**container, "resources": {"requests": {"cpu": "1"}}}
        return {**spec, "containers": [container], "nodeSelector": {"kubernetes.io/hostname": self.node(index)}}

    async def bind(self) -> None:
        for index in (0, 1):

            async def bound(name: str = self.pod(index)) -> bool:
                return bool((await self.api.get(objects.PODS, self.name, name))["spec"].get("nodeName"))

            await until(bound, f"the scheduler to bind {self.pod(index)}")

    async def pod_now(self, index: int) -> JsonObject:
        return await self.api.get(objects.PODS, self.name, self.pod(index))

    async def deletion_of(self, index: int) -> tuple[str, str, float]:
        """Waits until Kubernetes deletes a pod. Returns reason and message of its mark, and when it will be gone."""

        async def deleted() -> JsonObject | None:
            pod = await self.pod_now(index)
            return pod if "deletionTimestamp" in pod["metadata"] else None

        pod = await until(deleted, f"Kubernetes to delete {self.pod(index)}", within_s=60)
        (mark,) = [item for item in pod["status"]["conditions"] if item["type"] == "DisruptionTarget"]
        gone_at = parse_time(pod["metadata"]["deletionTimestamp"])
        assert gone_at is not None
        return mark["reason"], mark["message"], gone_at


class DeviceGang(ScheduledGang):
    """A gang whose pods each have a device of their node.

    Attributes:
        tolerations: Those of the claims.
    """

    tolerations: tuple[Body, ...] = ()

    async def make_nodes(self) -> None:
        await super().make_nodes()
        for index in (0, 1):
            exactly = {"deviceClassName": DRIVER, "tolerations": list(self.tolerations)}
            spec = {"devices": {"requests": [{"name": "tpu", "exactly": exactly}]}}
            await self.api.create(
                objects.RESOURCE_CLAIMS, self.name, {"metadata": {"name": f"tpu-{index}"}, "spec": spec}
            )
            await self.api.create(objects.RESOURCE_SLICES, None, self.devices(index))

    def devices(self, index: int) -> Body:
        """As the driver says what the node has."""
        node = self.node(index)
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [{"name": "tpu-0"}]}
        return {"metadata": {"name": f"{node}-tpus"}, "spec": spec}

    def pod_spec(self, index: int) -> Body:
        spec = super().pod_spec(index)
        (container,) = spec["containers"]
        container["resources"]["claims"] = [{"name": "tpu"}]
        return {**spec, "resourceClaims": [{"name": "tpu", "resourceClaimName": f"tpu-{index}"}]}

    async def rule(self) -> JsonObject:
        """An administrator taints the devices of the first node. Returns the rule as it is stored."""
        selector = {"driver": DRIVER, "pool": self.node(0)}
        spec = {"deviceSelector": selector, "taint": {"key": BROKEN, "effect": "NoExecute"}}
        body = {"metadata": {"name": f"{self.name}-repair"}, "spec": spec}
        return await self.api.create(objects.DEVICE_TAINT_RULES, None, body)

    async def break_device(self) -> None:
        """The driver taints the device of the first node."""
        taints = [{"key": BROKEN, "effect": "NoExecute"}]
        spec = {"devices": [{"name": "tpu-0", "taints": taints}]}
        await self.api.merge(objects.RESOURCE_SLICES, None, f"{self.node(0)}-tpus", {"spec": spec})


class GroupGang(ScheduledGang):
    """A gang that the scheduler places, and takes the place of, as one group."""

    async def make_nodes(self) -> None:
        await super().make_nodes()
        await self.api.create(GROUPS, self.name, _group("train", 2, disruptionMode={"all": {}}))

    def pod_spec(self, index: int) -> Body:
        return {**super().pod_spec(index), "schedulingGroup": {"podGroupName": "train"}}

    async def urgent(self) -> None:
        """Another group needs one of the nodes, at a higher priority."""
        await self.api.create(PRIORITIES, None, {"metadata": {"name": self.name}, "value": 1000})
        await self.api.create(GROUPS, self.name, _group("urgent", 1, priorityClassName=self.name))
        spec = super().pod_spec(0) | {"nodeSelector": {"gang": self.name}}
        spec |= {"schedulingGroup": {"podGroupName": "urgent"}, "priorityClassName": self.name}
        await self.api.create(objects.PODS, self.name, {"metadata": {"name": "urgent-0"}, "spec": spec})


@contextlib.asynccontextmanager
async def watched(gang: Gang, *, devices: bool = False) -> AsyncIterator[Replica]:
    """The gang, and a replica with its watches."""
    try:
        await gang.make()
        async with running(gang, devices=devices) as replica:
            watches = Watches(replica.core, gang.api, Metrics(), replica="replica-a")
            watches.start()
            try:
                assert await gang.records() == []
                yield replica
            finally:
                await asyncio.to_thread(watches.close, 5.0)
    finally:
        gang.api.close()


def connected(server: ApiServer) -> KubeClient:
    return KubeClient.connect(str(server.kubeconfig))


async def test_device_taint_is_noticed_before_kubernetes_deletes_the_pod(busy: ApiServer) -> None:
    gang = DeviceGang(busy, connected(busy), "repaired-devices")
    gang.tolerations = ({"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": TOLERATED_S},)
    async with watched(gang, devices=True):
        rule = await gang.rule()
        added_at = parse_time(rule["spec"]["taint"]["timeAdded"])
        assert added_at is not None
        (record,) = await until(gang.records, "the record")
        assert "deletionTimestamp" not in (await gang.pod_now(0))["metadata"]
        spec = record["spec"]
        assert (spec["cause"], spec["nodes"]) == ("Hardware", [gang.node(0)])
        assert spec["signal"] == f"taint {BROKEN}:NoExecute of device {DRIVER}/{gang.node(0)}/tpu-0"
        deadline_at = parse_time(spec["deadline"])
        assert deadline_at is not None
        assert deadline_at - added_at == pytest.approx(TOLERATED_S + GRACE_S, abs=5)
        reason, _, gone_at = await gang.deletion_of(0)
        assert reason == "DeletionByDeviceTaintManager"
        assert gone_at == pytest.approx(deadline_at, abs=5), "Kubernetes deletes when the operator said it would"
        assert "deletionTimestamp" not in (await gang.pod_now(1))["metadata"]
        assert len(await gang.records()) == 1


async def test_device_taint_that_goes_away_lets_the_gang_train_on(busy: ApiServer) -> None:
    gang = DeviceGang(busy, connected(busy), "devices-that-stay")
    gang.tolerations = ({"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 600},)
    async with watched(gang, devices=True):
        rule = await gang.rule()
        await until(gang.records, "the record")
        # Kubernetes writes the rule's status meanwhile.
        gang.server.kubectl("delete", "devicetaintrule", rule["metadata"]["name"])

        async def retracted() -> bool:
            return [body.get("status", {}).get("phase") for body in await gang.records()] == ["Retracted"]

        await until(retracted, "the retraction")


async def test_pod_of_a_broken_device_is_deleted_and_the_cause_is_hardware(busy: ApiServer) -> None:
    gang = DeviceGang(busy, connected(busy), "broken-devices")
    gang.tolerations = ({"operator": "Exists"},)  # Kubernetes does not count one without an effect here
    async with watched(gang, devices=True):
        began_at = time.time()
        await gang.break_device()
        reason, _, gone_at = await gang.deletion_of(0)
        assert reason == "DeletionByDeviceTaintManager"
        (record,) = await until(gang.records, "the record")
        assert record["spec"]["cause"] == "Hardware"
        assert gone_at - began_at == pytest.approx(GRACE_S, abs=10)


async def test_without_the_watch_a_device_taint_is_known_from_the_pod(busy: ApiServer) -> None:
    gang = DeviceGang(busy, connected(busy), "devices-not-watched")
    async with watched(gang):
        await gang.break_device()
        (record,) = await until(gang.records, "the record", within_s=60)
        assert record["spec"]["cause"] == "Hardware"
        assert record["spec"]["signal"] == "condition DisruptionTarget (DeletionByDeviceTaintManager)"


async def test_gang_whose_group_is_preempted_is_a_priority_preemption(busy: ApiServer) -> None:
    gang = GroupGang(busy, connected(busy), "preempted-group")
    async with watched(gang):
        await gang.urgent()
        (record,) = await until(gang.records, "the record", within_s=60)
        assert record["spec"]["cause"] == "PriorityPreemption"
        assert record["spec"]["signal"] == "condition DisruptionTarget (PreemptionByScheduler)"
        marks = [await gang.deletion_of(index) for index in (0, 1)]  # both, though the other group needs one node
        assert {reason for reason, _, _ in marks} == {"PreemptionByScheduler"}
        assert all(message.endswith("higher priority podgroup") for _, message, _ in marks), marks
        assert len(await gang.records()) == 1


def _group(name: str, count: int, **spec: object) -> Body:
    return {"metadata": {"name": name}, "spec": {"schedulingPolicy": {"gang": {"minCount": count}}, **spec}}
