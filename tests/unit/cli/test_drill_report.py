"""What a drill asks for, when it is in vain, and how its end is told."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint_cli import drill
from gracepoint_cli.cluster import WorkloadMatch
from gracepoint_operator.resources import PreemptionRequest
from gracepoint_operator.webhooks import inject_workload
from gracepoint_operator.workloads import BY_NAME
from tests.unit.cli.fakes.samples import preemption
from tests.unit.operator.fakes import objects
from tests.unit.operator.fakes.samples import SETTINGS, jobset, pod_of, policy_spec

Json = dict[str, Any]
POLICY: Json = {"spec": policy_spec().to_json()}


@pytest.mark.parametrize("kind", BY_NAME)
def test_the_request_is_one_that_the_operator_reads(kind: str) -> None:
    body = drill.request(kind, "llm", "team", 30)
    named = body | {"metadata": {"name": body["metadata"]["generateName"] + "a1b2c", "namespace": "team"}}
    read = PreemptionRequest.of(named)
    assert read.kind == "PreemptionRequest"
    assert (read.spec.workload.kind, read.spec.workload.name) == (kind, "llm")
    assert (read.spec.mode, read.spec.deadline_seconds) == ("Drill", 30)


@pytest.mark.parametrize(
    ("change", "policy", "words"),
    [
        pytest.param({}, POLICY, "", id="nothing"),
        pytest.param({"labels": {}}, POLICY, "no label gracepoint.dev/policy", id="no label"),
        pytest.param({}, None, "which does not exist", id="no policy"),
        pytest.param({}, {"spec": {"mode": "Observe"}}, "set spec.mode to Drill", id="a policy that only observes"),
        pytest.param({"ended": True}, POLICY, "has ended", id="ended"),
        pytest.param({"injected": False}, POLICY, "created before its policy or label", id="not prepared"),
        pytest.param({"suspend": True}, POLICY, "is suspended", id="suspended"),
    ],
)
def test_a_drill_in_vain_is_said_before_it_is_asked_for(change: Json, policy: Json | None, words: str) -> None:
    body = jobset(suspend=change.get("suspend", False))
    body["metadata"]["uid"] = "u"
    if change.get("injected", True):
        pod_of(body)["terminationGracePeriodSeconds"] = 60
        body = inject_workload(body, "default", policy_spec(), SETTINGS)
    if "labels" in change:
        body["metadata"]["labels"] = change["labels"]
    if "ended" in change:
        body["status"] = {"conditions": [{"type": "Completed", "status": "True"}]}
    why = drill.why_no_drill(WorkloadMatch(BY_NAME["JobSet"], body), policy)
    assert words in why
    assert bool(why) is bool(words)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(objects.lone_job(), "", id="runs"),
        pytest.param(objects.lone_job(condition="Complete"), "the Job alone has ended", id="ended"),
        pytest.param(objects.lone_job(injected=False), "the Job alone was created before", id="not prepared"),
    ],
)
def test_a_drill_of_a_job_by_itself_is_judged_alike(body: Json, words: str) -> None:
    why = drill.why_no_drill(WorkloadMatch(BY_NAME["Job"], body), POLICY)
    assert words in why
    assert bool(why) is bool(words)


def asked(**status: Any) -> Json:
    return {"metadata": {"name": "llm-drill-x"}, "spec": {}, "status": status}


def test_a_drill_continues_until_its_record_has_ended() -> None:
    adopted = asked(phase="Adopted", preemption="llm-12345678-1")
    assert drill.outcome(asked(), None) is None
    assert drill.outcome(adopted, None) is None
    assert drill.outcome(adopted, preemption(phase="Agreed")) is None
    found = drill.outcome(adopted, preemption())
    assert found is not None
    assert (found.good, found.step, found.commit_s) == (True, 93, 0.5)


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"phase": "Expired"}, id="expired"),
        pytest.param({"stepsLost": 3}, id="steps lost"),
        pytest.param({"secondsToSpare": -0.5}, id="too late"),
        pytest.param({"phase": "Promoted"}, id="an older snapshot"),
    ],
)
def test_an_end_that_lost_work_is_not_good(status: Json) -> None:
    found = drill.outcome(asked(preemption="llm-12345678-1"), preemption(**status))
    assert found is not None
    assert not found.good


def test_a_request_that_came_to_nothing_ends_with_its_message() -> None:
    found = drill.outcome(asked(phase="Superseded", message="another drill is under way"), None)
    assert found is not None
    assert (found.good, found.phase, found.message) == (False, "Superseded", "another drill is under way")


def test_pods_that_did_not_acknowledge_are_named() -> None:
    laggards = {"expected": 2, "received": 1, "laggards": [{"pod": "llm-0-1", "lags": "NotConnected"}]}
    found = drill.outcome(asked(preemption="x"), preemption(acknowledgements=laggards))
    assert found is not None
    assert found.missing == ("llm-0-1 (NotConnected)",)
