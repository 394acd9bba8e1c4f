"""What Kubernetes itself does to nodes and pods, and the policy's modes, on one gang that goes on through all of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from demo import nodes
from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun
from gracepoint.wire.messages import Mode, Phase
from tests.cluster import operator
from tests.cluster.asking import answer, ask, call_off, ended, fresh, names, newest_step, schedule
from tests.cluster.conftest import NAMESPACE, training_policy, training_run
from tests.cluster.machine import end_at_once, local
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POLICY = "core"
#: As long as pods live after a SIGTERM, so that saves begin at once, and no test waits for a deadline.
HEAD_START_S = 25
MOVED_OUT = {"key": "example.com/moved-out", "effect": "NoExecute"}


def policy(cluster: Cluster, **fields: object) -> None:
    """Applies the gang's policy, with other fields for the next signal."""

    def change(spec: Json) -> None:
        spec |= {"deadline": {"headStartSeconds": HEAD_START_S}, **fields}

    training_policy(cluster, POLICY, change)


@pytest.fixture(scope="module")
def gang(installed: Cluster, images: Images) -> Iterator[TrainingRun]:
    """A gang that trains for longer than all tests take."""

    def brief(jobset: Json) -> None:
        pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        pod["terminationGracePeriodSeconds"] = HEAD_START_S

    policy(installed)
    run = training_run(installed, images, "core", POLICY, steps=100_000)
    run.start(brief)
    yield run
    end_at_once(run)


@pytest.fixture
def modes(gang: TrainingRun) -> Iterator[Callable[[Mode], None]]:
    """Sets the policy's mode; it is Enforce again in the end, and no maintenance is ahead."""
    yield lambda mode: policy(gang.cluster, mode=mode)
    call_off(gang.cluster)
    policy(gang.cluster)


def goes_on(run: TrainingRun) -> None:
    """Waits for some steps more."""
    run.wait_for_step(newest_step(run) + 5)


def resumed(run: TrainingRun, record: Json, *, restarts: int) -> None:
    """Waits until the gang trains on after what a Preemption has saved; holds what must be true then."""
    status = record["status"]
    assert status["stepsLost"] == 0
    run.wait_for_step(status["step"] + 1)
    snapshot = run.look()
    assert (snapshot.restarts, snapshot.restarts_counted) == (restarts, 0)


def test_policy_mode_counts_for_the_next_signal_and_a_retraction_ends_it(
    gang: TrainingRun, modes: Callable[[Mode], None]
) -> None:
    pods = [pod.name for pod in gang.wait_for_trainers(5)]
    node = gang.look().pods[0].node

    # Drill: all but the exit.
    modes(Mode.DRILL)
    known = names(gang)
    schedule(gang.cluster, HEAD_START_S, node)
    record = ended(gang, fresh(gang, known)["metadata"]["name"], Phase.COMMITTED)
    assert (record["spec"]["mode"], record["spec"]["cause"]) == ("Drill", "Maintenance")
    assert record["status"]["stepsLost"] == 0
    # A commit may be reported before the second pod's acknowledgement has come.
    gang.wait_for_record("that both were told of the drill", lambda status: _received(status) == 2)
    goes_on(gang)

    # Observe: seen, and nobody is told.
    modes(Mode.OBSERVE)
    known = names(gang)
    schedule(gang.cluster, 1500, node)
    record = fresh(gang, known)
    assert record["spec"]["mode"] == "Observe"
    call_off(gang.cluster)
    record = ended(gang, record["metadata"]["name"], Phase.RETRACTED)
    assert record["status"].get("acknowledgements", {}).get("received", 0) == 0
    assert "signal went away" in record["status"]["message"]

    # Enforce: told, and told that it is over.
    modes(Mode.ENFORCE)
    known = names(gang)
    schedule(gang.cluster, 1500, node)
    name = fresh(gang, known)["metadata"]["name"]
    gang.wait_for_record("that both were told", lambda status: _received(status) == 2)
    call_off(gang.cluster)
    assert "signal went away" in ended(gang, name, Phase.RETRACTED)["status"]["message"]
    goes_on(gang)
    snapshot = gang.look()
    assert ([pod.name for pod in snapshot.running()], snapshot.restarts) == (pods, 0)


def _received(status: Json) -> int:
    return int(status.get("acknowledgements", {}).get("received", 0))


def test_unreachable_node_ends_in_a_save_before_pods_are_evicted(gang: TrainingRun) -> None:
    node = gang.wait_for_trainers(5)[0].node
    known, restarts = names(gang), gang.look().restarts
    with local(gang.cluster).silenced(node):
        record = ended(gang, fresh(gang, known)["metadata"]["name"], Phase.COMMITTED)
        spec = record["spec"]
        assert (spec["cause"], spec["nodes"], spec["cancelable"]) == ("NodeLost", [node], True)
        assert spec["signal"] == "taint node.kubernetes.io/unreachable:NoExecute"
    resumed(gang, record, restarts=restarts + 1)


def test_graceful_node_shutdown_by_the_kubelet_ends_in_a_save(gang: TrainingRun) -> None:
    node = gang.wait_for_trainers(5)[1].node
    known, restarts = names(gang), gang.look().restarts
    with operator.outliving(gang.cluster), local(gang.cluster).shutting_down(node):  # a replica ends with it
        record = ended(gang, fresh(gang, known)["metadata"]["name"], Phase.COMMITTED)
        assert (record["spec"]["cause"], record["spec"]["nodes"]) == ("NodeShutdown", [node])
        assert record["spec"]["signal"].startswith("Node condition Ready (False")
        resumed(gang, record, restarts=restarts + 1)
        assert node not in {pod.node for pod in gang.look().running()}


def test_who_leaves_too_often_stays_until_its_pods_are_ended(gang: TrainingRun) -> None:
    first = gang.wait_for_trainers(5)[0]
    before = gang.look()
    operator.spread(gang.cluster)  # or no replica would be left to see the end
    policy(gang.cluster, exitBreaker={"savedExits": before.restarts + 1, "withinSeconds": 1800})

    # A taint that ends pods at once: they leave for the last time.
    known = names(gang)
    nodes.taint(gang.cluster, first.node, MOVED_OUT)
    record = ended(gang, fresh(gang, known)["metadata"]["name"], Phase.COMMITTED)
    assert (record["spec"]["cause"], record["spec"]["nodes"], record["spec"]["exits"]) == (
        *("NodeTaint", [first.node]),
        True,
    )
    resumed(gang, record, restarts=before.restarts + 1)
    assert first.node not in {pod.node for pod in gang.look().running()}
    nodes.untaint(gang.cluster, first.node, MOVED_OUT["key"])

    # Now they save and stay.
    pods = gang.wait_for_pods()
    said = answer(gang, ask(gang, "again", deadlineSeconds=HEAD_START_S), "Committed")
    record = ended(gang, said["preemption"], Phase.COMMITTED)
    assert record["spec"]["exits"] is False
    conditions = {entry["type"]: entry for entry in record["status"]["conditions"]}
    assert (conditions["Exits"]["status"], conditions["Exits"]["reason"]) == ("False", "ExitBreakerOpen")
    goes_on(gang)
    assert [pod.name for pod in gang.look().running()] == [pod.name for pod in pods]
    query = ("get", "events", f"--namespace={NAMESPACE}", "--field-selector=reason=ExitBreakerOpen", "--output=json")
    wait_until("the Event", lambda: bool(json.loads(gang.cluster.kubectl(*query).stdout)["items"]), timeout_s=30)

    # No pod that is being ended can stay.
    known = names(gang)
    gang.cluster.kubectl("delete", "pod", pods[1].name, f"--namespace={NAMESPACE}", "--wait=false")
    record = ended(gang, fresh(gang, known)["metadata"]["name"], Phase.COMMITTED)
    assert (record["spec"]["cause"], record["spec"]["exits"]) == ("PodDeletion", True)
    resumed(gang, record, restarts=before.restarts + 2)
