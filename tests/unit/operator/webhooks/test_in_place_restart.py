"""JobSets that restart in place after a crash: a saved exit still makes them leave the node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gracepoint_operator.webhooks import ContractViolation, Patched, inject_workload, release_contract
from gracepoint_operator.webhooks.injection import KEEPER
from gracepoint_operator.webhooks.release_contract import creation_warnings
from tests.unit.operator.fakes.samples import (
    SETTINGS,
    Json,
    job_of,
    jobset,
    pod_of,
    policy,
    policy_spec,
    replicated_job,
)

Form = Callable[..., Json]
POLICY = policy_spec()
LARGEST = 2147483647
#: The policy's exit codes are not among those that restart in place.
UNLESS_SAVED = {"operator": "NotIn", "values": [0, 77, 78]}
ADDRESS = [{"name": "JOBSET_NAME", "value": "llm"}, {"name": "POD_NAME", "value": "llm-0"}]


def rule(action: str, **codes: Any) -> list[Json]:
    return [{"action": action, "exitCodes": codes}]


def with_sidecar(**job: Any) -> Json:
    """JobSet's agent in a container of its own (Kubernetes 1.35). Its rule is that of JobSet's example."""
    body = jobset(replicated_job(**job), failurePolicy={"maxRestarts": 5, "restartStrategy": "InPlaceRestart"})
    pod = pod_of(body)
    pod["containers"][0] |= {
        "restartPolicy": "Never",
        "restartPolicyRules": rule("RestartAllContainers", **UNLESS_SAVED),
    }
    agent = {"name": "agent", "image": "agent", "restartPolicy": "Always", "env": ADDRESS}
    rules = rule("RestartAllContainers", operator="NotIn", values=[0])
    pod["initContainers"] = [{**agent, "restartPolicyRules": rules}]
    return body


def within_agent(**job: Any) -> Json:
    """JobSet's agent starts the training (Kubernetes 1.34)."""
    body = jobset(replicated_job(**job), failurePolicy={"maxRestarts": 5, "restartStrategy": "InPlaceRestart"})
    container = pod_of(body)["containers"][0]
    container |= {"restartPolicy": "Never", "restartPolicyRules": rule("Restart", **UNLESS_SAVED)}
    container["env"] = [*ADDRESS, {"name": "WORKER_COMMAND", "value": "python train.py"}]
    return body


FORMS = pytest.mark.parametrize(
    "form", [pytest.param(with_sidecar, id="sidecar"), pytest.param(within_agent, id="child")]
)


def taken(body: Json) -> Json:
    result = release_contract(body, POLICY)
    assert isinstance(result, Patched), result
    return result.object


def refused(body: Json) -> str:
    result = release_contract(body, POLICY)
    assert isinstance(result, ContractViolation), result
    return result.message


@FORMS
def test_only_a_saved_exit_or_a_disruption_fails_the_job(form: Form) -> None:
    made = taken(form())
    job = job_of(made)
    assert [each["action"] for each in job["podFailurePolicy"]["rules"]] == ["FailJob", "FailJob"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [77, 78], (
        "a process that did not get in starts again, which counts"
    )
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (LARGEST, "Failed")
    first = made["spec"]["failurePolicy"]["rules"][0]
    assert (first["name"], first["action"]) == ("gracepoint_preemption", "RestartJobSetAndIgnoreMaxRestarts")
    assert first["onJobFailureMessagePatterns"][0] == "exit code (77|78) matching FailJob rule"
    assert made["spec"]["failurePolicy"]["restartStrategy"] == "InPlaceRestart"
    assert taken(made) == made, "the second call has nothing to do"


@FORMS
def test_sizes_are_written_as_jobset_requires(form: Form) -> None:
    body = form()
    del job_of(body)["parallelism"], job_of(body)["completions"]
    assert (job_of(taken(body))["parallelism"], job_of(taken(body))["completions"]) == (1, 1)


@FORMS
def test_another_backoff_limit_is_refused(form: Form) -> None:
    assert refused(form(backoffLimit=0)).startswith(
        f"spec.replicatedJobs[0].template.spec.backoffLimit: found 0, expected {LARGEST}"
    )


@FORMS
@pytest.mark.parametrize(
    ("codes", "fix"),
    [
        pytest.param({"operator": "NotIn", "values": [0]}, "add these codes to it", id="all failures"),
        pytest.param({"operator": "In", "values": [1, 77]}, "or these codes from it", id="named"),
    ],
)
def test_rules_that_keep_a_saved_process_on_its_node_are_refused(form: Form, codes: Json, fix: str) -> None:
    body = form()
    container = pod_of(body)["containers"][0]
    container["restartPolicyRules"] = rule(container["restartPolicyRules"][0]["action"], **codes)
    message = refused(body)
    assert "containers[train].restartPolicyRules[0]" in message
    assert fix in message


@pytest.mark.parametrize("missing", ["agent", "rules"])
def test_restarts_in_place_that_cannot_happen_are_refused(missing: str) -> None:
    body = within_agent()
    container = pod_of(body)["containers"][0]
    if missing == "agent":
        container["env"] = []
    else:
        del container["restartPolicyRules"]
    message = refused(body)
    assert "spec.failurePolicy.restartStrategy: found InPlaceRestart, expected Recreate or BlockingRecreate" in message
    assert "JOBSET_NAME" in message


def test_a_member_without_an_agent_is_refused_if_another_one_has_it() -> None:
    body = within_agent()
    body["spec"]["replicatedJobs"].append(replicated_job("others", backoffLimit=LARGEST))
    assert "restartStrategy" in refused(body)


@pytest.mark.parametrize(
    ("form", "warned"), [pytest.param(with_sidecar, False, id="sidecar"), pytest.param(within_agent, True, id="child")]
)
def test_training_that_dies_with_its_agent_is_warned_of(form: Form, warned: bool) -> None:
    found = [text for text in creation_warnings(taken(form()), policy()) if "WORKER_COMMAND" in text]
    assert bool(found) is warned


@pytest.mark.parametrize("writer", ["Keeper", "Thread"])
@pytest.mark.parametrize(
    ("form", "ended"), [pytest.param(with_sidecar, True, id="sidecar"), pytest.param(within_agent, False, id="child")]
)
def test_a_keeper_that_ends_with_its_training_is_warned_of(form: Form, ended: bool, writer: str) -> None:
    spec = policy_spec(checkpoint={"directory": "/checkpoints", "writer": writer})
    made = inject_workload(taken(form()), "default", spec, SETTINGS)
    found = [text for text in creation_warnings(made, policy()) if KEEPER in text]
    assert bool(found) is (ended and writer == "Keeper")
