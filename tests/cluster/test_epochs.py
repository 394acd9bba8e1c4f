"""Requests, drills, retractions and late saves, on one gang that trains on through all of them but the last."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator

import pytest

from demo.install import Images
from demo.snapshot import Json
from demo.training import TrainingRun
from gracepoint.wire.messages import Phase
from tests.cluster.asking import (
    REQUESTS,
    RESOURCE,
    answer,
    ask,
    call_off,
    ended,
    fresh,
    names,
    newest_step,
    request,
    schedule,
)
from tests.cluster.conftest import MARK, NAMESPACE, training_policy, training_run
from tests.cluster.machine import end_at_once
from tests.testcluster.api import Cluster, ClusterError
from tests.testcluster.shell import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

POLICY = "late"
#: More than the library takes for the longest step that it has seen, a drill included, and for a save.
HEAD_START_S = 20.0


@pytest.fixture(scope="module")
def gang(installed: Cluster, images: Images) -> Iterator[TrainingRun]:
    """A gang that trains for longer than all tests take."""

    def late(spec: Json) -> None:
        spec["deadline"] = {"headStartSeconds": HEAD_START_S}

    training_policy(installed, POLICY, late)
    run = training_run(installed, images, "epochs", POLICY, steps=100_000)
    run.start()
    yield run
    end_at_once(run)


def test_drill_rehearses_all_but_the_exit_and_reports_the_outcome(gang: TrainingRun) -> None:
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


def test_request_deleted_in_time_is_retracted_and_training_continues(gang: TrainingRun) -> None:
    gang.wait_for_trainers(5)
    name = ask(gang, "leave", deadlineSeconds=3000)
    preemption = answer(gang, name, "Adopted")["preemption"]
    twin = ask(gang, "drill-beside", mode="Drill", deadlineSeconds=5)
    assert preemption in answer(gang, twin, "Superseded")["message"]
    gang.cluster.kubectl("delete", f"{REQUESTS}/{name}", f"--namespace={NAMESPACE}")
    assert "went away" in ended(gang, preemption, Phase.RETRACTED)["status"]["message"]
    gang.wait_for_step(newest_step(gang) + 5)
    assert gang.look().restarts == 0


def test_training_continues_through_moved_maintenance_until_the_save_must_start(gang: TrainingRun) -> None:
    node = gang.wait_for_trainers(5)[0].node
    known = names(gang)

    def deadline() -> datetime.datetime:  # of one preemption, however often the maintenance is moved
        return datetime.datetime.fromisoformat(fresh(gang, known)["spec"]["deadline"])

    try:
        schedule(gang.cluster, 1500, node)
        first = deadline()
        schedule(gang.cluster, 3000, node)
        wait_until("the deadline to be put off", lambda: deadline() > first, timeout_s=60, every_s=0.5)
        step = newest_step(gang)
        schedule(gang.cluster, HEAD_START_S + 15, node)
        record = ended(gang, fresh(gang, known)["metadata"]["name"], Phase.COMMITTED)
    finally:
        call_off(gang.cluster)
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
        pytest.param({"deadlineSeconds": -1}, "deadlineSeconds", id="a deadline before the request"),
        pytest.param({"deadlineSeconds": 5, "mode": "Maybe"}, "mode", id="an unknown mode"),
    ],
)
def test_the_api_server_refuses_what_is_no_request(gang: TrainingRun, spec: Json, words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        ask(gang, "refused", **spec)


def test_records_are_the_operators_alone_and_go_long_after_their_end(gang: TrainingRun) -> None:
    """By the records that the tests before have left."""
    first, *_, last = gang.look().preemptions
    stem, _, number = last["metadata"]["name"].rpartition("-")
    forged = {key: last[key] for key in ("apiVersion", "kind")} | {
        "metadata": {"name": f"{stem}-{int(number) + 1}", "namespace": NAMESPACE},
        "spec": last["spec"] | {"epoch": int(number) + 1, "mode": "Observe"},
    }
    editor = f"--as=editor-{MARK}"
    binding = (f"editors-{MARK}", "--clusterrole=edit", f"--user=editor-{MARK}", f"--namespace={NAMESPACE}")
    gang.cluster.kubectl("create", "rolebinding", *binding)
    with pytest.raises(ClusterError, match='cannot create resource "preemptions"'):
        gang.cluster.kubectl("create", editor, "-f", "-", stdin=json.dumps(forged))

    for condition in first["status"]["conditions"]:
        condition["lastTransitionTime"] = "2020-01-02T03:04:05Z"
    patch = json.dumps({"status": {"conditions": first["status"]["conditions"]}})
    old = first["metadata"]["name"]
    gang.cluster.kubectl(
        *("patch", f"{RESOURCE}/{old}", f"--namespace={NAMESPACE}", "--subresource=status", "--type=merge", "-p", patch)
    )

    def there() -> set[str]:
        found = gang.cluster.kubectl("get", RESOURCE, f"--namespace={NAMESPACE}", "--output=name").stdout
        return {name.partition("/")[2] for name in found.split()}

    wait_until("the old record to go", lambda: old not in there(), timeout_s=90, every_s=1)
    assert last["metadata"]["name"] in there()


def test_a_request_for_a_jobset_that_is_not_there_says_so(gang: TrainingRun) -> None:
    body = request(gang, "nobody", deadlineSeconds=5)
    body["spec"]["jobSet"]["name"] = "nobody"
    gang.cluster.kubectl("create", "-f", "-", stdin=json.dumps(body))
    assert "there is no JobSet nobody" in answer(gang, body["metadata"]["name"], "Superseded")["message"]
