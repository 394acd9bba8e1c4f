"""The release contract on JobSets as users write them."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks import ContractViolation, Patched, release_contract
from gracepoint_operator.webhooks.contracts import DEFAULT_GRACE_PERIOD_S, DEFAULT_MAX_RESTARTS, NO_LIMIT
from gracepoint_operator.webhooks.installation import InstalledApi
from gracepoint_operator.webhooks.release_contract import RULE_NAME
from gracepoint_operator.workloads import JobFailure, action_at, failure_rules
from tests.unit.operator.fakes.samples import Json, by_jobset, job_of, jobset, pod_of, policy_spec, replicated_job

POLICY = policy_spec()
DISRUPTION = [{"type": "DisruptionTarget", "status": "True"}]
PROGRAM_FAILED = {"action": "FailIndex", "onExitCodes": {"operator": "NotIn", "values": [0]}}
#: How the Job of a failed program fails, by Kubernetes 1.30 to 1.37 (pkg/controller/job/job_controller.go).
CRASH = JobFailure("MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes")


def on_codes(action: str, *codes: int) -> Json:
    return {"action": action, "onExitCodes": {"containerName": "train", "operator": "In", "values": list(codes)}}


def contracted(body: Json, policy: CheckpointPolicySpec = POLICY) -> Json:
    result = release_contract(body, policy)
    assert isinstance(result, Patched), result
    return result.object


def refusal(body: Json, policy: CheckpointPolicySpec = POLICY) -> str:
    result = release_contract(body, policy)
    assert isinstance(result, ContractViolation)
    return result.message


def test_bare_jobset_gets_everything_to_exit_and_restart() -> None:
    made = contracted(jobset())
    job = job_of(made)
    assert pod_of(made)["restartPolicy"] == "Never"
    assert pod_of(made)["terminationGracePeriodSeconds"] == DEFAULT_GRACE_PERIOD_S
    assert (job["backoffLimit"], job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (NO_LIMIT, NO_LIMIT, 0)
    assert job["completionMode"] == "Indexed"
    assert job["podFailurePolicy"]["rules"] == [
        on_codes("FailJob", 77, 78),
        {"action": "FailJob", "onPodConditions": DISRUPTION},
        on_codes("Ignore", 79),
        PROGRAM_FAILED,
    ]
    failure_policy = made["spec"]["failurePolicy"]
    assert failure_policy["maxRestarts"] == DEFAULT_MAX_RESTARTS
    (rule,) = failure_policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert rule["targetReplicatedJobs"] == ["workers"]


def test_the_object_that_is_given_is_not_changed() -> None:
    body = jobset()
    before = copy.deepcopy(body)
    contracted(body)
    assert body == before


def test_conforming_jobset_stays_unchanged_after_jobsets_webhook() -> None:
    once = contracted(jobset())
    assert contracted(once) == once
    after_jobset = by_jobset(once)
    assert contracted(after_jobset) == after_jobset


def test_exit_codes_are_ordered_since_kubernetes_refuses_others() -> None:
    policy = policy_spec(afterSave={"savedExitCode": 90, "unsavedExitCode": 40})
    rule = job_of(contracted(jobset(), policy))["podFailurePolicy"]["rules"][0]
    assert rule["onExitCodes"]["values"] == [40, 90]


def test_the_rules_name_is_one_that_jobset_accepts() -> None:
    assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", RULE_NAME)


@pytest.mark.parametrize(
    ("message", "uncounted"),
    [
        pytest.param(
            "Container train for pod team/x failed with exit code 77 matching FailJob rule at index 0",
            True,
            id="saved",
        ),
        pytest.param("Pod team/x has condition DisruptionTarget matching FailJob rule at index 1", True, id="drain"),
        pytest.param(
            "Container train for pod team/x failed with exit code 3 matching FailJob rule at index 2",
            False,
            id="a user's own rule for a real error",
        ),
        pytest.param(
            "Container train for pod team/x failed with exit code 177 matching FailJob rule at index 2",
            False,
            id="a code that ends like ours",
        ),
    ],
)
def test_only_preemptions_restart_uncounted(message: str, uncounted: bool) -> None:
    """Messages as Kubernetes 1.34 writes them (pkg/controller/job/pod_failure_policy.go)."""
    (rule,) = contracted(jobset())["spec"]["failurePolicy"]["rules"]
    assert any(re.search(p, message) for p in rule["onJobFailureMessagePatterns"]) is uncounted


def test_the_users_failure_policy_stays_behind_our_rule() -> None:
    own = {"name": "dont_retry", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    made = contracted(jobset(failurePolicy={"maxRestarts": 0, "rules": [own]}))
    failure_policy = made["spec"]["failurePolicy"]
    assert failure_policy["maxRestarts"] == 0
    assert [rule["name"] for rule in failure_policy["rules"]] == [RULE_NAME, "dont_retry"]


def test_a_rule_of_ours_from_an_exported_jobset_is_renewed() -> None:
    exported = contracted(jobset())
    made = contracted(exported, policy_spec(afterSave={"savedExitCode": 90, "unsavedExitCode": 91}))
    (rule,) = made["spec"]["failurePolicy"]["rules"]
    assert rule["onJobFailureMessagePatterns"][0] == "exit code (90|91) matching FailJob rule"


def test_the_users_rules_on_other_exit_codes_stay_behind_ours() -> None:
    own = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}
    ignoring = {"action": "Count", "onExitCodes": {"operator": "NotIn", "values": [1, 2]}}
    body = jobset(replicated_job(podFailurePolicy={"rules": [own, ignoring]}))
    rules = job_of(contracted(body))["podFailurePolicy"]["rules"]
    assert rules[3:] == [own, ignoring, PROGRAM_FAILED]


def test_a_limit_of_zero_is_the_users_word_for_what_the_rule_for_programs_does() -> None:
    body = jobset(replicated_job(backoffLimit=0))
    assert contracted(body) == contracted(jobset())


def test_what_users_count_for_the_job_fails_it_at_once_as_a_single_pod_cannot_come_back() -> None:
    counting = {"action": "Count", "onExitCodes": {"operator": "In", "values": [42]}}
    made = contracted(jobset(replicated_job(podFailurePolicy={"rules": [counting]})))
    job = job_of(made)
    assert (job["backoffLimit"], job["backoffLimitPerIndex"], job["maxFailedIndexes"]) == (NO_LIMIT, 0, 0)
    assert contracted(made) == made


@pytest.mark.parametrize(
    ("rules", "action"),
    [
        pytest.param([], "RestartJobSet", id="no rules"),
        pytest.param(
            [{"action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}],
            "FailJobSet",
            id="crashes end it",
        ),
        pytest.param([{"action": "FailJobSet"}], "FailJobSet", id="everything ends it"),
        pytest.param(
            [{"action": "FailJobSet", "onJobFailureMessagePatterns": ["specified backoff limit"]}],
            "FailJobSet",
            id="by the message",
        ),
        pytest.param(
            [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            "RestartJobSet",
            id="a rule for their own FailJob rules",
        ),
        pytest.param(
            [{"action": "FailJobSet", "onJobFailureReasons": ["MaxFailedIndexesExceeded"]}],
            "RestartJobSet",
            id="a rule for what did not exist",
        ),
        pytest.param(
            [
                {
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["BackoffLimitExceeded"],
                    "targetReplicatedJobs": ["workers"],
                },
                {"action": "FailJobSet"},
            ],
            "RestartJobSetAndIgnoreMaxRestarts",
            id="the first that matched",
        ),
    ],
)
def test_a_failed_program_is_handled_as_the_users_rules_say_for_the_backoff_limit(
    rules: list[Json], action: str
) -> None:
    made = contracted(jobset(failurePolicy={"maxRestarts": 4, "rules": rules}))
    kept = made["spec"]["failurePolicy"]["rules"]
    assert [rule for rule in kept if not str(rule.get("name")).startswith("gracepoint_")] == rules
    assert action_at(failure_rules(made["spec"]), "workers", CRASH) == action
    assert contracted(made) == made
    for rule in kept:
        assert re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule.get("name", "theirs"))


@pytest.mark.parametrize(
    ("limits", "reason", "action"),
    [
        pytest.param({"maxFailedIndexes": 0}, "MaxFailedIndexesExceeded", "FailJobSet", id="no index may fail"),
        pytest.param({"maxFailedIndexes": 0}, "BackoffLimitExceeded", "RestartJobSet", id="a rule for another reason"),
        pytest.param({}, "BackoffLimitExceeded", "FailJobSet", id="indexes may fail"),
    ],
)
def test_rules_about_failed_indexes_hold_where_the_user_allows_no_index_to_fail(
    limits: Json, reason: str, action: str
) -> None:
    rules = [{"action": "FailJobSet", "onJobFailureReasons": [reason]}]
    member = replicated_job(backoffLimitPerIndex=0, **limits)
    made = contracted(jobset(member, failurePolicy={"maxRestarts": 4, "rules": rules}))
    assert action_at(failure_rules(made["spec"]), "workers", CRASH) == action
    assert contracted(made) == made, "also if it is exported and created again"


def test_members_may_be_treated_differently() -> None:
    rules = [{"action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"], "targetReplicatedJobs": ["b"]}]
    spec = contracted(jobset(replicated_job("a"), replicated_job("b"), failurePolicy={"rules": rules}))["spec"]
    found = [action_at(failure_rules(spec), name, CRASH) for name in ("a", "b")]
    assert found == ["RestartJobSet", "FailJobSet"]


def test_where_jobset_knows_no_messages_failed_programs_count_nevertheless() -> None:
    spec = contracted(jobset())["spec"]
    for rule in spec["failurePolicy"]["rules"]:
        del rule["onJobFailureMessagePatterns"]  # as the API server does
    assert action_at(failure_rules(spec), "workers", CRASH) == "RestartJobSet"
    assert InstalledApi(by_message=False).refusal(contracted(jobset()), POLICY) is None


def test_the_policys_code_for_a_process_that_did_not_get_in_is_replaced_alone() -> None:
    made = contracted(jobset(), policy_spec(startup={"notJoinedExitCode": 99}))
    assert on_codes("Ignore", 99) in job_of(made)["podFailurePolicy"]["rules"]


def test_a_rule_of_the_users_for_that_code_is_refused() -> None:
    rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42, 79]}}
    message = refusal(jobset(replicated_job(podFailurePolicy={"rules": [rule]})))
    assert "podFailurePolicy.rules[0].action: found FailJob for exit codes [42, 79], expected Ignore" in message


def test_values_that_the_user_has_set_rightly_are_kept() -> None:
    body = jobset(replicated_job(backoffLimit=0, completionMode="Indexed"))
    pod_of(body).update(restartPolicy="Never", terminationGracePeriodSeconds=600)
    assert pod_of(contracted(body))["terminationGracePeriodSeconds"] == 600


@pytest.mark.parametrize(
    ("job", "path", "found"),
    [
        pytest.param({"backoffLimit": 6}, "backoffLimit", "6", id="backoffLimit"),
        pytest.param({"backoffLimitPerIndex": 1}, "backoffLimitPerIndex", "1", id="backoffLimitPerIndex"),
        pytest.param({"completionMode": "NonIndexed"}, "completionMode", "NonIndexed", id="completionMode"),
        pytest.param({"completions": 4}, "parallelism", "1", id="pods one after the other"),
        pytest.param(
            {"podReplacementPolicy": "TerminatingOrFailed"},
            "podReplacementPolicy",
            "TerminatingOrFailed",
            id="podReplacementPolicy",
        ),
        pytest.param(
            {"podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": DISRUPTION}]}},
            "podFailurePolicy.rules[0].action",
            "Ignore for DisruptionTarget",
            id="disruptions ignored",
        ),
        pytest.param(
            {
                "podFailurePolicy": {
                    "rules": [{"action": "Count", "onExitCodes": {"operator": "In", "values": [1, 77]}}]
                }
            },
            "podFailurePolicy.rules[0].action",
            "Count for exit codes [1, 77]",
            id="our exit code counted",
        ),
    ],
)
def test_what_contradicts_is_refused_with_path_found_expected_and_fix(
    job: dict[str, Any], path: str, found: str
) -> None:
    message = refusal(jobset(replicated_job(**job)))
    assert message.startswith(f"spec.replicatedJobs[0].template.spec.{path}: found {found}")
    assert ", expected " in message
    assert re.search(r"\. (Remove|Set) ", message)


def test_on_failure_is_refused_and_never_changed() -> None:
    body = jobset()
    pod_of(body)["restartPolicy"] = "OnFailure"
    message = refusal(body)
    assert "spec.replicatedJobs[0].template.spec.template.spec.restartPolicy: found OnFailure" in message
    assert "Write restartPolicy: Never" in message


def test_called_after_jobsets_webhook_it_says_what_to_write() -> None:
    """Then "not set" looks like "OnFailure": the chart's configuration name puts ours first."""
    message = refusal(by_jobset(jobset()))
    assert "OnFailure (JobSet's own default where it is not set)" in message


def test_every_problem_is_reported_at_once() -> None:
    message = refusal(jobset(replicated_job("a", backoffLimit=6), replicated_job("b", backoffLimit=7)))
    assert "replicatedJobs[0].template.spec.backoffLimit: found 6" in message
    assert "replicatedJobs[1].template.spec.backoffLimit: found 7" in message


def test_replicated_jobs_that_do_not_train_are_left_alone() -> None:
    body = jobset(replicated_job("workers"), replicated_job("tensorboard", backoffLimit=6))
    made = contracted(body, policy_spec(training={"replicatedJobs": ["workers"]}))
    assert made["spec"]["replicatedJobs"][1] == body["spec"]["replicatedJobs"][1]
    assert made["spec"]["failurePolicy"]["rules"][0]["targetReplicatedJobs"] == ["workers"]


@pytest.mark.parametrize(
    ("training", "path", "words"),
    [
        pytest.param({"replicatedJobs": ["wrokers"]}, "spec.replicatedJobs: ", "'wrokers'", id="unknown replicatedJob"),
        pytest.param(
            {"container": "main"},
            "spec.replicatedJobs[0].template.spec.template.spec.containers: ",
            "found ['train'], expected the container 'main'",
            id="unknown container",
        ),
    ],
)
def test_a_policy_that_names_what_the_jobset_lacks_refuses_it(training: dict[str, Any], path: str, words: str) -> None:
    message = refusal(jobset(), policy_spec(training=training))
    assert message.startswith(path)
    assert words in message


def test_a_gang_of_nobody_is_refused() -> None:
    assert "replicas: found 0" in refusal(jobset(replicated_job(replicas=0)))
    assert "spec.replicatedJobs: found none" in refusal({**jobset(), "spec": {}})


def test_disabled_host_names_are_refused() -> None:
    assert "spec.network.enableDNSHostnames" in refusal(jobset(network={"enableDNSHostnames": False}))


def test_completions_that_kubernetes_would_ask_for_are_filled_in() -> None:
    body = jobset(replicated_job(pods=4))
    del job_of(body)["completions"]
    assert job_of(contracted(body))["completions"] == 4
