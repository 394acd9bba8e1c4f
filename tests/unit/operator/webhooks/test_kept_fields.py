"""What a JobSet got at its creation stays when its manifest is applied again."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gracepoint_operator.webhooks import Patched, inject_workload, release_contract
from gracepoint_operator.webhooks.updates import ANNOTATION, keep_fields, shown
from tests.unit.operator.fakes.samples import SETTINGS, Json, job_of, jobset, pod_of, policy, replicated_job

RULE: Json = {"name": "mine", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}


def manifest() -> Json:
    job = replicated_job(podFailurePolicy={"rules": [{"action": "FailJob", "onExitCodes": {"values": [42]}}]})
    body = jobset(job, failurePolicy={"maxRestarts": 1, "rules": [RULE]}, suspend=True)
    pod_of(body)["containers"][0]["env"] = [{"name": "MINE", "value": "1"}]
    return body


def stored() -> Json:
    body = manifest()
    result = release_contract(body, policy().spec)
    assert isinstance(result, Patched)
    return shown(body, inject_workload(result.object, "default", policy().spec, SETTINGS), policy())


def test_lists_that_were_applied_again_are_whole_again() -> None:
    old = stored()
    again = copy.deepcopy(old)
    again["spec"]["suspend"] = False
    again["spec"]["failurePolicy"]["rules"] = [RULE]
    job_of(again)["podFailurePolicy"] = manifest()["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]
    made, given_up = keep_fields(old, again)
    assert made == {**old, "spec": {**old["spec"], "suspend": False}}
    assert given_up == [
        "spec.failurePolicy.rules",
        "spec.replicatedJobs[workers].template.spec.podFailurePolicy.rules",
    ]


def test_the_manifest_itself_becomes_the_stored_object_again() -> None:
    old = stored()
    made, _ = keep_fields(old, manifest())
    assert made == old
    assert ANNOTATION in made["metadata"]["annotations"]


def test_a_manifest_that_allows_no_failure_may_be_applied_again() -> None:
    """The contract has another limit for that, which no manifest has."""
    body = manifest()
    job_of(body)["backoffLimit"] = 0
    result = release_contract(body, policy().spec)
    assert isinstance(result, Patched)
    old = shown(body, inject_workload(result.object, "default", policy().spec, SETTINGS), policy())
    again = copy.deepcopy(old)
    job_of(again)["backoffLimit"] = 0
    made, given_up = keep_fields(old, again)
    assert made == old
    assert given_up == ["spec.replicatedJobs[workers].template.spec.backoffLimit"]


def test_what_a_queue_adds_while_it_is_suspended_stays() -> None:
    old = stored()
    again = copy.deepcopy(old)
    template = job_of(again)["template"]
    template["metadata"]["labels"] = {"kueue.x-k8s.io/podset": "workers"}
    template["spec"]["nodeSelector"] = {"pool": "spot"}
    made, given_up = keep_fields(old, again)
    found = job_of(made)["template"]
    assert found["metadata"]["labels"] == {"kueue.x-k8s.io/podset": "workers", "gracepoint.dev/policy": "default"}
    assert found["spec"]["nodeSelector"] == {"pool": "spot"}
    assert given_up == []


@pytest.mark.parametrize(
    "old",
    [
        pytest.param(manifest(), id="not injected"),
        pytest.param({"metadata": {}, "spec": {}}, id="empty"),
    ],
)
def test_a_jobset_that_got_nothing_is_left_alone(old: Any) -> None:
    new = manifest()
    assert keep_fields(old, new) == (new, [])
