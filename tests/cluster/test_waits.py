"""What a gang waits for, with real pods: no node, a kubelet that refuses, and a pod that stays on a dead node.

Such a pod ends by force if its policy says so, and the gang comes back elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from tests.cluster import operator
from tests.cluster.conftest import NAMESPACE, POLICY, training_run
from tests.cluster.machine import end_at_once
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_SLEEP = ["python", "-c", "import time; time.sleep(3600)"]
#: A wait is named once it has lasted 15 s, and within 30 s.
_NAMED_S = 30.0
_UNREACHABLE = "node.kubernetes.io/unreachable"
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
_POD_GC = "system:serviceaccount:kube-system:pod-garbage-collector"


def waits(cluster: Cluster, policy: str = POLICY) -> list[Json]:
    shown = cluster.kubectl("get", "checkpointpolicy", policy, f"--namespace={NAMESPACE}", "--output=json").stdout
    return [wait for entry in json.loads(shown).get("status", {}).get("waits", []) for wait in entry["waits"]]


def is_named(cluster: Cluster, kind: str, policy: str = POLICY) -> bool:
    return any(wait["kind"] == kind for wait in waits(cluster, policy))


def named(cluster: Cluster, kind: str, within_s: float = _NAMED_S, policy: str = POLICY) -> Json:
    there = functools.partial(is_named, cluster, kind, policy)
    wait_until(f"a wait of the kind {kind}", there, timeout_s=within_s + 10)
    return next(wait for wait in waits(cluster, policy) if wait["kind"] == kind)


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


def wants_another_node(pod: Json) -> None:
    pod["nodeSelector"] = {"kubernetes.io/hostname": "elsewhere"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (wants_more_than_a_node_has, "OutOfcpu"),
        pytest.param(wants_another_node, "NodeAffinity", marks=pytest.mark.variant),
    ],
)
def test_pods_that_a_kubelet_refuses_are_named_and_not_counted(
    change: Callable[[Json], None], reason: str, installed: Cluster, images: Images
) -> None:
    wait_until("the end of earlier waits", lambda: not is_named(installed, "Kubelet"), timeout_s=120)
    run = training_run(installed, images, f"refused-{reason.lower()}")

    def refused(pod: Json) -> None:
        change(pod)
        pod["nodeName"] = installed.nodes[0]  # past the scheduler

    try:
        run.start(idle(refused))
        wait = named(installed, "Kubelet")
        assert reason in wait["message"]
        assert wait["node"] == installed.nodes[0]
        jobset = json.loads(
            installed.kubectl("get", "jobset", run.name, f"--namespace={NAMESPACE}", "--output=json").stdout
        )
        assert jobset.get("status", {}).get("restartsCountTowardsMax", 0) == 0
    finally:
        end_at_once(run)


@pytest.mark.variant
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


@contextlib.contextmanager
def nobody_else_deletes(cluster: Cluster) -> Iterator[None]:
    """Kubernetes' garbage collector of pods does nothing in the tests' namespace inside of this.

    It deletes such pods as well, 20 to 80 s after the taint or the deletion of the Node, where it runs and may.
    """
    name = {"name": "pods-stay"}
    api = "admissionregistration.k8s.io/v1"
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods", "pods/status"]}
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}},
            "resourceRules": [{**rule, "operations": ["UPDATE", "DELETE"]}],
        },
        "validations": [{"expression": f"request.userInfo.username != '{_POD_GC}'"}],
    }
    items = [
        {"apiVersion": api, "kind": "ValidatingAdmissionPolicy", "metadata": name, "spec": spec},
        {
            "apiVersion": api,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": name,
            "spec": {"policyName": name["name"], "validationActions": ["Deny"]},
        },
    ]
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    cluster.kubectl("apply", "--filename=-", stdin=made)
    try:
        yield
    finally:
        kinds = ("validatingadmissionpolicybinding", "validatingadmissionpolicy")
        cluster.kubectl("delete", *(f"{kind}/{name['name']}" for kind in kinds))


def notes(cluster: Cluster, reason: str, run: TrainingRun) -> list[str]:
    selector = f"--field-selector=reason={reason},involvedObject.name={run.name}"
    found = cluster.kubectl("get", "events", f"--namespace={NAMESPACE}", selector, "--output=json").stdout
    return [event["message"] for event in json.loads(found)["items"]]


@pytest.mark.parametrize("lost", ["taint", pytest.param("node", marks=pytest.mark.variant)])
def test_pods_of_a_node_that_is_switched_off_end_by_force_and_the_gang_comes_back_elsewhere(
    lost: str, installed: Cluster, images: Images
) -> None:
    operator.let_delete_pods(installed)

    def ends_pods(spec: Json) -> None:
        spec["lostNodes"] = {"deletePods": True}

    apply_policy(installed, "lost-nodes", namespace=NAMESPACE, change=ends_pods)
    run = training_run(installed, images, f"lost-{lost}", "lost-nodes")

    def brief(pod: Json) -> None:
        pod["terminationGracePeriodSeconds"] = 5
        soon = {"key": _UNREACHABLE, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
        pod.setdefault("tolerations", []).append(soon)

    operator.spread(installed)  # or no replica would be left to see it
    with operator.outliving(installed), nobody_else_deletes(installed):
        run.start(idle(brief))
        first = run.wait_for_pods()
        node = first[0].node
        lost_pods = [pod for pod in first if pod.node == node]
        installed.lose_node(node)
        try:
            # Deleted once the node is known to be away, of which nothing comes.
            wait = named(installed, "Deletion", 60 + _NAMED_S, "lost-nodes")
            assert wait["node"] == node
            assert wait["pod"] in {pod.name for pod in lost_pods}
            assert notes(installed, "LostPodDeleted", run) == [], "nobody has said yet that it is switched off"
            if lost == "taint":
                installed.kubectl("taint", "node", node, f"{OUT_OF_SERVICE}=nodeshutdown:NoExecute")
            else:
                installed.kubectl("delete", "node", node)

            def came_back() -> bool:
                pods = run.look().running()
                return bool(pods) and not {pod.name for pod in pods} & {pod.name for pod in first}

            wait_until("the gang to come back", came_back, timeout_s=180, hint=lambda: run.look().describe())
            said = notes(installed, "LostPodDeleted", run)
            assert len(said) == len(lost_pods)
            assert all(any(pod.name in note and node in note for note in said) for pod in lost_pods)
            assert node not in {pod.node for pod in run.look().running()}
            found = run.look()
            assert (found.restarts >= 1, found.restarts_counted) == (True, 0)
            wait_until("the end of the wait", lambda: not is_named(installed, "Deletion", "lost-nodes"), timeout_s=60)
        finally:
            end_at_once(run)
            installed.restore_node(node)
