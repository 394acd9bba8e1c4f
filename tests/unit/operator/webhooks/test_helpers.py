"""JobSets with pods that do not train: which these are, and what they need so that the gang comes back uncounted."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint.wire.names import LABEL_POLICY, LABEL_ROLE, ROLE_HELPER
from gracepoint_operator.webhooks import ContractViolation, release_contract
from gracepoint_operator.webhooks.contracts import NO_LIMIT
from gracepoint_operator.webhooks.installation import InstalledApi
from gracepoint_operator.webhooks.release_contract import HELPER_RULE_NAME, creation_warnings
from gracepoint_operator.webhooks.training_jobs import Problems, gang, helpers
from gracepoint_operator.webhooks.updates import of_workload
from tests.unit.operator.fakes.samples import (
    POLICY,
    Json,
    by_jobset,
    injected,
    job_of,
    jobset,
    pod_of,
    policy,
    policy_spec,
    replicated_job,
)

NAMED = policy_spec(training={"replicatedJobs": ["workers"]})
DISRUPTION = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
COUNTING = {"action": "Count", "onExitCodes": {"operator": "In", "values": [9]}}
PROGRAM_FAILED = {"action": "FailIndex", "onExitCodes": {"operator": "NotIn", "values": [0]}}


def asking(job: Json, resource: str = "nvidia.com/gpu") -> Json:
    job["template"]["spec"]["template"]["spec"]["containers"][0]["resources"] = {"limits": {resource: 8}}
    return job


def labelled(job: Json, **labels: str) -> Json:
    job["template"]["spec"]["template"]["metadata"] = {"labels": labels}
    return job


def training(body: Json) -> list[str]:
    return [member.name for member in gang(body, POLICY.training, Problems())]


def rule_for_helpers(body: Json) -> Json | None:
    rules = body["spec"]["failurePolicy"]["rules"]
    return next((rule for rule in rules if rule.get("name") == HELPER_RULE_NAME), None)


@pytest.mark.parametrize(
    ("body", "names"),
    [
        pytest.param(jobset(replicated_job("head"), replicated_job("workers")), ["head", "workers"], id="nothing said"),
        pytest.param(
            jobset(replicated_job("data"), asking(replicated_job("workers"))), ["workers"], id="one asks for GPUs"
        ),
        pytest.param(
            jobset(asking(replicated_job("a"), "google.com/tpu"), asking(replicated_job("b"), "google.com/tpu")),
            ["a", "b"],
            id="all ask for TPUs",
        ),
        pytest.param(
            jobset(labelled(replicated_job("data"), **{LABEL_ROLE: ROLE_HELPER}), replicated_job("workers")),
            ["workers"],
            id="a label on the one that helps",
        ),
        pytest.param(
            jobset(asking(replicated_job("a"), "vpc.amazonaws.com/efa"), replicated_job("b")),
            ["a", "b"],
            id="a network is no accelerator",
        ),
        pytest.param(
            jobset(asking(replicated_job("a"), "example.com/output"), replicated_job("b")),
            ["a", "b"],
            id="an output is no TPU",
        ),
        pytest.param(
            jobset(
                asking(replicated_job("a"), "example.com/input"), asking(replicated_job("b"), "example.com/big-npu")
            ),
            ["b"],
            id="an input is no NPU",
        ),
        pytest.param(
            jobset(
                labelled(replicated_job("cpu"), **{LABEL_POLICY: "default"}),
                labelled(asking(replicated_job("gpu")), **{LABEL_POLICY: "default"}),
            ),
            ["cpu", "gpu"],
            id="injected before, when all were processes",
        ),
    ],
)
def test_without_names_those_train_that_ask_for_accelerators_if_some_do(body: Json, names: list[str]) -> None:
    assert training(body) == names
    assert training(injected(body)) == names, "the same again once it was injected"
    others = {job["name"] for job in body["spec"]["replicatedJobs"]} - set(names)
    assert {helper.name for helper in helpers(injected(body), POLICY.training)} == others


def test_a_name_in_the_policy_and_the_label_of_a_helper_contradict_each_other() -> None:
    body = jobset(labelled(replicated_job("workers"), **{LABEL_ROLE: ROLE_HELPER}))
    result = release_contract(body, NAMED)
    assert isinstance(result, ContractViolation)
    assert f"metadata.labels[{LABEL_ROLE}]: found helper" in result.message


def test_a_helper_whose_end_restarts_the_jobset_does_so_uncounted() -> None:
    made = injected(jobset(replicated_job("workers"), replicated_job("data", backoffLimit=0)), NAMED)
    assert job_of(made, 1)["podFailurePolicy"]["rules"] == [DISRUPTION, PROGRAM_FAILED]
    limits = [job_of(made, 1)[name] for name in ("backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes")]
    assert limits == [NO_LIMIT, NO_LIMIT, 0], "what never ran is made anew, and a failed program ends the Job"
    assert pod_of(made, 1)["restartPolicy"] == "Never"
    assert "terminationGracePeriodSeconds" not in pod_of(made, 1), "it has nothing to save"
    rule = rule_for_helpers(made)
    assert rule is not None
    assert (rule["action"], rule["targetReplicatedJobs"]) == ("RestartJobSetAndIgnoreMaxRestarts", ["data"])
    assert rule["onJobFailureMessagePatterns"] == ["condition DisruptionTarget matching FailJob rule"]
    assert made["spec"]["failurePolicy"]["rules"][0]["targetReplicatedJobs"] == ["workers"]
    assert injected(by_jobset(made), NAMED) == by_jobset(made), "called again it changes nothing"


@pytest.mark.parametrize(
    ("helper", "spec"),
    [
        pytest.param(replicated_job("data"), {}, id="its Job replaces the pod"),
        pytest.param(
            replicated_job("data", backoffLimit=0),
            {"failurePolicy": {"rules": [{"action": "RestartJob", "targetReplicatedJobs": ["data"]}]}},
            id="it is made anew alone",
        ),
        pytest.param(
            replicated_job("data", backoffLimit=0, podFailurePolicy={"rules": [{**DISRUPTION, "action": "Ignore"}]}),
            {},
            id="its disruptions are ignored",
        ),
    ],
)
def test_a_helper_without_which_the_gang_continues_is_left_as_it_is(helper: Json, spec: Json) -> None:
    made = injected(jobset(replicated_job("workers"), helper, **spec), NAMED)
    assert rule_for_helpers(made) is None
    theirs, ours = helper["template"]["spec"], job_of(made, 1)
    assert {**ours, "template": theirs["template"]} == theirs
    assert pod_of(made, 1) == theirs["template"]["spec"]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param({"completionMode": "NonIndexed"}, id="pods without an index"),
        pytest.param({"podFailurePolicy": {"rules": [COUNTING]}}, id="failures that count for the Job"),
        pytest.param({"backoffLimitPerIndex": 0, "completions": 1}, id="limits of their own"),
    ],
)
def test_a_helper_whose_programs_cannot_be_distinguished_from_pods_that_never_ran_keeps_its_limits(job: Json) -> None:
    helper = replicated_job("data", backoffLimit=0, **job)
    made = job_of(injected(jobset(replicated_job("workers"), helper), NAMED), 1)
    theirs = helper["template"]["spec"]
    assert made["podFailurePolicy"]["rules"][0] == DISRUPTION
    assert PROGRAM_FAILED not in made["podFailurePolicy"]["rules"]
    for name in ("backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes"):
        assert made.get(name) == theirs.get(name), name


def test_a_failed_helper_is_handled_as_the_users_rules_say_for_the_backoff_limit() -> None:
    rule = {"action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}
    body = jobset(replicated_job("workers"), replicated_job("data", backoffLimit=0), failurePolicy={"rules": [rule]})
    rules = injected(body, NAMED)["spec"]["failurePolicy"]["rules"]
    ours = next(item for item in rules if item.get("onJobFailureReasons") == ["MaxFailedIndexesExceeded"])
    assert (ours["action"], ours["targetReplicatedJobs"]) == ("FailJobSet", ["workers", "data"])


def test_an_old_jobset_that_cannot_distinguish_failures_is_refused_with_a_helpers_own_rule() -> None:
    own = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [3]}}
    helper = replicated_job("data", backoffLimit=0, podFailurePolicy={"rules": [own]})
    made = injected(jobset(replicated_job("workers"), helper), NAMED)
    why = InstalledApi(by_message=False).refusal(made, NAMED)
    assert why is not None
    assert "spec.replicatedJobs[1].template.spec.podFailurePolicy.rules[1]" in why


def warned(body: Json, **training: Any) -> list[str]:
    under = policy(training=training)
    found = creation_warnings(injected(body, under.spec), under)
    return [text for text in found if "volumeMounts" not in text]


def test_whoever_names_no_trainers_of_several_is_warned_what_the_job_waits_for() -> None:
    (text,) = warned(jobset(replicated_job("workers", 2, 4), replicated_job("data", 1)))
    assert text.startswith("spec.replicatedJobs: ")
    assert "all 9 pods of workers, data" in text
    assert "waits until each of them has called gracepoint.attach()" in text
    assert "spec.training.replicatedJobs" in text
    assert f"{LABEL_ROLE}: {ROLE_HELPER}" in text


def test_a_guess_is_marked_as_one() -> None:
    (text,) = warned(jobset(asking(replicated_job("workers")), replicated_job("data", 1)))
    assert "workers is taken for what trains, and data for helpers" in text


@pytest.mark.parametrize(
    ("body", "named"),
    [
        pytest.param(jobset(), [], id="there is only one"),
        pytest.param(jobset(replicated_job("workers"), replicated_job("data")), ["workers"], id="the policy says it"),
    ],
)
def test_where_it_is_clear_what_trains_nothing_is_said(body: Json, named: list[str]) -> None:
    assert warned(body, replicatedJobs=named) == []


def test_a_helper_whose_restarts_would_count_is_warned_of() -> None:
    helper = replicated_job("data", backoffLimit=0)
    helper["template"]["spec"]["template"]["spec"]["restartPolicy"] = "OnFailure"
    (text,) = warned(jobset(replicated_job("workers"), helper), replicatedJobs=["workers"])
    assert text.startswith("spec.replicatedJobs[1].template.spec: found restartPolicy OnFailure and backoffLimit 0")
    assert "Write restartPolicy: Never" in text


def test_a_helper_has_no_place_among_the_processes() -> None:
    made = injected(jobset(replicated_job("data", 3), replicated_job("workers", 2)), NAMED)
    assert {name: place.process_count for name, place in of_workload(made).items()} == {"workers": 2}
