"""Warnings for whoever creates a JobSet: what is allowed, and will cost a save. Pure."""

from __future__ import annotations

import copy
from pathlib import PurePosixPath

from gracepoint.wire.names import LABEL_ROLE, ROLE_HELPER, Env
from gracepoint_operator.resources import CheckpointPolicy, WorkloadForecast
from gracepoint_operator.webhooks.contracts import agent_starts_training, restarts_all_containers, restarts_in_place
from gracepoint_operator.webhooks.injection import KEEPER
from gracepoint_operator.webhooks.release_contract import ends_gang, uncounted_helpers
from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob, gang, helpers, is_job

#: The values of managedBy that mean the usual controller.
_CONTROLLERS = {"JobSet": "jobset.sigs.k8s.io/jobset-controller", "Job": "kubernetes.io/job-controller"}
#: Actions by which the gang ends or starts again as a whole. JobSet 0.11 and newer have others.
_WHOLE_ACTIONS = ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts")


def warnings(made: Json, policy: CheckpointPolicy) -> list[str]:
    """Returns the warnings about a JobSet or a Job.

    Args:
        made: The object as it will be stored.
        policy: Its policy.
    """
    members = gang(copy.deepcopy(made), policy.spec.training, Problems())
    name = str((made.get("metadata") or {}).get("name") or "")
    kind = "Job" if is_job(made) else "JobSet"
    return [
        *_run_elsewhere(made, kind),
        *_taken_for_processes(made, members, policy),
        *_counted(made, policy),
        *_restarted_alone(made, members),
        *_killed_at_once(members),
        *_keeper_killed(members),
        *_lost_checkpoints(members),
        *_short_bounds(members, kind, name, policy),
    ]


def _run_elsewhere(made: Json, kind: str) -> list[str]:
    """Warns of a workload that another controller runs, usually in another cluster (Kueue's MultiKueue)."""
    manager = (made.get("spec") or {}).get("managedBy")
    if manager in (None, _CONTROLLERS[kind]):
        return []
    return [
        f"spec.managedBy: found {manager}, which is not {kind}'s own controller. If it runs the pods in another "
        "cluster, Gracepoint and the policy must be there too; here nothing is saved or recorded"
    ]


def _taken_for_processes(made: Json, members: list[TrainingJob], policy: CheckpointPolicy) -> list[str]:
    """Warns if nobody has said which of several replicatedJobs train: the gang waits for every process."""
    others = [helper.name for helper in helpers(made, policy.spec.training)]
    if policy.spec.training.replicated_jobs or len(members) + len(others) < 2:
        return []
    where, label = "the policy's spec.training.replicatedJobs", f"the label {LABEL_ROLE}: {ROLE_HELPER}"
    names = ", ".join(member.name for member in members)
    if len(members) == 1:
        return [
            f"spec.replicatedJobs: {where} names none, so that {names} is taken for what trains, and "
            f"{', '.join(others)} for helpers. If that is wrong, name those that train"
        ]
    processes = sum(member.processes for member in members)
    return [
        f"spec.replicatedJobs: {where} names none, so that all {processes} pods of {names} are taken for processes: "
        "the job waits until each of them has called gracepoint.attach(). If some do not train, name those that do, or "
        f"write {label} into the pod templates of the others"
    ]


def _counted(made: Json, policy: CheckpointPolicy) -> list[str]:
    """Warns of Jobs that do not train and whose end restarts the JobSet in a way that counts."""
    if is_job(made) or restarts_in_place(made):
        return []
    uncounted = uncounted_helpers(made)
    return [
        f"{helper.path}: found restartPolicy {(helper.template.get('spec') or {}).get('restartPolicy')} and "
        f"backoffLimit {helper.job.get('backoffLimit')}: if a pod of it is deleted, the JobSet restarts as a whole. "
        "The gang saves before that, but if the pod ends first, the restart counts towards maxRestarts. Write "
        "restartPolicy: Never, or allow the Job to replace its pod by a backoffLimit"
        for helper in helpers(made, policy.spec.training)
        if helper.name not in uncounted and ends_gang(helper, made)
    ]


def _restarted_alone(made: Json, members: list[TrainingJob]) -> list[str]:
    """Warns of rules that replace one Job of the gang. The others end too, and each of them is handled for itself."""
    names, found = {member.name for member in members}, []
    for i, rule in enumerate(((made.get("spec") or {}).get("failurePolicy") or {}).get("rules") or []):
        targets = set(rule.get("targetReplicatedJobs") or names)
        if rule.get("action") not in _WHOLE_ACTIONS and targets & names:
            found.append(
                f"spec.failurePolicy.rules[{i}].action: found {rule.get('action')}; if one process of the gang fails, "
                "all end, and each Job counts for itself. Use RestartJobSet, which restarts the gang as a whole"
            )
    return found


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
    found = []
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
            found.append(
                f"{path}: found no volume at {directory}, where checkpoints are saved; they would be lost with the "
                "pod. Mount a volume there that all pods share, or correct the policy's spec.checkpoint.directory"
            )
            continue
        # The mount with the longest path is the one that the directory is on.
        nearest = max(covering, key=lambda mount: len(PurePosixPath(str(mount["mountPath"])).parts))
        if "emptyDir" in volumes.get(nearest.get("name"), {}):
            found.append(
                f"{path}: found the emptyDir {nearest['name']!r} at {nearest['mountPath']}, where checkpoints are "
                "saved; it is deleted with the pod. Mount a volume there that all pods share"
            )
    return sorted(set(found))


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
    found = []
    for member in members:
        grace_s = member.template["spec"].get("terminationGracePeriodSeconds")
        if isinstance(grace_s, int) and grace_s < worst.needed_s:
            found.append(
                f"{member.path}.template.spec.terminationGracePeriodSeconds: found {grace_s}, but {says}. Raise it, or "
                "use more processes"
            )
    hold = policy.spec.eviction_hold
    if hold.enabled and hold.bound_seconds < worst.needed_s:
        found.append(
            f"CheckpointPolicy {policy.name}: spec.evictionHold.boundSeconds: found {hold.bound_seconds:g}, but "
            f"{says}. Raise it, as evictions wait no longer than that"
        )
    return found
