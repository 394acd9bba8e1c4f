"""What ``status`` computes from the objects of the API."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping
from typing import Any

import pytest

from gracepoint_cli import CommandError
from gracepoint_cli import status as status_report
from gracepoint_cli.cluster import WorkloadMatch
from gracepoint_operator.decisions.waiting import in_words
from gracepoint_operator.kube import objects
from gracepoint_operator.workloads import BY_NAME, JOBSETS
from tests.command_line import command
from tests.unit.operator.fakes.objects import preemption
from tests.unit.operator.fakes.samples import jobset, pod_of, policy_spec

Json = dict[str, Any]
NOW = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)


def by_itself() -> Json:
    """A Job that the webhook has prepared."""
    body = stored()
    job = body["spec"]["replicatedJobs"][0]["template"]["spec"]
    return {"kind": "Job", "metadata": body["metadata"], "spec": job}


def stored(*, grace_s: int | None = 60, injected: bool = True) -> Json:
    body = jobset()
    body["metadata"]["uid"] = "u"
    if grace_s is not None:
        pod_of(body)["terminationGracePeriodSeconds"] = grace_s
    if injected:
        template = body["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        template["metadata"] = {"labels": {"gracepoint.dev/policy": "default"}}
    return body


def a_policy(**status: Any) -> Json:
    meta = {"name": "default", "namespace": "team", "uid": "p"}
    kind = {"apiVersion": "gracepoint.dev/v1beta1", "kind": "CheckpointPolicy"}
    return {**kind, "metadata": meta, "spec": policy_spec().to_json(), "status": status}


def connected(count: int, *, seconds_ago: float = 10) -> Json:
    at = (NOW - datetime.timedelta(seconds=seconds_ago)).isoformat()
    return {"replicas": [{"name": "a", "time": at, "workloads": [{"uid": "u", "connected": count}]}]}


def forecast(save_s: float) -> Json:
    item = {"name": "llm", "uid": "u", "drainSeconds": 1, "saveSeconds": save_s, "margin": 2, "time": NOW.isoformat()}
    return {"forecasts": [item]}


def running(count: int) -> list[Json]:
    labels = {"jobset.sigs.k8s.io/jobset-uid": "u"}
    return [{"metadata": {"labels": labels}, "status": {"phase": "Running"}} for _ in range(count)]


def one(
    body: Json, policies: list[Json], pods: list[Json], records: list[Json] | None = None
) -> status_report.JobOverview:
    (found,) = status_report.job_rows([body], policies, pods, records or [], now=NOW)
    return found


def test_a_connected_job_whose_save_fits_has_no_problems() -> None:
    found = one(stored(), [a_policy(**connected(2), **forecast(9))], running(2))
    assert (found.connected, found.running, found.needed_s, found.fits) == (2, 2, 20.0, True)
    assert found.problems == ()


def test_what_a_job_waits_for_is_in_its_row() -> None:
    wait = {
        "kind": "Node",
        "what": "node for process 1",
        "since": NOW.isoformat(),
        "message": "0/12 nodes are available",
    }
    waits = [{"name": "llm", "uid": "u", "waits": [wait]}, {"name": "other", "uid": "v", "waits": []}]
    found = one(stored(), [a_policy(waits=waits)], running(1))
    (shown,) = found.to_json()["waitsFor"]
    assert shown == wait | {"since": "2026-03-01T12:00:00Z"}
    assert in_words(found.waits[0], NOW.timestamp() + 720) == (
        "node for process 1, since 12 min; last: 0/12 nodes are available"
    )


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        pytest.param(stored(injected=False), {}, "create it again", id="created before its policy"),
        pytest.param(stored(), connected(1), "1 of 2 running pods are not connected", id="a pod is not connected"),
        pytest.param(stored(), forecast(40), "a save needs 82.0 s, and the pods have 60 s", id="too little grace"),
    ],
)
def test_what_is_wrong_with_a_job_is_said(body: Json, status: Json, words: str) -> None:
    assert words in " ".join(one(body, [a_policy(**status)], running(2)).problems)


def test_a_job_by_itself_is_shown_with_its_own_pods() -> None:
    labels = {"batch.kubernetes.io/controller-uid": "u", "gracepoint.dev/policy": "default"}
    pods = [{"metadata": {"labels": labels}, "status": {"phase": "Running"}}]
    found = one(by_itself(), [a_policy(**connected(1), **forecast(9))], pods)
    assert (found.called, found.running, found.connected, found.grace_s) == ("job/llm", 1, 1, 60)
    assert found.problems == ()


def test_a_jobset_that_the_trainer_made_is_called_as_its_trainjob() -> None:
    body = stored()
    body["metadata"]["ownerReferences"] = [{"kind": "TrainJob", "name": "llm", "uid": "t", "controller": True}]
    found = one(body, [a_policy()], [])
    assert found.called == "trainjob/llm"
    assert (found.to_json()["kind"], found.to_json()["madeBy"]) == ("JobSet", "TrainJob")


def test_a_job_without_its_policy_says_so() -> None:
    assert "there is no CheckpointPolicy 'default'" in one(stored(), [], []).problems[0]


def test_a_job_of_an_older_version_without_its_policy_has_the_one_of_its_newest_preemption() -> None:
    record = preemption()
    record["spec"]["jobSet"]["uid"] = "u"
    assert "no disruption is announced to it" in one(stored(), [], []).problems[0]
    assert "it keeps the settings" in one(stored(), [], [], [record]).problems[0]


def test_what_nobody_reported_is_unknown_not_no() -> None:
    found = one(stored(), [a_policy()], running(2))
    assert (found.connected, found.needed_s, found.fits) == (None, None, None)


@pytest.mark.parametrize(
    ("seconds_ago", "counted"), [pytest.param(10, 2, id="it lives"), pytest.param(200, None, id="it is silent")]
)
def test_the_numbers_of_a_replica_count_while_it_renews_its_lease(seconds_ago: float, counted: int | None) -> None:
    at = (NOW - datetime.timedelta(seconds=seconds_ago)).isoformat()
    leases = [{"spec": {"holderIdentity": "a", "renewTime": at}}]
    (found,) = status_report.job_rows([stored()], [a_policy(**connected(2))], running(2), [], now=NOW, leases=leases)
    assert found.connected == counted


def test_who_may_not_see_leases_sees_the_numbers_of_all_replicas() -> None:
    assert one(stored(), [a_policy(**connected(2, seconds_ago=200))], running(2)).connected == 2


def test_the_newest_preemption_is_shown() -> None:
    def record(epoch: int, phase: str) -> Json:
        return {
            "metadata": {"name": f"llm-{epoch}"},
            "spec": {"epoch": epoch, "jobSet": {"uid": "u"}},
            "status": {"phase": phase},
        }

    request: Json = {"metadata": {"name": "drill"}, "spec": {"jobSet": {"name": "llm"}}}
    records = [record(2, "Committed"), record(1, "Expired"), request]
    assert one(stored(), [a_policy()], [], records).last == ("llm-2", "Committed")


def test_the_default_grace_period_is_that_of_kubernetes() -> None:
    assert one(stored(grace_s=None), [a_policy()], []).grace_s == 30


def test_a_policy_that_no_operator_has_seen_says_so() -> None:
    (found,) = status_report.policy_rows([a_policy()])
    assert "the operator has not seen this policy" in found.problems[0]


def test_conditions_that_are_false_are_shown_with_their_message() -> None:
    condition = {
        "type": "Connected",
        "status": "False",
        "reason": "x",
        "message": "1 of 2",
        "lastTransitionTime": NOW.isoformat(),
    }
    (found,) = status_report.policy_rows([a_policy(conditions=[condition], observedGeneration=1)])
    assert found.problems == ("Connected: 1 of 2",)


def test_a_policy_that_cannot_be_read_is_shown_with_the_reason() -> None:
    broken = a_policy()
    broken["spec"] = {"checkpoint": {"directory": "relative"}}
    (found,) = status_report.policy_rows([broken])
    assert "directory" in found.error


def unreadable(part: str) -> Json:
    body = stored()
    body["metadata"] |= {"name": "broken", "uid": "b"}
    if part == "status":
        body["status"] = {"restarts": "many"}
    else:
        pod_of(body)["terminationGracePeriodSeconds"] = "long"
    return body


def test_a_job_that_cannot_be_read_is_shown_with_the_others() -> None:
    policies, pods = [a_policy(**connected(2), **forecast(9))], running(2)
    broken, whole = status_report.job_rows([stored(), unreadable("status")], policies, pods, [], now=NOW)
    assert (broken.called, broken.grace_s, broken.fits, broken.mode) == ("jobset/broken", None, None, "")
    assert (broken.injected, broken.restarts, broken.finished) == (None, None, None)
    assert "cannot be read: " in broken.problems[0]
    assert (whole.called, whole.connected, whole.problems) == ("jobset/llm", 2, ())


def test_an_unreadable_pod_template_hides_only_the_grace_period() -> None:
    body = unreadable("pod template")
    body["status"] = {"restarts": 2, "conditions": [{"type": "Completed", "status": "True"}]}
    found = one(body, [a_policy(**connected(2), **forecast(9))], [])
    assert (found.grace_s, found.fits, found.mode) == (None, None, "Enforce")
    assert (found.injected, found.restarts, found.finished) == (True, 2, True)
    assert [problem.split(": ")[0] for problem in found.problems] == ["cannot be read"]


def show(monkeypatch: pytest.MonkeyPatch, found: Mapping[objects.Kind, list[Json]]) -> None:
    """The command line sees a cluster with these objects."""

    class Cluster(contextlib.nullcontext[Any]):
        namespace = "team"

        def __init__(self, *where: object) -> None:
            super().__init__(self)

        def list(self, kind: objects.Kind, namespace: str, *, labels: str | None = None) -> list[Json]:
            return found.get(kind, [])

    monkeypatch.setattr("gracepoint_cli.cluster.Cluster", Cluster)


def test_status_says_what_a_job_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    since = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=12)).isoformat()
    wait = {"kind": "Node", "what": "node for process 1", "since": since, "message": "0/12 nodes are available"}
    started = {"type": "Started", "status": "False", "reason": "WaitingForNode", "message": "1 JobSets wait"}
    condition = started | {"lastTransitionTime": NOW.isoformat()}
    waits = [{"name": "llm", "uid": "u", "waits": [wait]}]
    policy = a_policy(waits=waits, conditions=[condition], observedGeneration=1)
    show(monkeypatch, {objects.POLICIES: [policy], JOBSETS: [stored()]})
    lines = [line for line in command("status").out.splitlines() if "wait" in line]
    assert lines == ["jobset/llm: waits for: node for process 1, since 12 min; last: 0/12 nodes are available"]
    (job,) = command("status", "-o", "json").json["workloads"]
    assert job["waitsFor"][0]["kind"] == "Node"


def test_status_shows_what_of_a_job_is_safe_in_the_memory_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = datetime.datetime.now(datetime.UTC)
    entry = {
        "name": "llm",
        "uid": "u",
        "safeStep": 1234,
        "copies": 2,
        "passed": (now - datetime.timedelta(minutes=5)).isoformat(),
        "everySeconds": 5.0,
        "skipped": 3,
        "time": now.isoformat(),
    }
    show(monkeypatch, {objects.POLICIES: [a_policy(snapshots=[entry], observedGeneration=1)], JOBSETS: [stored()]})
    (line,) = [line for line in command("status").out.splitlines() if "1234" in line]
    job, step, copies, age_s, _, every, _, skipped = line.split()
    assert (job, step, copies, every, skipped) == ("jobset/llm", "1234", "2", "5", "3")
    assert 300 <= int(age_s) < 400
    (found,) = command("status", "-o", "json").json["workloads"]
    assert (found["snapshots"]["safeStep"], found["snapshots"]["skipped"]) == (1234, 3)


def test_status_without_snapshots_says_nothing_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, {objects.POLICIES: [a_policy(observedGeneration=1)], JOBSETS: [stored()]})
    assert "SAFE STEP" not in command("status").out
    (found,) = command("status", "-o", "json").json["workloads"]
    assert found["snapshots"] is None


def test_status_ends_well_although_a_job_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    show(monkeypatch, {objects.POLICIES: [a_policy(**connected(2))], JOBSETS: [stored(), unreadable("status")]})
    done = command("status")
    assert (done.code, done.err) == (0, "")
    assert "jobset/broken: cannot be read: " in done.out
    assert "jobset/llm " in done.out
    (row,) = [line.split() for line in done.out.splitlines() if line.startswith("jobset/broken ")]
    assert row == ["jobset/broken", "default", "-", "-", "unknown", "unknown", "unknown", "-"]
    (broken, _) = command("status", "-o", "json").json["workloads"]
    assert (broken["name"], broken["gracePeriodSeconds"], len(broken["problems"])) == ("broken", None, 1)
    assert (broken["injected"], broken["restarts"], broken["finished"]) == (None, None, None)


def test_command_for_one_job_says_that_it_cannot_be_read() -> None:
    with pytest.raises(CommandError, match="the JobSet broken cannot be read: expected a number"):
        WorkloadMatch(BY_NAME["JobSet"], unreadable("status")).read()


def test_a_policy_that_does_not_apply_as_it_says_is_shown_with_who_has_set_that() -> None:
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": NOW.isoformat()}
    shortened = "found spec.evictionHold.boundSeconds 3600, but evictions are held for 600 s at most"
    for reason, message, problems in (
        ("HoldShortened", shortened, (f"Ready: {shortened}",)),
        ("Watching", "every signal is told", ()),
    ):
        condition = {**ready, "reason": reason, "message": message}
        (found,) = status_report.policy_rows([a_policy(conditions=[condition], observedGeneration=1)])
        assert found.problems == problems
