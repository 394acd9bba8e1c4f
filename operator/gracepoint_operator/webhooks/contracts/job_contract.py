"""The release contract of a Job by itself: its pods leave after the save, and it replaces them without counting. Pure.

When a process exits with one of the policy's exit codes, or its pod is disrupted, the Job ignores the failure and
creates another pod for the index. All processes of the gang leave together, so all pods are replaced together.

Other failures count for each index. Kubernetes delays the replacement of a pod after every failure, also after ignored
ones: by 10 s, and twice as long each time, up to 10 min (k8s.io/kubernetes/pkg/controller/job, backoff_utils). Without
a limit for each index, the delay grows with the number of pods that failed, so that it would be minutes for a large
gang at once. So the contract needs ``backoffLimitPerIndex``.

The API server fills in the defaults of a Job before it calls webhooks. So a default cannot be told from the same value
in the manifest: the defaults of ``backoffLimit`` and ``podReplacementPolicy`` are replaced, and ``completionMode`` is
refused with the default.
"""

from __future__ import annotations

from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks.contracts.contract_parts import (
    DEFAULT_GRACE_PERIOD_S,
    DEFAULT_MAX_RESTARTS,
    exit_codes,
    expect,
    put_pod_rules,
    run_all_pods,
)
from gracepoint_operator.webhooks.pod_template import check_template
from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob

#: The default of Kubernetes, and the one beside backoffLimitPerIndex (k8s.io/kubernetes/pkg/apis/batch/v1, defaults).
_DEFAULT_BACKOFF_LIMIT = 6
_NO_BACKOFF_LIMIT = 2**31 - 1
#: Restart policies that are refused, and what messages call them. Kubernetes refuses a Job with the default, too.
_RESTARTS_IN_PLACE = {"OnFailure": "OnFailure", "Always": "Always (the default where it is not set)"}
#: Kueue reads it to admit a Job with fewer pods.
PARTIAL_ADMISSION = "kueue.x-k8s.io/job-min-parallelism"
_WITH_COMPLETIONS = "kueue.x-k8s.io/job-completions-equal-parallelism"


def apply_job_contract(workload: Json, member: TrainingJob, policy: CheckpointPolicySpec, problems: Problems) -> None:
    """Applies the contract to a Job, or adds to ``problems`` what contradicts it.

    Args:
        workload: The Job.
        member: The same, as a member of the gang.
        policy: Its policy.
        problems: Gets the conflicts.
    """
    job, pod = member.job, member.template["spec"]
    if (found := pod.get("restartPolicy")) in _RESTARTS_IN_PLACE:
        problems.add(
            "spec.template.spec.restartPolicy",
            found=_RESTARTS_IN_PLACE[found],
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
    check_template(member, exit_codes(policy), problems)
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
    wanted = str(annotations[PARTIAL_ADMISSION])
    if not wanted.isdecimal() or int(wanted) < least:
        problems.add(
            f"metadata.annotations[{PARTIAL_ADMISSION}]",
            found=wanted,
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
    on_codes = {"containerName": member.container["name"], "operator": "In", "values": exit_codes(policy)}
    return [
        {"action": "Ignore", "onExitCodes": on_codes},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _replace_uncounted(member: TrainingJob, policy: CheckpointPolicySpec, problems: Problems) -> None:
    """Makes the Job replace pods that left. Other failures of an index end the Job after some attempts."""
    job = member.job
    if job.get("backoffLimitPerIndex") is None:
        job["backoffLimitPerIndex"] = DEFAULT_MAX_RESTARTS
        # A gang cannot train without one of its processes.
        job.setdefault("maxFailedIndexes", 0)
        if job.get("backoffLimit") in (None, _DEFAULT_BACKOFF_LIMIT):
            job["backoffLimit"] = _NO_BACKOFF_LIMIT
    if job.get("podReplacementPolicy") != "Failed":
        job["podReplacementPolicy"] = "Failed"  # Kubernetes allows no other beside a podFailurePolicy
    expected = "Ignore: the Job replaces pods that leave, without counting"
    put_pod_rules(member, own_pod_rules(member, policy), exit_codes(policy), expected, problems)


def _finds_process_0(member: TrainingJob, problems: Problems) -> None:
    if member.processes > 1 and not member.template["spec"].get("subdomain"):
        problems.add(
            "spec.template.spec.subdomain",
            found="nothing",
            expected="the name of a headless Service for the Job's pods: process 0 is reached by its host name",
            fix="Create a Service with clusterIP: None and publishNotReadyAddresses: true, and write its name here",
        )
