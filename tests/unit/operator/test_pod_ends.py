"""What one disrupted pod does to its Job, and the Job to its JobSet, as the controllers decide it."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint_operator.workloads import (
    JobFailure,
    failure_rules,
    failures_at_disruption,
    restarts_alone,
    restarts_in_place,
)

ON_DISRUPTION = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def rules(*rules: dict[str, Any]) -> dict[str, Any]:
    return {"podFailurePolicy": {"rules": list(rules)}}


def on_codes(action: str, operator: str, *codes: int) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"operator": operator, "values": list(codes)}}


@pytest.mark.parametrize(
    ("job", "failed", "reasons"),
    [
        pytest.param({}, 0, [None, None], id="the default of Kubernetes"),
        pytest.param({}, 6, ["BackoffLimitExceeded"] * 2, id="the default, used up"),
        pytest.param({"backoffLimit": 0}, 0, ["BackoffLimitExceeded"] * 2, id="no failure is allowed"),
        pytest.param({"backoffLimit": 1}, 0, [None, None], id="one failure is allowed"),
        pytest.param({"backoffLimit": 1}, 1, ["BackoffLimitExceeded"] * 2, id="one is allowed, and was"),
        pytest.param(
            {"backoffLimit": 0, **rules({"action": "Ignore", **ON_DISRUPTION})}, 0, [None, None], id="ignored"
        ),
        pytest.param(rules({"action": "FailJob", **ON_DISRUPTION}), 0, ["PodFailurePolicy"] * 2, id="a rule fails it"),
        pytest.param(
            {"backoffLimit": 0, **rules({"action": "Count", **ON_DISRUPTION})},
            0,
            ["BackoffLimitExceeded"] * 2,
            id="counted by a rule",
        ),
        pytest.param(
            rules(on_codes("FailJob", "NotIn", 77)), 0, ["PodFailurePolicy"] * 2, id="any other exit code fails it"
        ),
        pytest.param(rules(on_codes("FailJob", "In", 137)), 0, [None, "PodFailurePolicy"], id="only if it is killed"),
        pytest.param(
            {"backoffLimit": 0, **rules(on_codes("Ignore", "In", 143), {"action": "FailJob", **ON_DISRUPTION})},
            0,
            [None, "PodFailurePolicy"],
            id="the first rule that matches counts",
        ),
        pytest.param(
            {"backoffLimitPerIndex": 0, "completions": 1}, 0, ["FailedIndexes"] * 2, id="its only index fails"
        ),
        pytest.param(
            {"backoffLimitPerIndex": 0, "completions": 4, "maxFailedIndexes": 0},
            0,
            ["MaxFailedIndexesExceeded"] * 2,
            id="no index may fail",
        ),
        pytest.param({"backoffLimitPerIndex": 0, "completions": 4}, 0, [None, None], id="one of several indexes fails"),
        pytest.param({"backoffLimitPerIndex": 3}, 9, [None, None], id="no limit for all indexes together"),
    ],
)
def test_a_job_fails_as_its_controller_decides(job: dict[str, Any], failed: int, reasons: list[str | None]) -> None:
    found = failures_at_disruption(job, failed)
    assert [item and item.reason for item in found] == reasons


EXCEEDED = JobFailure("BackoffLimitExceeded", "Job has reached the specified backoff limit")
BY_RULE = JobFailure("PodFailurePolicy", "Pod has condition DisruptionTarget matching FailJob rule")


@pytest.mark.parametrize(
    ("written", "failure", "alone"),
    [
        pytest.param([], EXCEEDED, False, id="no rule"),
        pytest.param([{"action": "RestartJob"}], EXCEEDED, True, id="each Job by itself"),
        pytest.param([{"action": "RestartJobAndIgnoreMaxRestarts"}], EXCEEDED, True, id="by itself, uncounted"),
        pytest.param([{"action": "FailJobSet"}], EXCEEDED, False, id="the end of all"),
        pytest.param(
            [{"action": "RestartJob", "targetReplicatedJobs": ["workers"]}], EXCEEDED, False, id="for another Job"
        ),
        pytest.param(
            [{"action": "RestartJob", "onJobFailureReasons": ["PodFailurePolicy"]}], EXCEEDED, False, id="other reason"
        ),
        pytest.param(
            [{"action": "RestartJob", "onJobFailureReasons": ["PodFailurePolicy"]}], BY_RULE, True, id="its reason"
        ),
        pytest.param(
            [{"action": "RestartJob", "onJobFailureMessagePatterns": ["exit code (3|4)"]}],
            BY_RULE,
            False,
            id="other message",
        ),
        pytest.param(
            [{"action": "RestartJobSet", "targetReplicatedJobs": ["data"]}, {"action": "RestartJob"}],
            EXCEEDED,
            False,
            id="the first rule that matches counts",
        ),
        pytest.param(
            [{"action": "RestartJob", "onJobFailureMessagePatterns": ["("]}], BY_RULE, False, id="no pattern at all"
        ),
    ],
)
def test_a_failed_job_is_made_again_alone_where_the_failure_policy_says_so(
    written: list[dict[str, Any]], failure: JobFailure, alone: bool
) -> None:
    found = failure_rules({"failurePolicy": {"maxRestarts": 3, "rules": written}})
    assert restarts_alone(found, "data", failure) is alone


def test_a_restart_in_place_reaches_every_pod() -> None:
    assert restarts_in_place({"failurePolicy": {"restartStrategy": "InPlaceRestart"}})
    assert not restarts_in_place({"failurePolicy": {"restartStrategy": "Recreate"}})
    assert not restarts_in_place({})
