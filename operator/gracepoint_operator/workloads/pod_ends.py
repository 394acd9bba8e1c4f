"""What the end of a pod by a disruption means for its Job, and what the failure of a Job means for its JobSet. Pure.

The controllers decide by rules, of which the first that matches counts: ``podFailurePolicy`` of a Job
(k8s.io/kubernetes/pkg/controller/job, pod_failure_policy.go), and ``failurePolicy`` of a JobSet (pkg/controllers,
failure_policy.go). The webhook asks when a JobSet is created; the operator asks of the objects as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

Json = Mapping[str, Any]

#: Exit codes of a container that is ended by SIGTERM, and by SIGKILL.
_ENDED_BY_SIGNAL = (143, 137)
_DEFAULT_BACKOFF_LIMIT = 6
#: Actions that make one Job anew and leave the others alone (JobSet 0.11 and newer).
_ALONE = frozenset({"RestartJob", "RestartJobAndIgnoreMaxRestarts"})
IN_PLACE = "InPlaceRestart"


@dataclasses.dataclass(frozen=True, slots=True)
class JobFailure:
    """How a Job fails: the reason and the message of its condition Failed."""

    reason: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class FailureRule:
    """A rule of a JobSet's failure policy. An empty tuple matches everything."""

    name: str
    action: str
    reasons: tuple[str, ...]
    patterns: tuple[str, ...]
    targets: tuple[str, ...]

    def matches(self, replicated_job: str, failure: JobFailure) -> bool:
        """Returns whether the rule is for such a failure of a Job."""
        return (
            (not self.targets or replicated_job in self.targets)
            and (not self.reasons or failure.reason in self.reasons)
            and (not self.patterns or any(_found(pattern, failure.message) for pattern in self.patterns))
        )


def failures_at_disruption(job: Json, failed: int = 0) -> list[JobFailure | None]:
    """Returns how a Job may fail when one of its pods is disrupted, for each way in which its containers may end.

    Args:
        job: Spec of the Job.
        failed: How many of its pods have failed before.

    Returns:
        None stands for a Job that goes on: it makes another pod.
    """
    return [_failure(job, code, failed) for code in _ENDED_BY_SIGNAL]


def failure_rules(jobset: Json) -> tuple[FailureRule, ...]:
    """Returns the rules in the spec of a JobSet."""
    return tuple(
        FailureRule(
            str(rule.get("name") or ""),
            str(rule.get("action") or ""),
            tuple(map(str, rule.get("onJobFailureReasons") or ())),
            tuple(map(str, rule.get("onJobFailureMessagePatterns") or ())),
            tuple(map(str, rule.get("targetReplicatedJobs") or ())),
        )
        for rule in (jobset.get("failurePolicy") or {}).get("rules") or ()
    )


def restarts_in_place(jobset: Json) -> bool:
    """Returns whether a pod that is made anew restarts the others in place. ``jobset``: its spec."""
    return bool((jobset.get("failurePolicy") or {}).get("restartStrategy") == IN_PLACE)


def restarts_alone(rules: Iterable[FailureRule], replicated_job: str, failure: JobFailure) -> bool:
    """Returns whether such a failure of a Job leaves the other Jobs of the JobSet alone."""
    action = next((rule.action for rule in rules if rule.matches(replicated_job, failure)), "")
    return action in _ALONE


def _failure(job: Json, exit_code: int, failed: int) -> JobFailure | None:
    action = _action(job, exit_code)
    if action == "Ignore":
        return None
    if action == "FailJob":
        said = f"Container ended with exit code {exit_code} matching FailJob rule"
        if not _matching(job, exit_code).get("onExitCodes"):
            said = "Pod has condition DisruptionTarget matching FailJob rule"
        return JobFailure("PodFailurePolicy", said)
    of_index = job.get("backoffLimitPerIndex")
    if action == "FailIndex" or of_index == 0:
        most = job.get("maxFailedIndexes")
        if most == 0:
            return JobFailure(
                "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes"
            )
        if int(job.get("completions") or 1) == 1:
            return JobFailure("FailedIndexes", "Job has failed indexes")
    # Beside a limit for each index, none for all of them is the default.
    limit = job.get("backoffLimit")
    if limit is None:
        limit = _DEFAULT_BACKOFF_LIMIT if of_index is None else failed + 1
    return (
        JobFailure("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        if failed + 1 > limit
        else None
    )


def _action(job: Json, exit_code: int) -> str:
    return str(_matching(job, exit_code).get("action") or "Count")


def _matching(job: Json, exit_code: int) -> Json:
    """The first rule of the podFailurePolicy that matches a pod that is disrupted. Empty if there is none."""
    for rule in (job.get("podFailurePolicy") or {}).get("rules") or ():
        on_codes = rule.get("onExitCodes")
        if on_codes and (exit_code in (on_codes.get("values") or ())) is (on_codes.get("operator") == "In"):
            return dict(rule)
        for condition in rule.get("onPodConditions") or ():
            if condition.get("type") == "DisruptionTarget" and condition.get("status", "True") == "True":
                return dict(rule)
    return {}


def _found(pattern: str, message: str) -> bool:
    with contextlib.suppress(re.error):
        return re.search(pattern, message) is not None
    return False
