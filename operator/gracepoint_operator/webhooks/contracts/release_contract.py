"""The release contract: a JobSet that leaves after its save must restart on other nodes, without counting it. Pure.

The defaults of Kubernetes and JobSet break such a job. With the restart policy OnFailure, the container restarts in
place on the node that is going away. A Job with a backoff limit replaces a single pod, which cannot join the running
gang. A JobSet without a failure policy becomes Failed for good at the first non-zero exit.

So the contract is applied at CREATE, because the template is immutable later. When a process exits with one of the
policy's exit codes, or its pod is disrupted, its Job fails at once and as a whole, with reason PodFailurePolicy. A rule
of the JobSet restarts the JobSet for exactly this reason without counting the restart. Other failures are handled as
the user has configured.

Missing fields are injected. Fields that contradict the contract are refused. One problem decides the name of the
webhook configuration in the chart: JobSet's own webhook sets ``restartPolicy: OnFailure`` if the field is missing, and
then a missing field cannot be told from OnFailure. The API server calls webhook configurations in the order of their
names, so ours must come first. If it comes later, the JobSet is refused with a message that says to write
``restartPolicy: Never``.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks.contracts.contract_parts import (
    DEFAULT_GRACE_PERIOD_S,
    DEFAULT_MAX_RESTARTS,
    enough_processes,
    exit_codes,
    expect,
    put_pod_rules,
    run_all_pods,
)
from gracepoint_operator.webhooks.contracts.in_place_restart import (
    STRATEGY,
    allow_restarts_in_place,
    in_place_is_possible,
    restarts_in_place,
)
from gracepoint_operator.webhooks.contracts.job_contract import apply_job_contract
from gracepoint_operator.webhooks.pod_template import check_template
from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob, gang, is_job

#: Name of our rule in the JobSet's failure policy. The name is reserved.
RULE_NAME = "gracepoint_preemption"
RULE_ACTION = "RestartJobSetAndIgnoreMaxRestarts"
RULE_REASON = "PodFailurePolicy"
RULES = "spec.failurePolicy.rules"


@dataclasses.dataclass(frozen=True)
class Patched:
    """The object with the contract applied. Equal to the given object if nothing was missing."""

    object: Json


@dataclasses.dataclass(frozen=True)
class ContractViolation:
    """The object contradicts the contract."""

    problems: tuple[str, ...]

    @property
    def message(self) -> str:
        return "; ".join(self.problems)


def release_contract(workload: Json, policy: CheckpointPolicySpec) -> Patched | ContractViolation:
    """Applies the contract to a copy of ``workload``, or returns what contradicts it. See ``job_contract`` for Jobs."""
    made = copy.deepcopy(workload)
    problems = Problems()
    members = gang(made, policy.training, problems)
    enough_processes(members, policy, problems)
    if is_job(made):
        for member in members:
            apply_job_contract(made, member, policy, problems)
        return ContractViolation(tuple(problems)) if problems else Patched(made)
    in_place = restarts_in_place(made) and all(map(in_place_is_possible, members))
    for member in members:
        if in_place:
            allow_restarts_in_place(member, problems)
        else:
            backoff = "a replaced pod cannot join the running gang"
            expect(member.job, "backoffLimit", 0, member.path, backoff, problems)
        _fail_as_a_whole(member, policy, problems)
        check_template(member, exit_codes(policy), problems)
        _run_at_once(member, members, problems)
    _hostnames(made, problems)
    if not in_place:
        _restarts_elsewhere(made, problems)
    if problems:
        return ContractViolation(tuple(problems))
    _restart_uncounted(made["spec"], members, policy)
    return Patched(made)


def _fail_as_a_whole(member: TrainingJob, policy: CheckpointPolicySpec, problems: Problems) -> None:
    """Makes a Job fail at once when one of its pods leaves. The Job does not replace pods by itself."""
    job, pod, path = member.job, member.template["spec"], member.path
    if pod.get("restartPolicy") == "OnFailure":
        problems.add(
            f"{path}.template.spec.restartPolicy",
            found="OnFailure (JobSet's own default where it is not set)",
            expected="Never, as a container restarted in place stays on the node that is going away",
            fix="Write restartPolicy: Never",
        )
    else:
        expect(pod, "restartPolicy", "Never", f"{path}.template.spec", "the JobSet restarts pods", problems)
    if pod.get("terminationGracePeriodSeconds") is None:
        pod["terminationGracePeriodSeconds"] = DEFAULT_GRACE_PERIOD_S
    expect(job, "completionMode", "Indexed", path, "the index is the process's place in the gang", problems)
    run_all_pods(member, problems)
    if job.get("backoffLimitPerIndex") is not None:
        problems.add(
            f"{path}.backoffLimitPerIndex",
            found=job["backoffLimitPerIndex"],
            expected="nothing: a replaced pod cannot join the running gang",
            fix="Remove it; the JobSet's failurePolicy.maxRestarts limits restarts",
        )
    if job.get("podReplacementPolicy") == "TerminatingOrFailed":
        problems.add(
            f"{path}.podReplacementPolicy",
            found="TerminatingOrFailed",
            expected="Failed: Kubernetes allows no other beside a podFailurePolicy",
            fix="Remove it",
        )
    put_pod_rules(
        member,
        own_pod_rules(member, policy),
        exit_codes(policy),
        "FailJob: if one pod leaves, the gang leaves as a whole and the JobSet restarts it",
        problems,
    )


def own_pod_rules(member: TrainingJob, policy: CheckpointPolicySpec) -> list[Json]:
    """Returns the contract's own rules in the podFailurePolicy of a Job of the gang."""
    on_codes = {"containerName": member.container["name"], "operator": "In", "values": exit_codes(policy)}
    return [
        {"action": "FailJob", "onExitCodes": on_codes},
        {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]


def _restart_uncounted(spec: Json, members: list[TrainingJob], policy: CheckpointPolicySpec) -> None:
    """Puts our rule before the user's rules, because the first rule that matches is executed."""
    codes = "|".join(map(str, exit_codes(policy)))
    rule: dict[str, Any] = {
        "name": RULE_NAME,
        "action": RULE_ACTION,
        "onJobFailureReasons": [RULE_REASON],
        # With the reason alone, a failure by a user's own FailJob rule for a real error would also restart, for ever.
        "onJobFailureMessagePatterns": [
            f"exit code ({codes}) matching FailJob rule",
            "condition DisruptionTarget matching FailJob rule",
        ],
        "targetReplicatedJobs": [member.name for member in members],
    }
    failure_policy = spec.setdefault("failurePolicy", {"maxRestarts": DEFAULT_MAX_RESTARTS})
    theirs = [other for other in failure_policy.get("rules") or [] if other.get("name") != RULE_NAME]
    failure_policy["rules"] = [rule, *theirs]


def _run_at_once(member: TrainingJob, members: list[TrainingJob], problems: Problems) -> None:
    """Adds a problem if a process of the gang would wait for the end of another one."""
    gang_names = {other.name for other in members}
    for i, item in enumerate(member.depends_on):
        if item.get("status") == "Complete" and item.get("name") in gang_names:
            problems.add(
                f"{member.path.removesuffix('.template.spec')}.dependsOn[{i}].status",
                found=f"Complete, of {item['name']}, which is of the same gang",
                expected="Ready: all processes of a gang run at once",
                fix="Set it to Ready, or name the replicatedJobs that train in the policy's "
                "spec.training.replicatedJobs",
            )


def _restarts_elsewhere(jobset: Json, problems: Problems) -> None:
    strategy = (jobset.get("spec", {}).get("failurePolicy") or {}).get("restartStrategy")
    if strategy not in (None, "Recreate", "BlockingRecreate"):
        problems.add(
            "spec.failurePolicy.restartStrategy",
            found=strategy,
            expected=f"Recreate or BlockingRecreate, or with {STRATEGY} in each pod of the gang JobSet's agent (a "
            "container with the variables JOBSET_NAME and POD_NAME) and a container with restartPolicyRules",
            fix="Remove it, or add these",
        )


def _hostnames(jobset: Json, problems: Problems) -> None:
    network: Json = jobset.get("spec", {}).get("network") or {}
    if network.get("enableDNSHostnames") is False:
        problems.add(
            "spec.network.enableDNSHostnames",
            found="false",
            expected="true: process 0 is reached by its host name",
            fix="Remove it",
        )
