"""What the release contracts of JobSets and of Jobs have in common. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob

#: Seconds between SIGTERM and SIGKILL if the pod template sets none. The 30 s of Kubernetes are too short.
DEFAULT_GRACE_PERIOD_S = 120
#: Number of other failures after which a workload is still restarted, if it sets no number. If a node dies without
#: notice, the processes on other nodes abort before the cause is known, and the job must not end because of that.
DEFAULT_MAX_RESTARTS = 3
#: The maximum in Kubernetes (k8s.io/kubernetes/pkg/apis/batch/validation, maxPodFailurePolicyRules).
MAX_POD_FAILURE_RULES = 20


def exit_codes(policy: CheckpointPolicySpec) -> list[int]:
    """Returns the exit codes of the training container after a save."""
    # Kubernetes requires them in ascending order.
    return sorted((policy.after_save.saved_exit_code, policy.after_save.unsaved_exit_code))


def expect(spec: Json, key: str, value: object, path: str, why: str, problems: Problems) -> None:
    """Sets a field that is missing. Adds a problem if the field has another value."""
    if spec.get(key) is None:
        spec[key] = value
    elif spec[key] != value:
        problems.add(f"{path}.{key}", found=spec[key], expected=f"{value}: {why}", fix="Remove it")


def run_all_pods(member: TrainingJob, problems: Problems) -> None:
    """Makes a Job run all its pods at once."""
    job = member.job
    if job.get("parallelism") is not None:
        job["completions"] = job["parallelism"] if job.get("completions") is None else job["completions"]
    if job.get("completions", 1) != job.get("parallelism", 1):
        problems.add(
            f"{member.path}.parallelism",
            found=job.get("parallelism", "nothing, which means 1"),
            expected=f"{job['completions']}, as completions says: all pods of a gang run at once",
            fix="Set parallelism to the value of completions",
        )


def enough_processes(members: Sequence[TrainingJob], policy: CheckpointPolicySpec, problems: Problems) -> None:
    """Adds a problem if the gang is smaller than the policy allows."""
    count, least = sum(member.processes for member in members), policy.training.min_processes
    if members and count < least:
        problems.add(
            f"{members[0].path}.parallelism",
            found=f"{count} processes in all",
            expected=f"at least {least}, the policy's spec.training.minProcesses",
            fix="Start more processes, or lower that number",
        )


def put_pod_rules(
    member: TrainingJob, ours: Sequence[Json], codes: Collection[int], expected: str, problems: Problems
) -> None:
    """Puts the contract's rules before the user's in the podFailurePolicy of a Job.

    Args:
        member: The Job.
        ours: The contract's rules. All have the same action.
        codes: Exit codes of the training container after a save.
        expected: The action that a user's rule about these codes must have, and why.
        problems: Gets the user's rules that contradict the contract.
    """
    pod_failure_policy = member.job.get("podFailurePolicy") or {}
    member.job["podFailurePolicy"] = pod_failure_policy
    rules: list[Json] = pod_failure_policy.get("rules") or []
    action = ours[0]["action"]
    for i, rule in enumerate(rules):
        if rule.get("action") != action and _is_about_leaving(rule, codes, member.container["name"]):
            problems.add(
                f"{member.path}.podFailurePolicy.rules[{i}].action",
                found=f"{rule.get('action')} for {_subject(rule)}",
                expected=expected,
                fix="Remove the rule",
            )
    # The first rule that matches is applied, so ours come first. The user's rules apply to other failures.
    theirs = [rule for rule in rules if rule not in ours]
    pod_failure_policy["rules"] = [*ours, *theirs]
    if len(theirs) > MAX_POD_FAILURE_RULES - len(ours):
        problems.add(
            f"{member.path}.podFailurePolicy.rules",
            found=f"{len(theirs)} rules",
            expected=f"at most {MAX_POD_FAILURE_RULES - len(ours)} beside ours, as Kubernetes takes no more",
            fix="Remove some, or put their exit codes together",
        )


def _is_about_leaving(rule: Json, codes: Collection[int], container: str) -> bool:
    """Returns whether a user's rule names the same exit codes or condition as our rules.

    A NotIn rule names no code, so our rules may come before it.
    """
    on_codes: Json = rule.get("onExitCodes") or {}
    named = on_codes.get("operator") == "In" and set(on_codes.get("values") or []) & set(codes)
    if named and on_codes.get("containerName") in (None, container):
        return True
    conditions: list[Json] = rule.get("onPodConditions") or []
    return any(c.get("type") == "DisruptionTarget" and c.get("status", "True") == "True" for c in conditions)


def _subject(rule: Json) -> str:
    return f"exit codes {rule['onExitCodes']['values']}" if rule.get("onExitCodes") else "DisruptionTarget"
