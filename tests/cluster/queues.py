"""A queue of Kueue on a local cluster: its objects, and what puts a workload into it."""

from __future__ import annotations

import json
from collections.abc import Callable

from demo.snapshot import Json
from tests.cluster.small import container, create
from tests.testcluster import controllers
from tests.testcluster.api import Cluster
from tests.testcluster.local import LocalCluster
from tests.testcluster.shell import wait_until
from tests.testcluster.waiting import wait_for_rollout

QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
#: Enough for the two processes of a run, and for nothing beside them.
QUOTA = {"cpu": "500m", "memory": "2Gi"}
_TEAM = "team"
_WEBHOOKS_S = 120.0
_READY_S = 180.0


def install(cluster: LocalCluster, namespace: str) -> None:
    """Puts Kueue on a cluster if it is not there, with a queue for a namespace that exists.

    Raises:
        ClusterError: It is not built, or did not become ready.
    """
    controllers.install(cluster, controllers.KUEUE)
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": _objects(namespace)})

    def applied() -> bool:
        return cluster.kubectl("apply", "--filename=-", stdin=made, check=False).returncode == 0

    wait_until("Kueue's webhooks", applied, timeout_s=_WEBHOOKS_S, every_s=2)


def ready(cluster: Cluster) -> None:
    """Waits until Kueue serves, if it is there: it ends when it cannot reach the API server, and pods wait for it.

    Raises:
        ClusterError: It did not become ready.
    """
    namespace, name = controllers.KUEUE.namespace, f"deployment/{controllers.KUEUE.deployment}"
    if cluster.kubectl("get", name, f"--namespace={namespace}", "--ignore-not-found").stdout:
        wait_for_rollout(cluster, name, namespace=namespace, timeout_s=_READY_S)


def _objects(namespace: str) -> list[Json]:
    """A queue with the quota, in which a higher priority preempts."""
    api = "kueue.x-k8s.io/v1beta1"
    resources = [{"name": name, "nominalQuota": quota} for name, quota in QUOTA.items()]
    group = {"coveredResources": list(QUOTA), "flavors": [{"name": "any", "resources": resources}]}
    classes = [
        {"apiVersion": api, "kind": "WorkloadPriorityClass", "metadata": {"name": name}, "value": value}
        for name, value in (("low", 1), ("high", 100))
    ]
    return [
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": "any"}},
        {
            "apiVersion": api,
            "kind": "ClusterQueue",
            "metadata": {"name": "all"},
            "spec": {
                "namespaceSelector": {},
                "resourceGroups": [group],
                "preemption": {"withinClusterQueue": "LowerPriority"},
            },
        },
        {
            "apiVersion": api,
            "kind": "LocalQueue",
            "metadata": {"name": _TEAM, "namespace": namespace},
            "spec": {"clusterQueue": "all"},
        },
        *classes,
    ]


def in_queue(priority: str = "low", **labels: str) -> Callable[[Json], None]:
    """Puts a workload into the queue before it is created."""

    def change(body: Json) -> None:
        body["metadata"].setdefault("labels", {}).update({QUEUE: _TEAM, PRIORITY: priority, **labels})

    return change


def occupant(
    cluster: Cluster, image: str, name: str, seconds: int, *, namespace: str, processors: str = QUOTA["cpu"]
) -> Json:
    """Creates a Job of high priority that takes the quota, or so much of it, for so long; returns it as stored.

    Args:
        cluster: Where.
        image: Its image, which has Python.
        name: Its name.
        seconds: How long it takes the quota.
        namespace: Its namespace, which has the queue.
        processors: How much of the quota.
    """
    one = container("wait", image, f"import time; time.sleep({seconds})")
    one["resources"] = {"requests": {"cpu": processors, "memory": "64Mi"}}
    body: Json = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "ttlSecondsAfterFinished": 1,
            "template": {
                "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [one]},
            },
        },
    }
    in_queue("high")(body)
    return create(cluster, body)[0]
