"""What the release contracts of JobSets and of Jobs share, the contract of a Job, and restarts in place. Pure.

``release_contract`` has the contract of a JobSet, calls this module and says why there is a contract.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

from gracepoint_operator import workloads
from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks.injection import check_template
from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob

#: Seconds between SIGTERM and SIGKILL if the pod template sets none. The 30 s of Kubernetes are too short.
DEFAULT_GRACE_PERIOD_S = 120
#: Number of other failures after which a workload is still restarted, if it sets no number. If a node dies without
#: notice, JAX may abort the processes on other nodes before they leave, and the job must not end because of that.
DEFAULT_MAX_RESTARTS = 3
#: The maximum in Kubernetes (k8s.io/kubernetes/pkg/apis/batch/validation, maxPodFailurePolicyRules).
MAX_POD_FAILURE_RULES = 20


def expect(spec: Json, key: str, value: object, path: str, reason: str, problems: Problems) -> None:
    """Sets a field that is missing. Adds a problem, with the reason, if the field has another value."""
    if spec.get(key) is None:
        spec[key] = value
    elif spec[key] != value:
        problems.add(f"{path}.{key}", found=spec[key], expected=f"{value}: {reason}", fix="Remove it")


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


def on_exit(member: TrainingJob, action: str, codes: Sequence[int]) -> Json:
    """Returns the rule of a podFailurePolicy for exit codes of the training container, which must be ascending."""
    return {
        "action": action,
        "onExitCodes": {"containerName": member.container["name"], "operator": "In", "values": list(codes)},
    }


def put_pod_rules(
    member: TrainingJob,
    own_rules: Sequence[Json],
    expected: Mapping[str, str],
    problems: Problems,
    *,
    last_rules: Sequence[Json] = (),
) -> None:
    """Puts the contract's rules before the user's in the podFailurePolicy of a Job.

    Args:
        member: The Job.
        own_rules: The contract's rules.
        expected: Why rules of the contract have their actions, by action. A user's rule about the same must have it.
        problems: Gets the user's rules that contradict the contract.
        last_rules: Rules of the contract that come after the user's.
    """
    pod_failure_policy = member.job.get("podFailurePolicy") or {}
    member.job["podFailurePolicy"] = pod_failure_policy
    rules: list[Json] = pod_failure_policy.get("rules") or []
    for i, rule in enumerate(rules):
        for own in own_rules:
            if rule.get("action") != own["action"] and _is_about_the_same(rule, own):
                problems.add(
                    f"{member.path}.podFailurePolicy.rules[{i}].action",
                    found=f"{rule.get('action')} for {_subject(rule)}",
                    expected=f"{own['action']}: {expected[own['action']]}",
                    fix="Remove the rule",
                )
    # The first rule that matches is applied, so ours come first. The user's rules apply to other failures.
    user_rules = [rule for rule in rules if rule not in own_rules and rule not in last_rules]
    pod_failure_policy["rules"] = [*own_rules, *user_rules, *last_rules]
    most = MAX_POD_FAILURE_RULES - len(own_rules) - len(last_rules)
    if len(user_rules) > most:
        problems.add(
            f"{member.path}.podFailurePolicy.rules",
            found=f"{len(user_rules)} rules",
            expected=f"at most {most} besides ours, as Kubernetes takes no more",
            fix="Remove some, or put their exit codes together",
        )


def _is_about_the_same(rule: Json, own: Json) -> bool:
    """Returns whether a user's rule names an exit code, or the condition, of a rule of ours.

    A NotIn rule names no code, so our rules may come before it.
    """
    if own_codes := own.get("onExitCodes"):
        on_codes: Json = rule.get("onExitCodes") or {}
        named = on_codes.get("operator") == "In" and set(on_codes.get("values") or []) & set(own_codes["values"])
        return bool(named) and on_codes.get("containerName") in (None, own_codes["containerName"])
    conditions: list[Json] = rule.get("onPodConditions") or []
    return any(c.get("type") == "DisruptionTarget" and c.get("status", "True") == "True" for c in conditions)


def _subject(rule: Json) -> str:
    return f"exit codes {rule['onExitCodes']['values']}" if rule.get("onExitCodes") else "DisruptionTarget"


NO_LIMIT = 2**31 - 1
#: A container of any name has ended with an error. A pod that never ran a container has none that did.
_PROGRAM_FAILED: Json = {"action": "FailIndex", "onExitCodes": {"operator": "NotIn", "values": [0]}}


def own_last_rules() -> list[Json]:
    """Returns the contract's rules that come after the user's in the podFailurePolicy of a Job: only programs count.

    A kubelet may refuse a pod that was scheduled to it: the device plugin is not there yet, another pod was quicker,
    the node has other labels by now. Such a pod is Failed without a container that ended, and no rule of a
    podFailurePolicy can match that. So the rule that comes last matches each container that failed, and fails its Job.
    What no rule matches is left to the limits of the Job, which are endless: it makes another pod, after 10 s, and
    after twice as long each time, up to 10 min (k8s.io/kubernetes/pkg/controller/job). The other processes wait at
    their start meanwhile.

    With limits for each index, the pauses of one index do not grow with the failures of others. And the rule has the
    action FailIndex, with no index allowed to fail, as FailJob would also match pods that end because their Job is
    suspended (``getFailJobMessage`` looks at each pod, ``calculateFailedIndexes`` at those that the Job still counts).
    """
    return [copy.deepcopy(_PROGRAM_FAILED)]


def counting_rules(job: Json) -> list[int]:
    """Returns the places of a user's rules by which a failure counts for its Job, which then makes another pod."""
    rules = (job.get("podFailurePolicy") or {}).get("rules") or []
    return [i for i, rule in enumerate(rules) if rule.get("action") == "Count"]


def replace_what_never_ran(job: Json) -> None:
    """Lets a Job make pods again that never ran a container, without an end. It fails if a program fails.

    If a rule of its user lets failures of programs count for the Job, the limits cannot distinguish these from such
    pods. Then the first of either fails the Job.
    """
    job["backoffLimit"] = NO_LIMIT
    job["backoffLimitPerIndex"] = 0 if counting_rules(job) else NO_LIMIT
    job["maxFailedIndexes"] = 0


#: The default of Kubernetes, and the one with backoffLimitPerIndex (k8s.io/kubernetes/pkg/apis/batch/v1, defaults).
_DEFAULT_BACKOFF_LIMIT = 6
#: Restart policies that are refused, and what messages call them. Kubernetes refuses a Job with the default, too.
_RESTARTS_IN_PLACE = {"OnFailure": "OnFailure", "Always": "Always (the default where it is not set)"}
#: Kueue reads it to admit a Job with fewer pods.
PARTIAL_ADMISSION = "kueue.x-k8s.io/job-min-parallelism"
_WITH_COMPLETIONS = "kueue.x-k8s.io/job-completions-equal-parallelism"


def apply_job_contract(workload: Json, member: TrainingJob, policy: CheckpointPolicySpec, problems: Problems) -> None:
    """Applies the contract to a Job without a JobSet, or adds to ``problems`` what contradicts it.

    When a process exits with one of the policy's exit codes, or its pod is disrupted, the Job ignores the failure and
    creates another pod for the index. All processes of the gang leave together, so all pods are replaced together.

    Other failures count for each index, also those of pods that never ran a container: the Job has no second limit to
    distinguish them from crashes. Kubernetes delays the replacement of a pod after every failure, also after ignored
    ones: by 10 s, and twice as long each time, up to 10 min (k8s.io/kubernetes/pkg/controller/job,
    backoff_utils). Without a limit for each index, the delay grows with the number of pods that failed, so that it
    would be minutes for a large gang at once. So the contract needs ``backoffLimitPerIndex``.

    The API server fills in the defaults of a Job before it calls webhooks. So a default looks like the same value in
    the manifest: the defaults of ``backoffLimit`` and ``podReplacementPolicy`` are replaced, and ``completionMode`` is
    refused with the default.

    Args:
        workload: The Job.
        member: The same, as a member of the gang.
        policy: Its policy.
        problems: Gets the conflicts.
    """
    job, pod = member.job, member.template["spec"]
    if (restart_policy := pod.get("restartPolicy")) in _RESTARTS_IN_PLACE:
        problems.add(
            "spec.template.spec.restartPolicy",
            found=_RESTARTS_IN_PLACE[restart_policy],
            expected="Never, as a container restarted in place stays on the node that is going away",
            fix="Write restartPolicy: Never",
        )
    else:
        expect(pod, "restartPolicy", "Never", "spec.template.spec", "the Job replaces pods", problems)
    if pod.get("terminationGracePeriodSeconds") is None:
        pod["terminationGracePeriodSeconds"] = DEFAULT_GRACE_PERIOD_S
    if job.get("completionMode") != "Indexed":
        problems.add(
            "spec.completionMode",
            found=f"{job.get('completionMode')} (the default where it is not set)",
            expected="Indexed: the index is the process's place in the gang",
            fix="Write completionMode: Indexed",
        )
    run_all_pods(member, problems)
    _replace_uncounted(member, policy, problems)
    check_template(member, policy.after_save.exit_codes, problems)
    _finds_process_0(member, problems)
    _partly_admitted((workload.get("metadata") or {}).get("annotations") or {}, policy.training.min_processes, problems)


def _partly_admitted(annotations: Json, least: int, problems: Problems) -> None:
    """Adds a problem if Kueue may admit the Job with a size with which it could not train."""
    if PARTIAL_ADMISSION not in annotations:
        return
    if not least:
        problems.add(
            f"metadata.annotations[{PARTIAL_ADMISSION}]",
            found="partial admission",
            expected="nothing: the number of processes is written into the pods when the Job is created",
            fix="Remove it, or allow other sizes by the policy's spec.training.minProcesses",
        )
        return
    min_parallelism = str(annotations[PARTIAL_ADMISSION])
    if not min_parallelism.isdecimal() or int(min_parallelism) < least:
        problems.add(
            f"metadata.annotations[{PARTIAL_ADMISSION}]",
            found=min_parallelism,
            expected=f"at least {least}, the policy's spec.training.minProcesses",
            fix="Write a number that is not smaller",
        )
    if annotations.get(_WITH_COMPLETIONS) != "true":
        problems.add(
            f"metadata.annotations[{_WITH_COMPLETIONS}]",
            found=annotations.get(_WITH_COMPLETIONS, "nothing"),
            expected="true: with fewer pods than completions, the Job would not be complete when they end",
            fix='Write "true"',
        )


def own_pod_rules(member: TrainingJob, policy: CheckpointPolicySpec) -> list[Json]:
    """Returns the contract's own rules in the podFailurePolicy of the Job."""
    return [
        on_exit(member, "Ignore", policy.after_save.exit_codes),
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        on_exit(member, "Ignore", [policy.not_joined_exit_code]),
    ]


def _replace_uncounted(member: TrainingJob, policy: CheckpointPolicySpec, problems: Problems) -> None:
    """Makes the Job replace pods that left. Other failures of an index end the Job after some attempts."""
    job = member.job
    if job.get("backoffLimitPerIndex") is None:
        job["backoffLimitPerIndex"] = DEFAULT_MAX_RESTARTS
        # A gang cannot train without one of its processes.
        job.setdefault("maxFailedIndexes", 0)
        if job.get("backoffLimit") in (None, _DEFAULT_BACKOFF_LIMIT):
            job["backoffLimit"] = NO_LIMIT
    if job.get("podReplacementPolicy") != "Failed":
        job["podReplacementPolicy"] = "Failed"  # Kubernetes allows no other with a podFailurePolicy
    expected = {"Ignore": "the Job replaces pods that leave, without counting"}
    put_pod_rules(member, own_pod_rules(member, policy), expected, problems)


def _finds_process_0(member: TrainingJob, problems: Problems) -> None:
    if member.processes > 1 and not member.template["spec"].get("subdomain"):
        problems.add(
            "spec.template.spec.subdomain",
            found="nothing",
            expected="the name of a headless Service for the Job's pods: process 0 is reached by its host name",
            fix="Create a Service with clusterIP: None and publishNotReadyAddresses: true, and write its name here",
        )


STRATEGY = workloads.IN_PLACE
#: Variables that JobSet's agent needs, and the one by which it starts the training itself.
_AGENT_NEEDS = {"JOBSET_NAME", "POD_NAME"}
_WORKER_COMMAND = "WORKER_COMMAND"
_ALL_CONTAINERS = "RestartAllContainers"
_RESTARTS = ("Restart", _ALL_CONTAINERS)


def restarts_in_place(jobset: Json) -> bool:
    """Returns whether the JobSet has the restart strategy InPlaceRestart."""
    return workloads.restarts_in_place(jobset.get("spec", {}))


def in_place_is_possible(member: TrainingJob) -> bool:
    """Returns whether the pods of a member have what a restart in place needs: JobSet's agent, and a rule."""
    containers = _containers(member)
    has_agent = any(_variables(container) >= _AGENT_NEEDS for container in containers)
    return has_agent and any(rule.get("action") in _RESTARTS for rule in _rules(containers))


def restarts_all_containers(member: TrainingJob) -> bool:
    """Returns whether a restart in place ends all containers of the pod, and not only the one that has failed."""
    return any(rule.get("action") == _ALL_CONTAINERS for rule in _rules(_containers(member)))


def agent_starts_training(member: TrainingJob) -> bool:
    """Returns whether JobSet's agent is the process of the training container, and the training its child."""
    return _variables(member.container) >= {*_AGENT_NEEDS, _WORKER_COMMAND}


def allow_restarts_in_place(member: TrainingJob, problems: Problems) -> None:
    """Fills in what JobSet requires for restarts in place (0.11, KEP-467), or adds to ``problems`` what contradicts it.

    With the restart strategy InPlaceRestart, a container that fails restarts in its pod, by a rule of the container.
    An agent of JobSet in each pod then restarts the other pods of the JobSet in the same way, and lets all of them
    begin together. Jobs do not fail by that, so JobSet requires the highest backoff limit.

    That is for crashes. After a save the gang still leaves its nodes: an exit with one of the policy's codes, or a
    disruption, fails the Job, and JobSet makes new pods as with the strategy Recreate.
    """
    job = member.job
    if job.get("backoffLimit") is None:
        job["backoffLimit"] = NO_LIMIT
    elif job["backoffLimit"] != NO_LIMIT:
        problems.add(
            f"{member.path}.backoffLimit",
            found=job["backoffLimit"],
            expected=f"{NO_LIMIT}, which JobSet requires with the restart strategy {STRATEGY}",
            fix="Remove it",
        )
    # JobSet requires these to be written, even if they are the default.
    if job.get("podReplacementPolicy") is None:
        job["podReplacementPolicy"] = "Failed"
    if job.get("parallelism") is None and job.get("completions") is None:
        job["parallelism"] = job["completions"] = 1


def _containers(member: TrainingJob) -> list[Json]:
    pod = member.template["spec"]
    return [*(pod.get("initContainers") or []), *(pod.get("containers") or [])]


def _rules(containers: list[Json]) -> list[Json]:
    return [rule for container in containers for rule in container.get("restartPolicyRules") or []]


def _variables(container: Json) -> set[str]:
    return {variable.get("name", "") for variable in container.get("env") or []}
