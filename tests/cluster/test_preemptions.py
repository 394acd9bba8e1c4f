"""A disturbed run does bit for bit what an undisturbed one does: losses, order of the data, final parameters."""

from __future__ import annotations

import datetime
import time

import pytest

from demo import nodes
from demo.snapshot import Json, Snapshot
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from gracepoint_cli.timeline.stages import STAGES
from tests.cluster.machine import end_at_once, paused
from tests.cluster.operator import restart_abruptly, stopped
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MIDDLE = 20  # of the run's steps; the disturbance comes when this one was recorded


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


def test_a_tainted_node(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    node = run.wait_for_trainers(MIDDLE)[0].node
    nodes.taint(run.cluster, node)
    saved = committed(run.wait_for_phase(Phase.COMMITTED))

    # The taint stays, and the job neither goes back there nor restarts again because of it.
    snapshot = finished(run, undisturbed)
    assert node not in {pod.node for pod in snapshot.pods}
    record = run.wait_for_record("every stage", lambda status: reached(status).keys() >= STAGES.keys())
    assert record["status"]["acknowledgements"] == {"expected": 2, "received": 2, "laggards": []}
    assert record["spec"]["cause"] == "SpotTermination"
    assert record["spec"]["nodes"] == [node]
    assert record["status"]["restoredStep"] == saved["step"]
    assert len(run.look().preemptions) == 1

    def reasons() -> set[str]:
        query = ("get", "events", f"--namespace={run.namespace}", "--output=jsonpath={.items[*].reason}")
        return set(run.cluster.kubectl(*query).stdout.split())

    wait_until(
        "the Events",
        lambda: {"PreemptionNoticed", "CheckpointCommitted", "Resumed"} <= reasons(),
        timeout_s=30,
        hint=lambda: str(reasons()),
    )


def test_a_drained_node(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    node = run.wait_for_trainers(MIDDLE)[1].node
    drain = ("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=90s")
    drained = run.cluster.kubectl(*drain, timeout_s=100)
    ended_unix_s = time.time()
    assert f"Gracepoint saves the JobSet {run.name}" in drained.stderr, "it was not held"
    snapshot = finished(run, undisturbed)
    assert node not in {pod.node for pod in snapshot.pods}
    saved = committed(record := run.wait_for_phase(Phase.COMMITTED))
    attempted = datetime.datetime.fromisoformat(record["spec"]["evictionAttemptedAt"])
    assert attempted.timestamp() + reached(saved)["committed"] < ended_unix_s, "it ended before the commit"
    assert (record["spec"]["cause"], record["spec"]["signal"]) == ("Drain", "eviction of the pod")
    assert len(run.look().preemptions) == 1


def test_a_deleted_pod(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    pod = run.wait_for_trainers(MIDDLE)[1]
    run.cluster.kubectl("delete", "pod", pod.name, f"--namespace={run.namespace}", "--wait=false")
    finished(run, undisturbed)
    committed(run.wait_for_phase(Phase.COMMITTED))
    assert [p["spec"]["cause"] for p in run.look().preemptions] == ["PodDeletion"]


def test_sigterm_alone_while_the_operator_is_down(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    run.wait_for_pods()
    with stopped(run.cluster):
        # One process gets a SIGTERM, both must save: nobody but they themselves can spread the word.
        pod = run.wait_for_trainers(MIDDLE)[0]
        run.cluster.kubectl("delete", "pod", pod.name, f"--namespace={run.namespace}", "--wait=false")
        snapshot = finished(run, undisturbed)
        assert snapshot.preemptions == ()


def test_operator_replicas_killed_in_the_middle_of_a_preemption(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    pods = run.wait_for_trainers(MIDDLE)
    # While one process does nothing, the gang cannot agree: so long it is the middle.
    with paused(run, pods[1].name):
        nodes.taint(run.cluster, pods[0].node, nodes.SCALE_DOWN_TAINT)  # a minute to live
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
