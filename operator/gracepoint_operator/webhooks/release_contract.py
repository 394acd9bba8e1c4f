"""The release contract: a JobSet that leaves after its save must restart on other nodes, without counting it. Pure.

The defaults of Kubernetes and JobSet break such a job. With the restart policy OnFailure, the container restarts in
place on the node that is going away. A Job with a backoff limit replaces a single pod, which cannot join the running
gang. A JobSet without a failure policy becomes Failed for good at the first non-zero exit.

So the contract is applied at CREATE, because the template is immutable later. When a process exits with one of the
policy's exit codes, or its pod is disrupted, its Job fails at once and as a whole, with reason PodFailurePolicy. A rule
of the JobSet restarts the JobSet for exactly this reason without counting the restart. Other failures are handled as
the user has configured.

Only exits of programs count. A pod that never ran a container is made again by its Job, and so is one whose process did
not get into the gang (``contracts``). A failed program fails its Job at once, with reason MaxFailedIndexesExceeded, and
the JobSet does what its user's rules say for BackoffLimitExceeded, which the reason would otherwise be.

A Job that does not train may end the gang, too: with a backoff limit of 0, one eviction of its pod fails it,
and the JobSet restarts as a whole. Such a Job gets the rule for disruptions, too, so that this restart does not count.

Missing fields are injected. Fields that contradict the contract are refused. One problem decides the name of the
webhook configuration in the chart: JobSet's own webhook sets ``restartPolicy: OnFailure`` if the field is missing, and
then a missing field looks like OnFailure. The API server calls webhook configurations in the order of their
names, so ours must come first. If it comes later, the JobSet is refused with a message that says to write
``restartPolicy: Never``.

``creation_warnings`` warns users who create a JobSet of what is allowed, and will cost a save.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any

from gracepoint.wire.names import LABEL_ROLE, ROLE_HELPER, Env
from gracepoint_operator.resources import CheckpointPolicy, CheckpointPolicySpec, WorkloadForecast
from gracepoint_operator.webhooks.contracts import (
    DEFAULT_GRACE_PERIOD_S,
    DEFAULT_MAX_RESTARTS,
    MAX_POD_FAILURE_RULES,
    NO_LIMIT,
    STRATEGY,
    agent_starts_training,
    allow_restarts_in_place,
    apply_job_contract,
    counting_rules,
    enough_processes,
    expect,
    in_place_is_possible,
    on_exit,
    own_last_rules,
    put_pod_rules,
    replace_what_never_ran,
    restarts_all_containers,
    restarts_in_place,
    run_all_pods,
)
from gracepoint_operator.webhooks.injection import KEEPER, check_template
from gracepoint_operator.webhooks.training_jobs import HelperJob, Json, Problems, TrainingJob, gang, helpers, is_job
from gracepoint_operator.workloads import (
    FailureRule,
    JobFailure,
    action_at,
    failure_rules,
    failures_at_disruption,
    restarts_alone,
)

#: Names of our rules in the JobSet's failure policy: for Jobs that train, and for others. The names are reserved.
RULE_NAME = "gracepoint_preemption"
HELPER_RULE_NAME = "gracepoint_helper_preemption"
#: Those of rules for failed programs begin so. The action follows.
_PROGRAM_RULE_NAME = "gracepoint_program_"
RULE_ACTION = "RestartJobSetAndIgnoreMaxRestarts"
RULE_REASON = "PodFailurePolicy"
RULES = "spec.failurePolicy.rules"
_DISRUPTED_SAYS = "condition DisruptionTarget matching FailJob rule"
_DISRUPTED: Json = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
#: How the Job of a failed program fails without the contract's rule for it, and with it.
_USUALLY = JobFailure("BackoffLimitExceeded", "Job has reached the specified backoff limit")
_BY_INDEX = JobFailure("MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes")


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
    """Applies the contract to a copy of ``workload``, or returns what contradicts it."""
    patched = copy.deepcopy(workload)
    problems = Problems()
    members = gang(patched, policy.training, problems)
    enough_processes(members, policy, problems)
    if is_job(patched):
        for member in members:
            apply_job_contract(patched, member, policy, problems)
        return ContractViolation(tuple(problems)) if problems else Patched(patched)
    in_place = restarts_in_place(patched) and all(map(in_place_is_possible, members))
    for member in members:
        _fail_as_a_whole(member, policy, in_place, problems)
        check_template(member, policy.after_save.exit_codes, problems)
        _run_at_once(member, members, problems)
    _hostnames(patched, problems)
    if not in_place:
        _restarts_elsewhere(patched, problems)
    if problems:
        return ContractViolation(tuple(problems))
    spec = patched["spec"]
    user_rules = [rule for rule in failure_rules(spec) if not _is_reserved(rule.name)]
    helper_jobs = [] if in_place else helpers(patched, policy.training)
    uncounted = [helper.name for helper in helper_jobs if _leaves_with_the_gang(helper, user_rules)]
    failing = [] if in_place else [*(member.name for member in members), *uncounted]
    own_rules = [
        *_uncounted_rules(members, uncounted, policy.after_save.exit_codes),
        *_rules_for_programs(workload, user_rules, failing),
    ]
    failure_policy = spec.setdefault("failurePolicy", {"maxRestarts": DEFAULT_MAX_RESTARTS})
    # The first rule that matches is executed, so ours come first.
    kept = [rule for rule in failure_policy.get("rules") or [] if not _is_reserved(str(rule.get("name")))]
    failure_policy["rules"] = [*own_rules, *kept]
    return Patched(patched)


def _is_reserved(rule: str) -> bool:
    return rule in (RULE_NAME, HELPER_RULE_NAME) or rule.startswith(_PROGRAM_RULE_NAME)


def _fail_as_a_whole(member: TrainingJob, policy: CheckpointPolicySpec, in_place: bool, problems: Problems) -> None:
    """Makes a Job fail at once when one of its pods leaves, or its program fails."""
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
    if in_place:
        allow_restarts_in_place(member, problems)
    limits = ["backoffLimitPerIndex"] if in_place else ["backoffLimit", "backoffLimitPerIndex"]
    for name in limits:
        # 0 is the user's value for the same; the other is ours, in a JobSet that was exported.
        if job.get(name) not in ((None,) if in_place else (None, 0, NO_LIMIT)):
            problems.add(
                f"{path}.{name}",
                found=job[name],
                expected="nothing: a replaced pod cannot join the running gang",
                fix="Remove it; the JobSet's failurePolicy.maxRestarts limits restarts",
            )
    if job.get("podReplacementPolicy") == "TerminatingOrFailed":
        problems.add(
            f"{path}.podReplacementPolicy",
            found="TerminatingOrFailed",
            expected="Failed: Kubernetes allows no other with a podFailurePolicy",
            fix="Remove it",
        )
    expected = {
        "FailJob": "if one pod leaves, the gang leaves as a whole and the JobSet restarts it",
        "Ignore": "a process that did not get into the gang is created again, and the others wait for it",
    }
    own_rules = own_pod_rules(member, policy, in_place)
    put_pod_rules(member, own_rules, expected, problems, last_rules=[] if in_place else own_last_rules())
    if not in_place:
        replace_what_never_ran(job)


def own_pod_rules(member: TrainingJob, policy: CheckpointPolicySpec, in_place: bool) -> list[Json]:
    """Returns the contract's rules that come first in the podFailurePolicy of a Job of the gang."""
    leaving = [on_exit(member, "FailJob", policy.after_save.exit_codes), copy.deepcopy(_DISRUPTED)]
    # In place, a process that did not get in starts again as any other, which counts: if another one crashes at every
    # start, the loop would have no end.
    return leaving if in_place else [*leaving, on_exit(member, "Ignore", [policy.not_joined_exit_code])]


def uncounted_helpers(jobset: Json) -> list[str]:
    """Returns the names of the Jobs that do not train and have the contract's rule: their disruptions do not count."""
    rules = (jobset["spec"].get("failurePolicy") or {}).get("rules") or []
    return next((rule["targetReplicatedJobs"] for rule in rules if rule.get("name") == HELPER_RULE_NAME), [])


def is_own_rule(rule: Json) -> bool:
    """Returns whether it is the contract's rule in the podFailurePolicy of a Job that does not train."""
    return rule == _DISRUPTED


def ends_gang(helper: HelperJob, jobset: Json) -> bool:
    """Returns whether the first disruption of one of its pods restarts or ends the JobSet as a whole."""
    return _ends_gang(helper, failure_rules(jobset["spec"]))


def _ends_gang(helper: HelperJob, rules: Sequence[FailureRule]) -> bool:
    failures = failures_at_disruption(helper.job)
    return all(item is not None and not restarts_alone(rules, helper.name, item) for item in failures)


def _leaves_with_the_gang(helper: HelperJob, rules: Sequence[FailureRule]) -> bool:
    """Makes a Job that does not train, but whose end restarts the JobSet, fail in a way that the JobSet recognises.

    Returns False if its end restarts nothing else, or looks like other failures: Kubernetes has no
    podFailurePolicy for pods whose containers restart in place.
    """
    if not _ends_gang(helper, rules):
        return False
    job, pod = helper.job, helper.template.setdefault("spec", {})
    if pod.get("restartPolicy") is None:
        pod["restartPolicy"] = "Never"  # any failure already ends the Job
    if pod["restartPolicy"] != "Never" or job.get("podReplacementPolicy") == "TerminatingOrFailed":
        return False
    present: list[Json] = (job.get("podFailurePolicy") or {}).get("rules") or []
    last_rules = own_last_rules() if _counts_at_once(job) else []
    first_rules = [] if _DISRUPTED in present else [copy.deepcopy(_DISRUPTED)]
    job_rules = [*first_rules, *(rule for rule in present if rule not in last_rules), *last_rules]
    if len(job_rules) > MAX_POD_FAILURE_RULES:
        return False
    job["podFailurePolicy"] = {"rules": job_rules}
    if last_rules:
        replace_what_never_ran(job)
    return True


def _counts_at_once(job: Json) -> bool:
    """Returns whether any failure ends a Job that does not train, and failures of programs are distinct from others."""
    limits = (job.get("backoffLimit"), job.get("backoffLimitPerIndex"), job.get("maxFailedIndexes"))
    indexed = job.get("completionMode") in (None, "Indexed")  # JobSet's default
    return indexed and not counting_rules(job) and limits in ((0, None, None), (NO_LIMIT, NO_LIMIT, 0))


def _rules_for_programs(jobset: Json, user_rules: Sequence[FailureRule], jobs: Iterable[str]) -> list[Json]:
    """Returns rules that do for failed programs what the user's rules did before the contract changed the reason.

    Args:
        jobset: The JobSet as its user wrote it.
        user_rules: The user's rules in it.
        jobs: Names of the replicatedJobs whose failed programs have the contract's reason.
    """
    targets: dict[str, list[str]] = {}
    for name in jobs:
        usual_action = action_at(user_rules, name, _failure_of_a_program(jobset, name))
        if usual_action != action_at(user_rules, name, _BY_INDEX):
            targets.setdefault(usual_action, []).append(name)
    return [
        {
            "name": f"{_PROGRAM_RULE_NAME}{action}",
            "action": action,
            "onJobFailureReasons": [_BY_INDEX.reason],
            "targetReplicatedJobs": names,
        }
        for action, names in targets.items()
    ]


def _failure_of_a_program(jobset: Json, name: str) -> JobFailure:
    """Returns how a Job would fail without the contract when its program fails."""
    replicated = next(item for item in jobset["spec"]["replicatedJobs"] if item.get("name") == name)
    job: Json = (replicated.get("template") or {}).get("spec") or {}
    rules = (job.get("podFailurePolicy") or {}).get("rules") or []
    if not any(rule in rules for rule in own_last_rules()):
        return _BY_INDEX if (job.get("backoffLimitPerIndex"), job.get("maxFailedIndexes")) == (0, 0) else _USUALLY
    # It was exported with the contract, which has added a rule where one was needed.
    present = failure_rules(jobset["spec"])
    has_ours = any(rule.name.startswith(_PROGRAM_RULE_NAME) and name in rule.targets for rule in present)
    return _USUALLY if has_ours else _BY_INDEX


def _uncounted_rules(members: list[TrainingJob], helping: list[str], leaving: Sequence[int]) -> list[Json]:
    """Returns the rules that restart the JobSet without counting."""
    codes = "|".join(map(str, leaving))
    rule: dict[str, Any] = {
        "name": RULE_NAME,
        "action": RULE_ACTION,
        "onJobFailureReasons": [RULE_REASON],
        # With the reason alone, a failure by a user's own FailJob rule for a real error would also restart, for ever.
        "onJobFailureMessagePatterns": [
            f"exit code ({codes}) matching FailJob rule",
            _DISRUPTED_SAYS,
        ],
        "targetReplicatedJobs": [member.name for member in members],
    }
    own_rules = [rule]
    if helping:
        own_rules.append(
            {
                "name": HELPER_RULE_NAME,
                "action": RULE_ACTION,
                "onJobFailureReasons": [RULE_REASON],
                "onJobFailureMessagePatterns": [_DISRUPTED_SAYS],
                "targetReplicatedJobs": helping,
            }
        )
    return own_rules


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


#: The values of managedBy that mean the usual controller.
_CONTROLLERS = {"JobSet": "jobset.sigs.k8s.io/jobset-controller", "Job": "kubernetes.io/job-controller"}
#: Actions by which the gang ends or starts again as a whole. JobSet 0.11 and newer have others.
_WHOLE_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")


def creation_warnings(workload: Json, policy: CheckpointPolicy) -> list[str]:
    """Returns the warnings about a JobSet or a Job.

    Args:
        workload: The object as it will be stored.
        policy: Its policy.
    """
    members = gang(copy.deepcopy(workload), policy.spec.training, Problems())
    name = str((workload.get("metadata") or {}).get("name") or "")
    kind = "Job" if is_job(workload) else "JobSet"
    return [
        *_run_elsewhere(workload, kind),
        *_taken_for_processes(workload, members, policy),
        *_counted(workload, policy),
        *_counted_without_a_run(workload, members),
        *([] if policy.spec.sidecars.end_with_training else _kept_by_sidecars(members)),
        *_restarted_alone(workload, members),
        *_killed_at_once(members),
        *_keeper_killed(members),
        *_lost_checkpoints(members),
        *_short_bounds(members, kind, name, policy),
    ]


def _run_elsewhere(workload: Json, kind: str) -> list[str]:
    """Warns of a workload that another controller runs, usually in another cluster (Kueue's MultiKueue)."""
    manager = (workload.get("spec") or {}).get("managedBy")
    if manager in (None, _CONTROLLERS[kind]):
        return []
    return [
        f"spec.managedBy: found {manager}, which is not {kind}'s own controller. If it runs the pods in another "
        "cluster, Gracepoint and the policy must be there too; here nothing is saved or recorded"
    ]


def _taken_for_processes(workload: Json, members: list[TrainingJob], policy: CheckpointPolicy) -> list[str]:
    """Warns if nobody has said which of several replicatedJobs train: the gang waits for every process."""
    helper_names = [helper.name for helper in helpers(workload, policy.spec.training)]
    if policy.spec.training.replicated_jobs or len(members) + len(helper_names) < 2:
        return []
    where, label = "the policy's spec.training.replicatedJobs", f"the label {LABEL_ROLE}: {ROLE_HELPER}"
    names = ", ".join(member.name for member in members)
    if len(members) == 1:
        return [
            f"spec.replicatedJobs: {where} names none, so that {names} is taken for what trains, and "
            f"{', '.join(helper_names)} for helpers. If that is wrong, name those that train"
        ]
    processes = sum(member.processes for member in members)
    return [
        f"spec.replicatedJobs: {where} names none, so that all {processes} pods of {names} are taken for processes: "
        "the job waits until each of them has called gracepoint.attach(). If some do not train, name those that do, or "
        f"write {label} into the pod templates of the others"
    ]


def _counted(workload: Json, policy: CheckpointPolicy) -> list[str]:
    """Warns of Jobs that do not train and whose end restarts the JobSet in a way that counts."""
    if is_job(workload) or restarts_in_place(workload):
        return []
    uncounted = uncounted_helpers(workload)
    return [
        f"{helper.path}: found restartPolicy {(helper.template.get('spec') or {}).get('restartPolicy')} and "
        f"backoffLimit {helper.job.get('backoffLimit')}: if a pod of it is deleted, the JobSet restarts as a whole. "
        "The gang saves before that, but if the pod ends first, the restart counts towards maxRestarts. Write "
        "restartPolicy: Never, or allow the Job to replace its pod by a backoffLimit"
        for helper in helpers(workload, policy.spec.training)
        if helper.name not in uncounted and ends_gang(helper, workload)
    ]


def _counted_without_a_run(workload: Json, members: list[TrainingJob]) -> list[str]:
    """Warns of rules because of which pods that never ran a container count like failures of the program."""
    if is_job(workload):
        return []
    return [
        f"{member.path}.podFailurePolicy.rules[{i}].action: found Count, so that a pod that a kubelet refuses counts "
        "towards maxRestarts, too. Remove the rule: what no rule matches counts already"
        for member in members
        for i in counting_rules(member.job)
    ]


def _kept_by_sidecars(members: list[TrainingJob]) -> list[str]:
    """Warns of containers that may outlive the training: a pod ends when all its containers have ended."""
    return [
        f"{member.path}.template.spec.containers[{container['name']}]: if this container does not end with the "
        "training, the pod stays on its node after the save, and the gang does not come back elsewhere. Make it an "
        "init container with restartPolicy: Always, which the kubelet ends after the training, or let the operator end "
        "it by the policy's spec.sidecars.endWithTraining"
        for member in members
        for container in member.template["spec"].get("containers") or []
        if container.get("name") != member.container["name"]
    ]


def _restarted_alone(workload: Json, members: list[TrainingJob]) -> list[str]:
    """Warns of rules that replace one Job of the gang. The others end too, and each of them is handled for itself."""
    names, warnings = {member.name for member in members}, []
    for i, rule in enumerate(((workload.get("spec") or {}).get("failurePolicy") or {}).get("rules") or []):
        targets = set(rule.get("targetReplicatedJobs") or names)
        if rule.get("action") not in _WHOLE_ACTIONS and targets & names and not _is_reserved(str(rule.get("name"))):
            warnings.append(
                f"spec.failurePolicy.rules[{i}].action: found {rule.get('action')}; if one process of the gang fails, "
                "all end, and each Job counts for itself. Use RestartJobSet, which restarts the gang as a whole"
            )
    return warnings


def _killed_at_once(members: list[TrainingJob]) -> list[str]:
    """Warns of training that JobSet's agent has started: at a SIGTERM the agent ends at once, and the training too."""
    return [
        f"{member.path}.template.spec.containers[{member.container['name']}].env[WORKER_COMMAND]: JobSet's agent "
        "starts the training, and kills it when its pod is deleted. If no notice comes before, as with a suspension, "
        "the steps since the last save are lost. Run the agent as a sidecar (Kubernetes 1.35, restartPolicyRules with "
        "RestartAllContainers)"
        for member in members
        if agent_starts_training(member)
    ]


def _keeper_killed(members: list[TrainingJob]) -> list[str]:
    """Warns of a keeper that a restart in place ends: it is there to finish a save after the training's death."""
    return [
        f"{member.path}.template.spec.initContainers[{KEEPER}]: restartPolicyRules with RestartAllContainers end the "
        "keeper, too, within seconds of a crash. A save that it has not finished by then is lost, and the gang "
        "continues from the one before. Saves before a preemption are not affected"
        for member in members
        if restarts_all_containers(member)
        and any(item.get("name") == KEEPER for item in member.template["spec"].get("initContainers") or [])
    ]


def _lost_checkpoints(members: list[TrainingJob]) -> list[str]:
    """Warns of a directory that is no part of a volume, or of one that ends with the pod."""
    warnings = []
    for member in members:
        directory = _directory(member)
        if directory is None:
            continue
        pod = member.template["spec"]
        volumes = {volume.get("name"): volume for volume in pod.get("volumes") or []}
        mounts = member.container.get("volumeMounts") or []
        path = f"{member.path}.template.spec.containers[{member.container['name']}].volumeMounts"
        covering = [mount for mount in mounts if _covers(str(mount.get("mountPath") or ""), directory)]
        if not covering:
            warnings.append(
                f"{path}: found no volume at {directory}, where checkpoints are saved; they would be lost with the "
                "pod. Mount a volume there that all pods share, or correct the policy's spec.checkpoint.directory"
            )
            continue
        # The mount with the longest path is the one that the directory is on.
        nearest = max(covering, key=lambda mount: len(PurePosixPath(str(mount["mountPath"])).parts))
        if "emptyDir" in volumes.get(nearest.get("name"), {}):
            warnings.append(
                f"{path}: found the emptyDir {nearest['name']!r} at {nearest['mountPath']}, where checkpoints are "
                "saved; it is deleted with the pod. Mount a volume there that all pods share"
            )
    return sorted(set(warnings))


def _directory(member: TrainingJob) -> str | None:
    """The fixed part of the directory, up to the first variable. None if it is on no file system, or not known."""
    for variable in member.container.get("env") or []:
        if variable.get("name") == Env.DIRECTORY and isinstance(variable.get("value"), str):
            directory = str(variable["value"]).removeprefix("file://")
            fixed, variables, _ = directory.partition("$(")
            if variables:
                fixed = fixed.rpartition("/")[0] + "/"  # a variable may begin in the middle of a name
            return fixed if fixed.startswith("/") else None
    return None


def _covers(mount_path: str, directory: str) -> bool:
    """True if the directory is below the mount. Also if the mount is below its fixed part, as the rest is not known."""
    mount, place = PurePosixPath(mount_path), PurePosixPath(directory)
    return mount_path.startswith("/") and (place.is_relative_to(mount) or mount.is_relative_to(place))


def _short_bounds(members: list[TrainingJob], kind: str, name: str, policy: CheckpointPolicy) -> list[str]:
    """Warns of times that are shorter than an emergency save is predicted to take."""
    forecasts = policy.status.forecasts or []
    own = [item for item in forecasts if (item.kind, item.name) == (kind, name)]
    if not own:
        return []
    worst: WorkloadForecast = max(own, key=lambda item: item.needed_s)
    says = f"an emergency save of the {kind} {worst.name} is predicted to take {worst.needed_s:.0f} s"
    warnings = []
    for member in members:
        grace_s = member.template["spec"].get("terminationGracePeriodSeconds")
        if isinstance(grace_s, int) and grace_s < worst.needed_s:
            warnings.append(
                f"{member.path}.template.spec.terminationGracePeriodSeconds: found {grace_s}, but {says}. Raise it, or "
                "use more processes"
            )
    hold = policy.spec.eviction_hold
    if hold.enabled and hold.bound_seconds < worst.needed_s:
        warnings.append(
            f"CheckpointPolicy {policy.name}: spec.evictionHold.boundSeconds: found {hold.bound_seconds:g}, but "
            f"{says}. Raise it, as evictions wait no longer than that"
        )
    return warnings
