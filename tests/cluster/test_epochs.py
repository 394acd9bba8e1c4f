"""Requests, drills, retractions and late saves, on one gang that trains on through all of them but the last."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun, apply_policy
from gracepoint.wire.messages import Phase
from gracepoint.wire.names import API_VERSION, GROUP
from tests.cluster.conftest import ENVIRONMENT, FLAGS, MARK, NAMESPACE
from tests.cluster.machine import end_at_once
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POLICY = "late"
HEAD_START_S = 10.0
MAINTENANCE = "cloud.google.com/scheduled-maintenance-time"
RESOURCE = f"preemptions.{GROUP}"


@pytest.fixture(scope="module")
def gang(installed: Cluster, images: Images) -> Iterator[TrainingRun]:
    """A gang that trains for longer than all tests take."""

    def late(spec: Json) -> None:
        spec["deadline"] = {"headStartSeconds": HEAD_START_S}

    apply_policy(installed, POLICY, namespace=NAMESPACE, change=late)
    run = TrainingRun(
        installed,
        f"epochs-{MARK}",
        namespace=NAMESPACE,
        image=images.trainer,
        steps=100_000,
        policy=POLICY,
        flags=FLAGS,
        environment=ENVIRONMENT,
    )
    run.start()
    yield run
    end_at_once(run)


def request(run: TrainingRun, name: str, **spec: object) -> Json:
    return {
        "apiVersion": f"{GROUP}/{API_VERSION}",
        "kind": "Preemption",
        "metadata": {"name": f"{name}-{MARK}", "namespace": NAMESPACE},
        "spec": {"jobSet": {"name": run.name}, **spec},
    }


def ask(run: TrainingRun, name: str, **spec: object) -> str:
    body = request(run, name, **spec)
    run.cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
    return str(body["metadata"]["name"])


def answer(run: TrainingRun, name: str, phase: str) -> Json:
    """Waits until the operator says that of a request; returns its status."""
    found: Json = {}

    def said() -> bool:
        done = run.cluster.kubectl("get", f"{RESOURCE}/{name}", f"--namespace={NAMESPACE}", "--output=json")
        found.update(json.loads(done.stdout).get("status", {}))
        return found.get("phase") == phase

    wait_until(f"request {name} to be {phase}", said, timeout_s=60, every_s=0.5, hint=lambda: str(found))
    return found


def ended(run: TrainingRun, name: str, phase: Phase) -> Json:
    """Waits until a Preemption has ended so; returns it."""
    found: list[Json] = []

    def over() -> bool:
        found[:] = [item for item in run.look().preemptions if item["metadata"]["name"] == name]
        at = found[0].get("status", {}).get("phase") if found else None
        return at is not None and Phase(at).ended

    wait_until(f"{name} to end", over, timeout_s=90, every_s=0.5, hint=lambda: str(found))
    assert found[0]["status"]["phase"] == phase, found[0]["status"]
    return found[0]


def newest_step(run: TrainingRun) -> int:
    newest = run.newest()
    assert newest is not None
    return newest.step


def test_a_drill_rehearses_all_but_the_exit_and_says_what_a_real_one_would_have_met(gang: TrainingRun) -> None:
    before = gang.wait_for_trainers(5)
    name = ask(gang, "drill", mode="Drill", cause="Rehearsal", deadlineSeconds=HEAD_START_S)
    said = answer(gang, name, "Committed")
    record = ended(gang, said["preemption"], Phase.COMMITTED)
    assert (record["spec"]["mode"], record["spec"]["cause"]) == ("Drill", "Rehearsal")
    status = record["status"]
    assert status["stepsLost"] == 0
    assert "secondsToSpare" in status
    assert {"frozen", "agreed", "committed"} <= {timing["stage"] for timing in status["timings"]}
    gang.wait_for_step(status["step"] + 5)
    snapshot = gang.look()
    assert [pod.name for pod in snapshot.running()] == [pod.name for pod in before]
    assert snapshot.restarts == 0


def test_a_request_that_is_deleted_in_time_is_taken_back_and_training_goes_on(gang: TrainingRun) -> None:
    gang.wait_for_trainers(5)
    name = ask(gang, "leave", deadlineSeconds=3000)
    preemption = answer(gang, name, "Adopted")["preemption"]
    twin = ask(gang, "drill-beside", mode="Drill", deadlineSeconds=5)
    assert preemption in answer(gang, twin, "Superseded")["message"]
    gang.cluster.kubectl("delete", f"{RESOURCE}/{name}", f"--namespace={NAMESPACE}")
    assert "went away" in ended(gang, preemption, Phase.RETRACTED)["status"]["message"]
    gang.wait_for_step(newest_step(gang) + 5)
    assert gang.look().restarts == 0


def test_with_a_maintenance_ahead_that_is_moved_training_goes_on_until_the_save_must_start(gang: TrainingRun) -> None:
    node = gang.wait_for_trainers(5)[0].node
    known = {item["metadata"]["name"] for item in gang.look().preemptions}

    def schedule(in_s: float) -> None:
        gang.cluster.kubectl("label", "node", node, "--overwrite", f"{MAINTENANCE}={time.time() + in_s:.0f}")

    def deadline() -> datetime.datetime | None:
        fresh = [item for item in gang.look().preemptions if item["metadata"]["name"] not in known]
        assert len(fresh) < 2, "a maintenance that is moved is one epoch"
        return datetime.datetime.fromisoformat(fresh[0]["spec"]["deadline"]) if fresh else None

    try:
        schedule(1500)
        wait_until("the epoch", lambda: deadline() is not None, timeout_s=60, every_s=0.5)
        first = deadline()
        schedule(3000)
        wait_until("the deadline to be put off", lambda: deadline() != first, timeout_s=60, every_s=0.5)
        second = deadline()
        assert first is not None
        assert second is not None
        assert second > first
        step = newest_step(gang)
        schedule(HEAD_START_S + 15)
        (name,) = {item["metadata"]["name"] for item in gang.look().preemptions} - known
        record = ended(gang, name, Phase.COMMITTED)
    finally:
        gang.cluster.kubectl("label", "node", node, f"{MAINTENANCE}-")
    at = {timing["stage"]: timing["seconds"] for timing in record["status"]["timings"]}
    ahead, observed = (datetime.datetime.fromisoformat(record["spec"][key]) for key in ("deadline", "observedAt"))
    assert at["frozen"] >= (ahead - observed).total_seconds() - HEAD_START_S - 1
    assert record["status"]["step"] > step + 5
    assert record["status"]["stepsLost"] == 0
    assert record["status"]["secondsToSpare"] > 0
    gang.wait_for_step(record["status"]["step"] + 1)
    snapshot = gang.look()
    assert (snapshot.restarts, snapshot.restarts_counted) == (1, 0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param({}, "exactly one of deadline and deadlineSeconds", id="no deadline"),
        pytest.param({"deadlineSeconds": 5, "signal": "s"}, "expected a request", id="half a record"),
        pytest.param({"deadlineSeconds": -1}, "deadlineSeconds", id="a deadline before the request"),
        pytest.param({"deadlineSeconds": 5, "mode": "Maybe"}, "mode", id="an unknown mode"),
    ],
)
def test_the_api_server_refuses_what_is_neither_request_nor_record(gang: TrainingRun, spec: Json, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        ask(gang, "refused", **spec)


def test_a_request_for_a_jobset_that_is_not_there_says_so(gang: TrainingRun) -> None:
    body = request(gang, "nobody", deadlineSeconds=5)
    body["spec"]["jobSet"]["name"] = "nobody"
    gang.cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
    assert "there is no JobSet nobody" in answer(gang, body["metadata"]["name"], "Superseded")["message"]
