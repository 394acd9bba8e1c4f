"""A disturbed run does bit for bit what an undisturbed one does: losses, order of the data, final parameters."""

from __future__ import annotations

import signal
import time

import pytest

from demo import nodes
from demo.training import Json, Snapshot, TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster.machine import trainer_process
from tests.cluster.operator import restart_abruptly, stopped

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MIDDLE = 40  # of the run's steps; the disturbance comes when this one was recorded


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


def test_a_tainted_node(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    run.wait_for_step(MIDDLE)
    node = run.look().running()[0].node
    nodes.taint(run.cluster, node)
    status = committed(run.wait_for_phase(Phase.COMMITTED))
    assert (status["acknowledgements"]["expected"], status["acknowledgements"]["received"]) == (2, 2)

    # The taint stays, and the job neither goes back there nor restarts again because of it.
    snapshot = finished(run, undisturbed)
    assert len(snapshot.preemptions) == 1
    assert snapshot.preemptions[0]["spec"]["cause"] == "SpotTermination"
    assert snapshot.preemptions[0]["spec"]["nodes"] == [node]
    assert snapshot.preemptions[0]["status"]["restoredStep"] == status["step"]
    assert node not in {pod.node for pod in snapshot.pods}
    events = run.cluster.kubectl(
        "get", "events", f"--namespace={run.namespace}", "--output=jsonpath={.items[*].reason}"
    )
    assert {"PreemptionNoticed", "CheckpointCommitted", "Resumed"} <= set(events.stdout.split())


def test_a_drained_node(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    run.wait_for_step(MIDDLE)
    node = run.look().running()[1].node
    run.cluster.kubectl(
        "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=90s", timeout_s=100
    )
    snapshot = finished(run, undisturbed)
    assert [p["spec"]["cause"] for p in snapshot.preemptions] == ["Drain"]
    committed(snapshot.preemptions[0])
    assert node not in {pod.node for pod in snapshot.pods}


def test_a_deleted_pod(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    run.wait_for_step(MIDDLE)
    pod = run.look().running()[1]
    run.cluster.kubectl("delete", "pod", pod.name, f"--namespace={run.namespace}", "--wait=false")
    snapshot = finished(run, undisturbed)
    assert [p["spec"]["cause"] for p in snapshot.preemptions] == ["PodDeletion"]
    committed(snapshot.preemptions[0])


def test_sigterm_alone_while_the_operator_is_down(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    run.wait_for_step(MIDDLE)
    before = run.look().running()
    with stopped(run.cluster):
        # One process gets a SIGTERM, both must save: nobody but they themselves can spread the word.
        run.cluster.kubectl("delete", "pod", before[0].name, f"--namespace={run.namespace}", "--wait=false")
        snapshot = finished(run, undisturbed)
        assert snapshot.preemptions == ()


def test_operator_replicas_killed_in_the_middle_of_a_preemption(run: TrainingRun, undisturbed: TrainingRun) -> None:
    run.start()
    run.wait_for_step(MIDDLE)
    nodes.taint(run.cluster, run.look().running()[0].node)
    restart_abruptly(run.cluster)
    snapshot = finished(run, undisturbed)
    assert len(snapshot.preemptions) == 1
    # Whoever was told last before the operator died, its end is known once it is back.
    end = run.wait_for_phase(None, timeout_s=90)
    assert end["status"]["phase"] == Phase.COMMITTED, end["status"]


def test_a_pod_that_does_not_answer_delays_nobody(run: TrainingRun) -> None:
    run.start()
    run.wait_for_step(MIDDLE)
    stuck, other = run.look().running()
    # Stopped, not dead: its connection stays open, and nothing comes from it.
    trainer_process(run, stuck.name).send_signal(signal.SIGSTOP)
    tainted_unix_s = nodes.taint(run.cluster, other.node)
    status: Json = {}
    give_up_s = time.monotonic() + 10
    while "firstAck" not in status and time.monotonic() < give_up_s:
        preemptions = run.look().preemptions
        timings = preemptions[0].get("status", {}).get("timings", []) if preemptions else []
        status = {timing["stage"]: timing["seconds"] for timing in timings}
        time.sleep(0.2)
    assert "firstAck" in status, f"no acknowledgement {time.time() - tainted_unix_s:.1f} s after the taint: {status}"
    assert "lastAck" not in status
