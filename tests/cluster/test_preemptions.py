"""A disturbed run does bit for bit what an undisturbed one does: losses, order of the data, final parameters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import datetime

import pytest

from demo import nodes
from demo.install import Images
from demo.snapshot import Json, Snapshot
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster.conftest import training_policy, training_run
from tests.cluster.machine import end_at_once, paused
from tests.cluster.operator import restart_abruptly, stopped
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MIDDLE = 20  # of the run's steps; the disturbance comes when this one was recorded
#: Seconds. New replicas are ready after half a minute, and a process may try to connect only every 15 s by then.
PATIENCE_S = 180


def finished(run: TrainingRun, undisturbed: TrainingRun) -> Snapshot:
    """Waits for the end of a disturbed run, and holds what must be true after every disturbance."""
    run.wait_for_end(timeout_s=200)
    comparison = run.compare(undisturbed)
    assert comparison.differences == ()
    snapshot = run.look()
    assert snapshot.restarts == 1
    assert snapshot.restarts_counted == 0
    return snapshot


def committed(preemption: Json) -> Json:
    """The status of a preemption that ended as promised."""
    status: Json = preemption["status"]
    assert status["phase"] == Phase.COMMITTED, status
    assert status["stepsLost"] == 0
    assert status["step"] >= MIDDLE
    assert status["bytes"] > 0
    assert status["secondsToSpare"] > 0
    return status


def reached(status: Json) -> dict[str, float]:
    """Seconds from the signal to each stage that is recorded."""
    return {timing["stage"]: timing["seconds"] for timing in status.get("timings", [])}


def test_a_deleted_pod(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    pod = run.wait_for_trainers(MIDDLE)[1]
    run.cluster.kubectl("delete", "pod", pod.name, f"--namespace={run.namespace}", "--wait=false")
    assert programs_of_the_last_start(run, finished(run, undisturbed)) == [0, 0]
    committed(run.wait_for_phase(Phase.COMMITTED))
    assert [p["spec"]["cause"] for p in run.look().preemptions] == ["PodDeletion"]
    account = finished_account(run)
    assert (account["disruptions"], account["losses"]) == (1, 0)
    seconds = account["seconds"]
    whole = datetime.fromisoformat(account["until"]) - datetime.fromisoformat(account["since"])
    assert sum(seconds.values()) <= whole.total_seconds() + 0.001
    # A kubelet tells the end of a process in whole seconds, so "leaving" may be nothing.
    assert {"training", "saving", "scheduling", "image", "join", "restore", "compile"} <= seconds.keys()
    assert not {"recomputation", "unknown"} & seconds.keys()


def programs_of_the_last_start(run: TrainingRun, snapshot: Snapshot) -> list[int]:
    """How many programs each process compiled until its first step, after the restart; the others were kept."""
    counts = []
    for pod in snapshot.pods:
        if pod.attempt == snapshot.restarts:
            log = run.cluster.kubectl("logs", pod.name, f"--namespace={run.namespace}").stdout
            said = re.search(r"programs until the first step compiled=(\d+) found=(\d+)", log)
            assert said, log
            assert int(said[2]) > 0
            counts.append(int(said[1]))
    return counts


def finished_account(run: TrainingRun) -> Json:
    """Waits until the policy's status has the account of the finished run; returns it."""

    def found() -> Json | None:
        answer = run.cluster.kubectl("get", "checkpointpolicies", f"--namespace={run.namespace}", "--output=json")
        policies = json.loads(answer.stdout)["items"]
        accounts = [account for policy in policies for account in policy.get("status", {}).get("goodput", [])]
        return next((item for item in accounts if item["name"] == run.name and "finished" in item), None)

    wait_until("the account of the finished run", lambda: found() is not None, timeout_s=60)
    account = found()
    assert account is not None
    return account


def test_sigterm_alone_while_the_operator_is_down(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start(template=slowly)  # it trains while the operator is stopped
    run.wait_for_pods()
    with stopped(run.cluster):
        # One process gets a SIGTERM, both must save: nobody but they themselves can spread the word.
        pod = run.wait_for_trainers(MIDDLE)[0]
        run.cluster.kubectl("delete", "pod", pod.name, f"--namespace={run.namespace}", "--wait=false")
        snapshot = finished(run, undisturbed)
        assert snapshot.preemptions == ()


def slowly(template: Json) -> None:
    """Leaves time for what is done to a run before its end."""
    template["spec"]["containers"][0]["args"].append("--pace=0.5")


@pytest.fixture
def patient(installed: Cluster, images: Images) -> Iterator[TrainingRun]:
    """A run that freezes as soon as it is told, and has longer than new replicas of the operator take to be heard."""

    def at_once(spec: Json) -> None:
        spec["deadline"] = {"headStartSeconds": PATIENCE_S}

    training_policy(installed, "patient", at_once)
    made = training_run(installed, images, "patient", "patient")
    yield made
    made.delete()


def test_operator_replicas_that_are_killed_in_the_middle_of_a_preemption_do_not_disturb_it(
    patient: TrainingRun, undisturbed: TrainingRun
) -> None:
    def with_grace(template: Json) -> None:
        template["spec"]["terminationGracePeriodSeconds"] = PATIENCE_S

    run = patient
    run.start(template=with_grace)
    pods = run.wait_for_trainers(MIDDLE)
    # While one process does nothing, the gang cannot agree: so long it is the middle.
    with paused(run, pods[1].name):
        nodes.taint(run.cluster, pods[0].node, nodes.SCALE_DOWN_TAINT)
        run.wait_for_phase(Phase.NOTICED)
        dead = restart_abruptly(run.cluster)
        run.wait_for_record("that a new replica was heard", lambda status: heard(status) - dead != set())
    finished(run, undisturbed)
    committed(run.wait_for_phase(Phase.COMMITTED))
    assert len(run.look().preemptions) == 1


def heard(status: Json) -> set[str]:
    """Names of the replicas to which a process has acknowledged the notice."""
    return {entry["name"] for entry in status.get("replicas", []) if entry["acknowledged"]}


def test_a_pod_that_does_not_answer_delays_nobody(run: TrainingRun) -> None:
    run.start()
    stuck, other = run.wait_for_trainers(MIDDLE)
    try:
        with paused(run, stuck.name):
            nodes.taint(run.cluster, other.node)
            record = run.wait_for_record("that one process acknowledged", lambda status: "firstAck" in reached(status))
            at = reached(record["status"])
            assert at["firstAck"] < nodes.GRACE_S, "the acknowledgement came when it was too late to save"
            assert "lastAck" not in at
    finally:
        end_at_once(run)
