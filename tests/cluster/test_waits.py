"""What a gang waits for, with real pods: no node, a kubelet that refuses, and a pod that stays on a dead node."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest

from demo.snapshot import Json
from demo.training import TrainingRun
from tests.cluster.conftest import NAMESPACE, POLICY
from tests.cluster.machine import end_at_once
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_SLEEP = ["python", "-c", "import time; time.sleep(3600)"]
#: A wait is named once it has lasted 15 s, and within 30 s.
_NAMED_S = 30.0


def waits(cluster: Cluster) -> list[Json]:
    shown = cluster.kubectl("get", "checkpointpolicy", POLICY, f"--namespace={NAMESPACE}", "--output=json").stdout
    return [wait for entry in json.loads(shown).get("status", {}).get("waits", []) for wait in entry["waits"]]


def is_named(cluster: Cluster, kind: str) -> bool:
    return any(wait["kind"] == kind for wait in waits(cluster))


def named(cluster: Cluster, kind: str, within_s: float = _NAMED_S) -> Json:
    wait_until(f"a wait of the kind {kind}", functools.partial(is_named, cluster, kind), timeout_s=within_s + 10)
    (found,) = [wait for wait in waits(cluster) if wait["kind"] == kind]
    return found


def idle(change: Callable[[Json], None] = lambda pod: None) -> Callable[[Json], None]:
    """A gang whose pods sleep. ``change``: what is changed in the spec of its pods."""

    def made(jobset: Json) -> None:
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        pod["containers"][0] |= {"command": _SLEEP, "args": []}
        pod.pop("topologySpreadConstraints", None)
        change(pod)

    return made


def wants_more_than_a_node_has(pod: Json) -> None:
    pod["containers"][0].setdefault("resources", {}).setdefault("requests", {})["cpu"] = "1000"


def test_a_gang_that_finds_no_node_is_named_with_the_schedulers_message(run: TrainingRun, installed: Cluster) -> None:
    for node in installed.nodes:
        installed.kubectl("cordon", node)
    try:
        run.start(idle())
        wait = named(installed, "Node")
        assert "nodes are available" in wait["message"]
        assert wait["what"].startswith("node for process")
    finally:
        for node in installed.nodes:
            installed.kubectl("uncordon", node)
    try:
        run.wait_for_pods()
        wait_until("the end of the wait", lambda: not is_named(installed, "Node"), timeout_s=60)
    finally:
        end_at_once(run)


def test_pods_that_a_kubelet_refuses_are_named_and_not_counted(run: TrainingRun, installed: Cluster) -> None:
    def refused(pod: Json) -> None:
        wants_more_than_a_node_has(pod)
        pod["nodeName"] = installed.nodes[0]  # past the scheduler

    try:
        run.start(idle(refused))
        wait = named(installed, "Kubelet")
        assert "OutOfcpu" in wait["message"]
        assert wait["node"] == installed.nodes[0]
        jobset = json.loads(
            installed.kubectl("get", "jobset", run.name, f"--namespace={NAMESPACE}", "--output=json").stdout
        )
        assert jobset.get("status", {}).get("restartsCountTowardsMax", 0) == 0
    finally:
        end_at_once(run)


def test_a_pod_that_stays_on_a_dead_node_is_named_with_pod_and_node(run: TrainingRun, installed: Cluster) -> None:
    try:
        run.start(idle(lambda pod: pod.update(terminationGracePeriodSeconds=5)))
        pod = run.wait_for_pods()[0]
        installed.lose_node(pod.node)
        try:
            installed.kubectl("delete", "pod", pod.name, f"--namespace={NAMESPACE}", "--wait=false")
            wait = named(installed, "Deletion", _NAMED_S + 5)
            assert (wait["pod"], wait["node"]) == (pod.name, pod.node)
        finally:
            installed.restore_node(pod.node)
        wait_until("the end of the wait", lambda: not is_named(installed, "Deletion"), timeout_s=120)
    finally:
        end_at_once(run)
