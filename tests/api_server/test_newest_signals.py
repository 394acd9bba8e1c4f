"""Signals that are new in Kubernetes, as its newest API server holds them: tainted devices, preempted groups."""

from __future__ import annotations

import time

import pytest

from gracepoint_operator.kube import kinds
from gracepoint_operator.kube.client import KubeClient
from gracepoint_operator.kube.kinds import Kind
from tests.api_server.gang import Body, Gang, running, until
from tests.testcluster.api_server import ApiServer

pytestmark = [pytest.mark.newest, pytest.mark.timeout(120)]

SLICES = Kind("/apis/resource.k8s.io/v1", "resourceslices")
RULES = Kind("/apis/resource.k8s.io/v1", "devicetaintrules")
#: As the controllers of 1.37 write them into the status of a pod (pkg/controller/devicetainteviction,
#: pkg/scheduler/framework/preemption).
DEVICE = ("DeletionByDeviceTaintManager", "Device Taint manager: deleting due to NoExecute taint")
GROUP = ("PreemptionByScheduler", "default-scheduler: preempting to accommodate a higher priority PodGroup")


def _tainted(node: str) -> Body:
    """A node's devices, of which the driver says that one is broken."""
    taint = {"key": "example.com/broken", "effect": "NoExecute"}
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    devices = [{"name": "tpu-0", "taints": [taint]}, {"name": "tpu-1"}]
    spec = {"driver": "tpu.example.com", "nodeName": node, "pool": pool, "devices": devices}
    return {"metadata": {"name": f"{node}-tpus"}, "spec": spec}


def _rule(node: str) -> Body:
    """What an administrator says of a node's devices."""
    selector = {"driver": "tpu.example.com", "pool": node}
    taint = {"key": "example.com/repair", "effect": "NoExecute"}
    return {"metadata": {"name": f"{node}-repair"}, "spec": {"deviceSelector": selector, "taint": taint}}


@pytest.mark.parametrize(
    ("told", "cause"),
    [
        pytest.param(DEVICE, "Hardware", id="a device is tainted"),
        pytest.param(GROUP, "PriorityPreemption", id="a group takes the place"),
    ],
)
async def test_pod_that_kubernetes_marks_is_a_disruption(newest: ApiServer, told: tuple[str, str], cause: str) -> None:
    api = KubeClient.connect(str(newest.kubeconfig))
    gang = Gang(newest, api, f"marked-{cause.lower()}")
    try:
        await gang.make()
        async with running(gang) as replica:
            if told is DEVICE:
                await api.create(SLICES, None, _tainted(gang.node(0)))
                await api.create(RULES, None, _rule(gang.node(0)))
                await replica.watch()
                assert await gang.records() == [], "the devices alone say nothing of the pods that use them"
            reason, message = told
            at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
            pod = await api.get(kinds.PODS, gang.name, gang.pod(0))
            conditions = [*pod["status"]["conditions"], condition | {"lastTransitionTime": at}]
            await api.merge_status(kinds.PODS, gang.name, gang.pod(0), {"status": {"conditions": conditions}})
            await replica.watch()
            (record,) = await until(gang.records, "the record")
            assert record["spec"]["cause"] == cause
            assert record["spec"]["signal"] == f"condition DisruptionTarget ({reason})"
    finally:
        api.close()
