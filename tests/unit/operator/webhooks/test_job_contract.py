"""The release contract on Jobs by themselves, as the API server hands them to the webhook."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint.wire.names import LABEL_POLICY, Env
from gracepoint_operator.webhooks import ContractViolation, Patched, inject_workload, release_contract
from gracepoint_operator.webhooks.contracts import DEFAULT_MAX_RESTARTS
from gracepoint_operator.webhooks.updates import shown
from tests.unit.operator.fakes.samples import SETTINGS, Json, environment, policy, policy_spec

POLICY = policy_spec()
DISRUPTION = [{"type": "DisruptionTarget", "status": "True"}]


def job(pods: int = 2, *, pod: Json | None = None, annotations: Json | None = None, **spec: Any) -> Json:
    """With the defaults of the API server, which fills them in before it calls webhooks."""
    container: Json = {"name": "train", "image": "train:1"}
    template: Json = {
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 30,
            "dnsPolicy": "ClusterFirst",
            "subdomain": "llm",
            "containers": [container],
            **(pod or {}),
        }
    }
    defaults = {"completionMode": "Indexed", "backoffLimit": 6, "podReplacementPolicy": "TerminatingOrFailed"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": "llm",
            "namespace": "team",
            "labels": {LABEL_POLICY: "default"},
            "annotations": annotations or {},
        },
        "spec": {"parallelism": pods, "completions": pods, "template": template, **defaults, **spec},
    }


def contracted(body: Json) -> Json:
    result = release_contract(body, POLICY)
    assert isinstance(result, Patched), result
    return result.object


def test_pods_that_leave_are_replaced_without_being_counted() -> None:
    spec = contracted(job())["spec"]
    on_codes = {"containerName": "train", "operator": "In", "values": [77, 78]}
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onExitCodes": on_codes},
        {"action": "Ignore", "onPodConditions": DISRUPTION},
        {"action": "Ignore", "onExitCodes": {**on_codes, "values": [79]}},
    ]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (DEFAULT_MAX_RESTARTS, 0)
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (2**31 - 1, "Failed")


def test_a_second_call_changes_nothing() -> None:
    once = inject_workload(contracted(job()), "default", POLICY, SETTINGS)
    assert inject_workload(contracted(once), "default", POLICY, SETTINGS) == once


def test_limits_of_the_user_are_kept() -> None:
    spec = contracted(job(backoffLimit=9, backoffLimitPerIndex=1))["spec"]
    assert (spec["backoffLimit"], spec["backoffLimitPerIndex"]) == (9, 1)
    assert "maxFailedIndexes" not in spec


def test_rules_for_other_failures_come_after_ours() -> None:
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}
    rules = contracted(job(podFailurePolicy={"rules": [rule]}))["spec"]["podFailurePolicy"]["rules"]
    assert rules[3:] == [rule]


@pytest.mark.parametrize(
    ("body", "path"),
    [
        pytest.param(job(completionMode="NonIndexed"), "spec.completionMode", id="no indices"),
        pytest.param(job(completions=4), "spec.parallelism", id="not all pods at once"),
        pytest.param(
            job(pod={"restartPolicy": "OnFailure"}), "spec.template.spec.restartPolicy", id="restarts in place"
        ),
        pytest.param(
            job(pod={"restartPolicy": "Always"}), "spec.template.spec.restartPolicy", id="no restart policy was written"
        ),
        pytest.param(job(pod={"subdomain": ""}), "spec.template.spec.subdomain", id="no host names"),
        pytest.param(
            job(annotations={"kueue.x-k8s.io/job-min-parallelism": "1"}),
            "metadata.annotations[kueue.x-k8s.io/job-min-parallelism]",
            id="partial admission",
        ),
        pytest.param(
            job(podFailurePolicy={"rules": [{"action": "FailJob", "onPodConditions": DISRUPTION}]}),
            "spec.podFailurePolicy.rules[0].action",
            id="a disruption fails the Job",
        ),
        pytest.param(
            job(podFailurePolicy={"rules": [{"action": "Count", "onExitCodes": {"operator": "In", "values": [77]}}]}),
            "spec.podFailurePolicy.rules[0].action",
            id="a saved exit is counted",
        ),
    ],
)
def test_what_contradicts_is_refused_with_its_path(body: Json, path: str) -> None:
    result = release_contract(body, POLICY)
    assert isinstance(result, ContractViolation)
    assert [problem.partition(": ")[0] for problem in result.problems] == [path]


PARTIAL, COMPLETIONS = "kueue.x-k8s.io/job-min-parallelism", "kueue.x-k8s.io/job-completions-equal-parallelism"


@pytest.mark.parametrize(
    ("annotations", "problems"),
    [
        pytest.param({PARTIAL: "2", COMPLETIONS: "true"}, [], id="allowed"),
        pytest.param({PARTIAL: "1", COMPLETIONS: "true"}, [PARTIAL], id="too few"),
        pytest.param({PARTIAL: "some", COMPLETIONS: "true"}, [PARTIAL], id="no number"),
        pytest.param({PARTIAL: "3"}, [COMPLETIONS], id="completions stay"),
        pytest.param({COMPLETIONS: "true"}, [], id="no partial admission"),
    ],
)
def test_partial_admission_is_allowed_from_the_least_number_on(annotations: Json, problems: list[str]) -> None:
    result = release_contract(job(4, annotations=annotations), policy_spec(training={"minProcesses": 2}))
    found = result.problems if isinstance(result, ContractViolation) else ()
    assert [problem.partition(": ")[0] for problem in found] == [f"metadata.annotations[{each}]" for each in problems]


def test_a_missing_restart_policy_is_to_be_written() -> None:
    result = release_contract(job(pod={"restartPolicy": "Always"}), POLICY)
    assert isinstance(result, ContractViolation)
    assert "the default where it is not set" in result.message
    assert "Write restartPolicy: Never" in result.message


def test_a_single_process_needs_no_host_name() -> None:
    made = inject_workload(contracted(job(1, pod={"subdomain": ""})), "default", POLICY, SETTINGS)
    assert Env.SUBDOMAIN not in environment(made["spec"]["template"]["spec"]["containers"][0])


def test_pods_know_their_job_and_process_0() -> None:
    made = inject_workload(contracted(job()), "default", POLICY, SETTINGS)
    template = made["spec"]["template"]
    assert template["metadata"]["labels"] == {LABEL_POLICY: "default"}
    found = environment(template["spec"]["containers"][0])
    assert found[Env.JOBSET_NAME] == "metadata.labels['batch.kubernetes.io/job-name']"
    assert found[Env.JOBSET_UID] == "metadata.labels['batch.kubernetes.io/controller-uid']"
    assert (found[Env.PROCESS_COUNT], found[Env.PODS_PER_JOB], found[Env.SUBDOMAIN]) == ("2", "2", "llm")
    absent = {Env.COORDINATOR_JOB, Env.REPLICATED_JOB, Env.RESTART_ATTEMPT, Env.JOB_INDEX}
    assert not absent & found.keys()


def test_the_annotation_says_what_was_changed() -> None:
    body = job()
    made = shown(body, inject_workload(contracted(body), "default", POLICY, SETTINGS), policy())
    fields = made["metadata"]["annotations"]["gracepoint.dev/injected"]
    for field in ("spec.backoffLimit", "spec.podFailurePolicy", "spec.podReplacementPolicy"):
        assert f'"{field}"' in fields
