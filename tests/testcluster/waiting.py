"""Waiting for the pods of a Deployment or a DaemonSet, and for definitions of resources.

Processes: kubectl, to its ends. Threads: none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
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
        staying = [pod for pod in pods["items"] if "deletionTimestamp" not in pod["metadata"]]
        ready[:] = [pod["metadata"]["name"] for pod in staying if is_ready(pod)]
        return len(ready) >= wants

    wait_until(
        f"{wants} ready pods of {workload} in {namespace}",
        are_ready,
        timeout_s=until - time.monotonic(),
        hint=lambda: f"; ready: {', '.join(ready) or 'none'}",
    )


def wait_for_definitions(kubectl: Callable[..., object], *names: str, timeout_s: float = 60.0) -> None:
    """Waits until an API server serves the resources of CustomResourceDefinitions, which are there.

    ``kubectl wait`` alone fails at once on a definition that has no conditions yet.

    Args:
        kubectl: Runs kubectl with these words, and raises a ``ClusterError`` if it fails.
        names: Of the definitions. None: all that there are.
        timeout_s: How long.

    Raises:
        ClusterError: They were not established in time.
    """

    def are_established() -> bool:
        kubectl("wait", "crd", *(names or ("--all",)), "--for=condition=Established", "--timeout=5s")
        return True

    wait_until(f"{', '.join(names) or 'all definitions'} to be established", are_established, timeout_s=timeout_s)


def is_ready(pod: dict[str, Any]) -> bool:
    """Whether a pod is ready. One that is being deleted may be."""
    conditions = pod["status"].get("conditions", ())
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
