"""What every kind of workload gets: one run of each is tainted, drained and suspended, and ends bit for bit as if not.

The tests ask what the cluster and the run's records say of it (docs/workloads.md has the table).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator

import pytest

from demo import install, nodes
from demo.forms import JOB, JOBSET, TRAINJOB, Form
from demo.snapshot import Json, Snapshot
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from gracepoint_cli.timeline import COMMON_STAGES
from tests.cluster.conftest import training_run
from tests.cluster.machine import local
from tests.testcluster import controllers
from tests.testcluster.api import Cluster
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

#: Each of them at a step by which the run has made progress since the one before.
TAINTED, DRAINED, SUSPENDED = 5, 20, 35


class Disturbed:
    """A run that was disturbed three times, and what was seen of it.

    Attributes:
        run: The run, which has ended.
        tainted: Name of the node that was tainted.
        drained: Name of the node that was drained.
        held: What kubectl said of the drain.
        drained_at: When the drain was over, in seconds since the epoch.
        after: Where the pods were after the taint, and after the drain.
        ended: The workload at its end.
    """

    def __init__(self, run: TrainingRun) -> None:
        self.run = run
        cluster = run.cluster
        run.start()
        self.tainted = run.wait_for_trainers(TAINTED)[0].node
        nodes.taint(cluster, self.tainted)
        run.wait_for_phase(Phase.COMMITTED, epoch=0)
        # The taint stays until the job trains again: it neither goes back there nor restarts again because of it.
        run.wait_for_record("every stage", lambda status: reached(status).keys() >= COMMON_STAGES)
        self.after = [{pod.node for pod in run.wait_for_pods()}]
        nodes.untaint(cluster, self.tainted)

        self.drained = run.wait_for_trainers(DRAINED)[1].node
        drain = ("drain", self.drained, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=90s")
        self.held = cluster.kubectl(*drain, timeout_s=100).stderr
        self.drained_at = time.time()
        run.wait_for_phase(Phase.COMMITTED, epoch=1)
        run.wait_for_record("that it trains again", lambda status: "restoredStep" in status)
        self.after.append({pod.node for pod in run.wait_for_pods()})
        cluster.kubectl("uncordon", self.drained)

        run.wait_for_trainers(SUSPENDED)
        self._suspend(True)
        run.wait_for_phase(Phase.COMMITTED, epoch=2)
        wait_until("the pods to go", lambda: not self._alive(), timeout_s=60, every_s=0.5)
        self._suspend(False)
        run.wait_for_end(timeout_s=200)
        self.ended = run.look()

    @property
    def preemptions(self) -> list[Json]:
        return list(self.run.look().preemptions)

    def _suspend(self, value: bool) -> None:
        resource = f"{self.run.form.created}/{self.run.name}"
        patch = json.dumps({"spec": {"suspend": value}})
        self.run.cluster.kubectl(
            "patch", resource, f"--namespace={self.run.namespace}", "--type=merge", "--patch", patch
        )

    def _alive(self) -> bool:
        return any(pod.phase in ("Pending", "Running") for pod in self.run.look().pods)


def reached(status: Json) -> dict[str, float]:
    """Seconds from the signal to each stage that is recorded."""
    return {timing["stage"]: timing["seconds"] for timing in status.get("timings", [])}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(JOBSET, id="JobSet"),
        pytest.param(JOB, id="Job"),
        pytest.param(TRAINJOB, id="TrainJob", marks=pytest.mark.controllers),
    ],
)
def disturbed(request: pytest.FixtureRequest, installed: Cluster, images: install.Images) -> Iterator[Disturbed]:
    """One run of each kind."""
    form: Form = request.param
    if form is TRAINJOB:
        controllers.install(local(installed), controllers.TRAINER)
    # Slower than others: it is disturbed three times before its end, also where each command takes seconds.
    run = training_run(installed, images, f"disturbed-{form.created.partition('s.')[0]}", form=form, pace=0.4)
    try:
        yield Disturbed(run)
    finally:
        clean = json.dumps({"spec": {"taints": None, "unschedulable": None}})
        for node in installed.nodes:
            installed.kubectl("patch", "node", node, "--type=merge", "--patch", clean)
        run.delete()


def test_a_notice_saves_the_step_and_loses_none(disturbed: Disturbed) -> None:
    record = disturbed.preemptions[0]
    spec, status = record["spec"], record["status"]
    assert (spec["cause"], spec["nodes"]) == ("SpotTermination", [disturbed.tainted])
    assert (status["phase"], status["stepsLost"]) == (Phase.COMMITTED, 0)
    assert status["step"] >= TAINTED
    assert status["bytes"] > 0
    assert status["secondsToSpare"] > 0


def test_the_record_says_who_answered_and_has_every_stage(disturbed: Disturbed) -> None:
    record = disturbed.preemptions[0]
    status, run = record["status"], disturbed.run
    assert record["spec"]["jobSet"].get("kind", "JobSet") == run.form.kind
    assert status["acknowledgements"] == {"expected": 2, "received": 2, "laggards": []}
    assert reached(status).keys() >= COMMON_STAGES
    assert status["restoredStep"] == status["step"]

    def reasons() -> set[str]:
        selector = f"involvedObject.kind={run.form.kind},involvedObject.name={run.name}"
        query = ("get", "events", f"--namespace={run.namespace}", f"--field-selector={selector}")
        return set(run.cluster.kubectl(*query, "--output=jsonpath={.items[*].reason}").stdout.split())

    wanted = {"PreemptionNoticed", "CheckpointCommitted", "Resumed"}
    wait_until("the Events", lambda: wanted <= reasons(), timeout_s=30, hint=lambda: str(reasons()))


def test_the_workload_comes_back_on_other_nodes(disturbed: Disturbed) -> None:
    assert disturbed.tainted not in disturbed.after[0]
    assert disturbed.drained not in disturbed.after[1]


def test_an_eviction_is_held_until_the_commit(disturbed: Disturbed) -> None:
    assert f"Gracepoint saves the {disturbed.run.form.kind} {disturbed.run.name}" in disturbed.held, "it was not held"
    record = disturbed.preemptions[1]
    spec, status = record["spec"], record["status"]
    assert (spec["cause"], spec["signal"]) == ("Drain", "eviction of the pod")
    assert (status["phase"], status["stepsLost"]) == (Phase.COMMITTED, 0)
    attempted = datetime.datetime.fromisoformat(spec["evictionAttemptedAt"]).timestamp()
    assert attempted + reached(status)["committed"] < disturbed.drained_at, "the drain ended before the commit"


def test_a_suspended_workload_saves_and_resumes(disturbed: Disturbed) -> None:
    record = disturbed.preemptions[2]
    assert record["spec"]["cause"] == "Suspension"
    assert (record["status"]["phase"], record["status"]["stepsLost"]) == (Phase.COMMITTED, 0)
    assert record["status"]["step"] >= SUSPENDED


def test_the_disturbed_run_equals_the_undisturbed_one(disturbed: Disturbed, undisturbed: TrainingRun) -> None:
    assert disturbed.run.compare(undisturbed).differences == ()
    assert len(disturbed.preemptions) == 3


@pytest.mark.controllers
@pytest.mark.parametrize("disturbed", [pytest.param(TRAINJOB, id="TrainJob")], indirect=True)
def test_the_trainjob_never_failed_and_is_complete(disturbed: Disturbed) -> None:
    resource = f"{disturbed.run.form.created}/{disturbed.run.name}"

    def conditions() -> dict[str, str]:
        query = ("get", resource, f"--namespace={disturbed.run.namespace}", "--output=json")
        status = json.loads(disturbed.run.cluster.kubectl(*query).stdout)["status"]
        return {item["type"]: item["status"] for item in status["conditions"]}

    wait_until("the TrainJob to be complete", lambda: "Complete" in conditions(), timeout_s=60)
    assert conditions() == {"Suspended": "False", "Complete": "True"}


def test_saved_exits_do_not_count_as_failures(disturbed: Disturbed) -> None:
    ended: Snapshot = disturbed.ended
    assert (ended.end, ended.restarts_counted) == ("Completed", 0)
