"""Waiting for the pods of a Deployment or a DaemonSet, and for a definition of resources.

Processes: kubectl, to its ends. Threads: none.
"""

from __future__ import annotations

import json
import time
from typing import Any

from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

_CLIENT_S = 5.0


def wait_for_rollout(cluster: Cluster, workload: str, *, namespace: str, timeout_s: float) -> None:
    """Waits until a workload has as many ready pods as it wants, and its rollout is over.

    ``kubectl rollout status`` alone reads the status of the object, which counts pods that have just been killed until
    their controller has looked. So the pods are asked too.

    Args:
        cluster: Where.
        workload: ``deployment/name`` or ``daemonset/name``.
        namespace: Of the workload.
        timeout_s: How long it may take in all.

    Raises:
        ClusterError: They were not ready in time, or there is no such workload.
    """
    until = time.monotonic() + timeout_s
    where = f"--namespace={namespace}"
    cluster.kubectl(
        *("rollout", "status", workload, where, f"--timeout={timeout_s:g}s"), timeout_s=timeout_s + _CLIENT_S
    )
    body = json.loads(cluster.kubectl("get", workload, where, "--output=json").stdout)
    labels = ",".join(f"{key}={value}" for key, value in body["spec"]["selector"]["matchLabels"].items())
    wants = body["status"]["desiredNumberScheduled"] if body["kind"] == "DaemonSet" else body["spec"]["replicas"]
    ready: list[str] = []

    def are_ready() -> bool:
        pods = json.loads(cluster.kubectl("get", "pods", where, f"--selector={labels}", "--output=json").stdout)
        ready[:] = [pod["metadata"]["name"] for pod in pods["items"] if _is_ready(pod)]
        return len(ready) >= wants

    wait_until(
        f"{wants} ready pods of {workload} in {namespace}",
        are_ready,
        timeout_s=until - time.monotonic(),
        hint=lambda: f"; ready: {', '.join(ready) or 'none'}",
    )


def wait_for_definition(cluster: Cluster, name: str, *, timeout_s: float = 60.0) -> None:
    """Waits until the API server serves the resources of a CustomResourceDefinition, which is there.

    ``kubectl wait`` alone fails at once on a definition that has no conditions yet.

    Raises:
        ClusterError: It was not established in time.
    """
    wait = ("wait", f"crd/{name}", "--for=condition=Established", "--timeout=5s")
    wait_until(f"{name} to be established", lambda: bool(cluster.kubectl(*wait)), timeout_s=timeout_s)


def _is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod is ready, and is not being deleted."""
    conditions = pod.get("status", {}).get("conditions", [])
    return "deletionTimestamp" not in pod["metadata"] and any(
        each["type"] == "Ready" and each["status"] == "True" for each in conditions
    )
