"""What the end-to-end benchmark hears of the Jobs and pods of a restart, from a real API server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks.end_to_end_objects import ObjectWatch
from gracepoint.wire.names import JOBSET_LABEL_RESTART_ATTEMPT
from tests.testcluster.api_server import ApiServer

pytestmark = pytest.mark.timeout(120)

NAMESPACE = "restart-times"


def labelled(kind: str, version: str, name: str, attempt: int, spec: dict[str, Any]) -> dict[str, Any]:
    labels = {JOBSET_LABEL_RESTART_ATTEMPT: str(attempt)}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def test_the_times_of_jobs_and_pods_are_heard_by_attempt(server: ApiServer) -> None:
    pod_spec = {"restartPolicy": "Never", "containers": [{"name": "trainer", "image": "none"}]}
    server.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    watch = ObjectWatch(server.kubeconfig, NAMESPACE)
    server.create(
        labelled("Job", "batch/v1", "first", 0, {"template": {"spec": pod_spec}}),
        labelled("Pod", "v1", "old", 0, pod_spec),
    )
    failed = json.dumps({"status": {"phase": "Failed"}})
    inside = f"--namespace={NAMESPACE}"
    server.kubectl("patch", "pod/old", inside, "--subresource=status", "--type=merge", f"--patch={failed}")
    server.kubectl("delete", "job/first", inside, "--cascade=orphan", "--wait=false")
    server.kubectl("patch", "job/first", inside, "--type=merge", '--patch={"metadata": {"finalizers": null}}')
    server.create(labelled("Pod", "v1", "new", 1, {**pod_spec, "nodeName": "node-1"}))
    heard = watch.stop()
    order = [(0, "job created"), (0, "pod ended"), (0, "job gone"), (1, "pod scheduled")]
    times = [max(heard[key].values()) for key in order]
    assert times == sorted(times)
    assert (1, "pod ended") not in heard
