"""Where the pods of a gang are bound while a node is going away, though its taint does not keep them off."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from demo import nodes
from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun
from tests.cluster.conftest import NAMESPACE
from tests.cluster.machine import end_at_once
from tests.testcluster.api import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_SLEEP = ["python", "-c", "import time; time.sleep(3600)"]


def tolerant(jobset: Json) -> None:
    """Pods that tolerate the taint of a node that goes, wait, and need not be spread."""
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pod["tolerations"] = [{"key": nodes.TERMINATION_TAINT["key"], "operator": "Exists"}]
    pod["containers"][0] |= {"command": _SLEEP, "args": []}
    del pod["topologySpreadConstraints"]


@contextlib.contextmanager
def placed(run: TrainingRun) -> Iterator[set[str]]:
    """The nodes that the pods of such a run are on."""
    try:
        run.start(tolerant)
        yield {pod.node for pod in run.wait_for_pods()}
    finally:
        end_at_once(run)


@contextlib.contextmanager
def busy(cluster: Cluster, images: Images, node: str) -> Iterator[None]:
    """Something else runs on the node, so that the scheduler would rather take another one."""
    container = {
        "name": "main",
        "image": images.trainer,
        "imagePullPolicy": "IfNotPresent",
        "command": _SLEEP,
        "resources": {"requests": {"cpu": "500m"}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"busy-{node}", "namespace": NAMESPACE},
        "spec": {"nodeName": node, "containers": [container]},
    }
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(pod))
    try:
        yield
    finally:
        cluster.kubectl("delete", "pod", f"busy-{node}", f"--namespace={NAMESPACE}", "--force", "--grace-period=0")


def test_pods_go_elsewhere_while_there_is_an_elsewhere(run: TrainingRun, installed: Cluster, images: Images) -> None:
    going, *others = installed.nodes
    nodes.taint(installed, going)
    with contextlib.ExitStack() as stack:
        for other in others:
            stack.enter_context(busy(installed, images, other))
        with placed(run) as found:
            assert found <= set(others)


def test_pods_that_fit_nowhere_else_are_not_kept_waiting(run: TrainingRun, installed: Cluster) -> None:
    """As when a machine has come in a node's place, under its name, after the pods were made."""
    going, *others = installed.nodes
    nodes.taint(installed, going)
    for other in others:
        installed.kubectl("cordon", other)
    with placed(run) as found:
        assert found == {going}
        # The signal was there before the pods: they were put there all the same, and would be again.
        assert run.look().preemptions == ()
