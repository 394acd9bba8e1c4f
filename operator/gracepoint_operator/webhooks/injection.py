"""Injects the label, the environment and the bound token into the pods of a gang. Pure.

Everything that is constant for the life of the JobSet is written into its pod templates at CREATE. So after a restart
while the operator is down, the new pods still know their gang. All pods of a gang also have the same settings, even if
the policy was edited in between. At the CREATE of a pod, only the operator's URL and CA are refreshed, which belong to
the operator's installation.

Variables that identify the pod, the operator's address, and those on which the release contract depends (exit codes,
grace period) always have our values. For variables in ``YIELDING``, a value that the container sets is kept.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection
from typing import Any

from gracepoint.wire import names
from gracepoint.wire.names import TOKEN_AUDIENCE, TOKEN_DIRECTORY, Env
from gracepoint_operator.kube.objects import LABEL_JOB_NAME, LABEL_JOB_UID
from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.resources.policy import EncryptionAlgorithm, SaveWriter
from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob, gang, helpers, is_job

#: Name of the container and of the volume with its socket. The name is reserved.
KEEPER = "gracepoint-keeper"

_MEMORY = "512Mi"  # for itself: snapshots are charged to the training container, which touches them first
_CPU = "1"
# The library's module that reads ahead. A keeper of an older library ignores it.
_READS_AHEAD = "gracepoint.session.ahead_in_keeper"
# Variables that only the trainer has. It passes the operator's address, which may change for new pods, to the keeper.
_TRAINER_ONLY = frozenset({Env.OPERATOR_URL, Env.CA_CERTIFICATE, Env.TOKEN_FILE})
# Fields of the training container that are taken over as they are.
_SHARED = ("image", "imagePullPolicy", "envFrom", "securityContext", "workingDir")


def inject_keeper(pod: Json, container: Json) -> None:
    """Adds the keeper to the spec of a pod: a sidecar that finishes saves after the trainer's death.

    The keeper is an init container with ``restartPolicy: Always``. The kubelet starts it before the training
    container, and ends it after that one, within the pod's grace period. It runs the training container's own image,
    and sees the same volumes and credentials, because it writes the same checkpoints. It has the token for the
    operator, too: it reports that the trainer does not run. Because it starts first, it also has the newest checkpoint
    read into the page cache while the training container starts.

    To repeat it changes nothing.

    Args:
        pod: The spec of the pod. It is changed.
        container: Its training container, with everything else that is injected.
    """
    mount = {"name": KEEPER, "mountPath": names.KEEPER_DIRECTORY}
    container["volumeMounts"] = [*_others(container.get("volumeMounts"), KEEPER), mount]
    pod["volumes"] = [*_others(pod.get("volumes"), KEEPER), {"name": KEEPER, "emptyDir": {}}]
    keeper = {
        "name": KEEPER,
        **{field: copy.deepcopy(container[field]) for field in _SHARED if field in container},
        "restartPolicy": "Always",
        "command": ["python3", "-m", "gracepoint.async_calls.keeper", names.KEEPER_SOCKET, _READS_AHEAD],
        "env": [copy.deepcopy(v) for v in container.get("env") or [] if v["name"] not in _TRAINER_ONLY],
        "volumeMounts": copy.deepcopy(container["volumeMounts"]),
        "resources": _resources(container),
    }
    pod["initContainers"] = [*_others(pod.get("initContainers"), KEEPER), keeper]


def _resources(container: Json) -> Json:
    """Returns the keeper's resources. A pod that is Guaranteed without it is Guaranteed with it."""
    limits = (container.get("resources") or {}).get("limits") or {}
    own = {"cpu": _CPU, "memory": _MEMORY}
    return {"requests": own, "limits": own if "cpu" in limits else {"memory": _MEMORY}}


def _others(items: list[Json] | None, name: str) -> list[Json]:
    return [item for item in items or [] if item["name"] != name]


#: Name of the volume with the projected token. The name is reserved.
TOKEN_VOLUME = "gracepoint-token"
_CLUSTER_DNS = "ClusterFirstWithHostNet"


def check_template(member: TrainingJob, codes: Collection[int], problems: Problems) -> None:
    """Fills in missing fields of the pod template, and adds conflicts with contract and injection to ``problems``.

    Args:
        member: The replicatedJob of the template.
        codes: Exit codes of the training container after a save.
        problems: Gets the conflicts.
    """
    _stays_ended(member, codes, problems)
    _finds_names(member, problems)
    _leaves_room_for_the_token(member, problems)


def _stays_ended(member: TrainingJob, codes: Collection[int], problems: Problems) -> None:
    """Adds a problem if a rule of the container makes it restart in place."""
    container = member.container
    path = f"{member.path}.template.spec.containers[{container['name']}]"
    reason = "as a container restarted in place stays on the node that is going away"
    if container.get("restartPolicy") not in (None, "Never"):
        problems.add(
            f"{path}.restartPolicy",
            found=container["restartPolicy"],
            expected=f"Never or nothing, {reason}",
            fix="Remove it",
        )
    for i in matching_restart_rules(container, codes):
        rule = container["restartPolicyRules"][i]
        on: Json = rule.get("exitCodes") or {}
        problems.add(
            f"{path}.restartPolicyRules[{i}]",
            found=f"{rule.get('action')} for exit codes {on.get('operator')} {on.get('values')}",
            expected=f"none that matches {sorted(codes)}, {reason}",
            fix="Remove the rule, or these codes from it"
            if on.get("operator") == "In"
            else "Remove the rule, or add these codes to it",
        )


def matching_restart_rules(container: Json, codes: Collection[int]) -> list[int]:
    """Returns the places of the rules by which the container restarts in place when it ends with one of the codes."""

    def matches(rule: Json) -> bool:
        on: Json = rule.get("exitCodes") or {}
        named = set(on.get("values") or []) & set(codes)
        return bool(named) if on.get("operator") == "In" else len(named) < len(set(codes))

    return [i for i, rule in enumerate(container.get("restartPolicyRules") or []) if matches(rule)]


def _finds_names(member: TrainingJob, problems: Problems) -> None:
    """Handles pods on the host network, which use the node's resolver.

    That resolver knows the name of neither process 0 nor the operator.
    """
    pod = member.template["spec"]
    if not pod.get("hostNetwork"):
        return
    if pod.get("dnsPolicy") is None:
        pod["dnsPolicy"] = _CLUSTER_DNS
    elif pod["dnsPolicy"] in ("ClusterFirst", "Default"):
        problems.add(
            f"{member.path}.template.spec.dnsPolicy",
            found=f"{pod['dnsPolicy']}, which with hostNetwork means the node's own resolver",
            expected=f"{_CLUSTER_DNS}: process 0 and the operator are reached by their names in the cluster",
            fix=f"Write dnsPolicy: {_CLUSTER_DNS}",
        )


def _leaves_room_for_the_token(member: TrainingJob, problems: Problems) -> None:
    pod, container = member.template["spec"], member.container
    for i, volume in enumerate(pod.get("volumes") or []):
        if volume.get("name") == TOKEN_VOLUME and not _is_token(volume):
            problems.add(
                f"{member.path}.template.spec.volumes[{i}].name",
                found=TOKEN_VOLUME,
                expected="another name: this one is kept for the token that shows the operator who the pod is",
                fix="Rename the volume",
            )
    for i, mount in enumerate(container.get("volumeMounts") or []):
        at = str(mount.get("mountPath") or "").rstrip("/")
        if at == TOKEN_DIRECTORY and mount.get("name") != TOKEN_VOLUME:
            problems.add(
                f"{member.path}.template.spec.containers[{container['name']}].volumeMounts[{i}].mountPath",
                found=at,
                expected="another path: the token that shows the operator who the pod is will be mounted there",
                fix="Mount it elsewhere",
            )


def _is_token(volume: Json) -> bool:
    """Returns True if an earlier injection made the volume, possibly by another version of the operator."""
    sources: list[Json] = (volume.get("projected") or {}).get("sources") or []
    return any((source.get("serviceAccountToken") or {}).get("audience") == TOKEN_AUDIENCE for source in sources)


#: Lifetime of a projected token, in seconds. The kubelet renews the token after 80 % of it.
TOKEN_LIFETIME_S = 3600

#: Settings for which a value that the container already has takes precedence over the policy's.
YIELDING = frozenset(
    {
        Env.DIRECTORY,
        Env.SAVE_EVERY_STEPS,
        Env.SAVE_EVERY_S,
        Env.KEEP_LAST,
        Env.KEEP_EVERY_STEPS,
        Env.KEEP_FOR_S,
        Env.MARGIN,
        Env.HEAD_START_S,
        Env.TOLERATE_FAILURES_S,
        Env.STALL_AFTER_S,
        Env.STALL_ACTION,
        Env.JOIN_TIMEOUT_S,
        Env.METADATA,
        Env.SNAPSHOT_EVERY_STEPS,
        Env.SNAPSHOT_EVERY_S,
        Env.SNAPSHOT_COPIES,
        Env.WRITER,
        Env.COMPILATION_CACHE,
        Env.COMPILATION_CACHE_BYTES,
        Env.COMPILATION_CACHE_DAYS,
        names.ENV_JAX_CACHE_DIR,
        names.ENV_JAX_MIN_COMPILE_S,
        names.ENV_JAX_XLA_CACHES,
        names.ENV_S3_ENDPOINT,
        names.ENV_S3_REGION,
        names.ENV_GCS_ENDPOINT,
        names.ENV_S3_ENCRYPTION,
        names.ENV_S3_KEY,
        names.ENV_S3_BUCKET_KEY,
        names.ENV_GCS_KEY,
    }
)


# Empty: the library's default.
_WRITERS = {SaveWriter.THREAD: "", SaveWriter.WORKER: "worker", SaveWriter.KEEPER: names.KEEPER_SOCKET}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """Settings of the operator's installation."""

    operator_url: str  # https://<service>.<namespace>.svc:<port>
    ca_certificate: str  # PEM; pods verify the operator's certificate with it


def _downward(name: str, field: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _label(name: str, label: str) -> Json:
    return _downward(name, f"metadata.labels['{label}']")


_POD: list[Json] = [
    _downward(Env.NAMESPACE, "metadata.namespace"),
    _downward(Env.POD_NAME, "metadata.name"),
    _downward(Env.POD_UID, "metadata.uid"),
    _downward(Env.NODE_NAME, "spec.nodeName"),
]
_OF_JOBSET: list[Json] = [
    *_POD,
    _label(Env.JOBSET_NAME, names.JOBSET_LABEL_NAME),
    _label(Env.JOBSET_UID, names.JOBSET_LABEL_UID),
    _label(Env.RESTART_ATTEMPT, names.JOBSET_LABEL_RESTART_ATTEMPT),
    _label(Env.REPLICATED_JOB, names.JOBSET_LABEL_REPLICATED_JOB),
    _label(Env.JOB_INDEX, names.JOBSET_LABEL_JOB_INDEX),
]
#: A Job by itself has no restarts and no replicatedJobs, so their variables are left out.
_OF_JOB: list[Json] = [
    *_POD,
    _label(Env.JOBSET_NAME, LABEL_JOB_NAME),
    _label(Env.JOBSET_UID, LABEL_JOB_UID),
]


def inject_workload(
    workload: Json, policy_name: str, policy: CheckpointPolicySpec, settings: AdmissionSettings
) -> Json:
    """Returns the JobSet or Job with everything in its pod templates that the gang's pods need.

    Args:
        workload: A JobSet or Job that meets the release contract.
        policy_name: Name of the policy, for the pods' label.
        policy: Spec of the policy.
        settings: Settings of the operator's installation.
    """
    injected = copy.deepcopy(workload)
    members = gang(injected, policy.training, Problems())
    process_count = sum(member.processes for member in members)
    identity, host_of_process_0 = _naming(injected, members)
    # Only if it is set: a library that is older than this setting refuses variables that it does not know.
    elastic = {Env.MIN_PROCESSES: policy.training.min_processes} if policy.training.min_processes else {}
    offset = 0
    for member in members:
        constants = {
            Env.PROCESS_COUNT: process_count,
            Env.PROCESS_OFFSET: offset,
            Env.PODS_PER_JOB: member.pods_per_job,
            **elastic,
            **host_of_process_0,
            Env.COORDINATOR_PORT: policy.training.coordinator_port,
            Env.POLICY: policy_name,
            Env.TOKEN_FILE: names.TOKEN_FILE,
            **_installation(settings),
            **_settings_of(policy, member),
        }
        # Identity first: $(NAME) in a value refers only to variables that come before it.
        environment = [*identity, *({"name": k, "value": str(v)} for k, v in constants.items())]
        _inject_template(member, policy_name, environment)
        if policy.checkpoint.writer is SaveWriter.KEEPER:
            inject_keeper(member.template["spec"], member.container)
        offset += member.processes
    for helper in helpers(injected, policy.training):
        # So that the operator sees their pods. Their containers know nothing of it.
        _mark(helper.template, {names.LABEL_POLICY: policy_name, names.LABEL_ROLE: names.ROLE_HELPER})
    return injected


def _naming(workload: Json, members: list[TrainingJob]) -> tuple[list[Json], dict[str, object]]:
    """Returns the variables that identify a pod, and those that name the host of process 0."""
    if is_job(workload):
        subdomain = members[0].template["spec"].get("subdomain")
        return _OF_JOB, {Env.SUBDOMAIN: subdomain} if subdomain else {}
    subdomain = (workload["spec"].get("network") or {}).get("subdomain") or f"$({Env.JOBSET_NAME})"
    return _OF_JOBSET, {Env.COORDINATOR_JOB: members[0].name, Env.SUBDOMAIN: subdomain}


def refresh_pod(pod: Json, settings: AdmissionSettings) -> Json:
    """Returns the pod with the operator's current URL and CA. A pod that was not injected is not changed."""
    refreshed = copy.deepcopy(pod)
    fresh = _installation(settings)
    for container in refreshed.get("spec", {}).get("containers") or []:
        for variable in container.get("env") or []:
            if variable["name"] in fresh:
                variable["value"] = fresh[variable["name"]]
    return refreshed


def is_injected(pod: Json) -> bool:
    """Returns whether the pod has what the injection writes: the operator's URL, or the label of a helper."""
    labels = (pod.get("metadata") or {}).get("labels") or {}
    if labels.get(names.LABEL_ROLE) == names.ROLE_HELPER:
        return True
    containers: list[Json] = pod.get("spec", {}).get("containers") or []
    return any(v["name"] == Env.OPERATOR_URL for c in containers for v in c.get("env") or [])


def _installation(settings: AdmissionSettings) -> dict[str, str]:
    return {Env.OPERATOR_URL: settings.operator_url, Env.CA_CERTIFICATE: settings.ca_certificate}


def _settings_of(policy: CheckpointPolicySpec, member: TrainingJob) -> dict[str, object]:
    # Only if they are set: a library that is older than these settings refuses variables that it does not know.
    later = {
        Env.METADATA: ",".join(policy.cloud_metadata).lower(),
        Env.SAVE_EVERY_S: policy.checkpoint.every_seconds,
        Env.KEEP_EVERY_STEPS: policy.checkpoint.keep_every_steps,
        Env.KEEP_FOR_S: policy.checkpoint.keep_for_seconds,
        Env.WRITER: _WRITERS[policy.checkpoint.writer],
        Env.JOIN_TIMEOUT_S: policy.startup.join_timeout_seconds,
    }
    unless_default = {
        Env.HEAD_START_S: (policy.deadline.head_start_seconds, names.DEFAULT_HEAD_START_S),
        Env.SAVE_INTERVAL: (policy.checkpoint.interval.lower(), names.SAVE_FIXED),
        Env.TOLERATE_FAILURES_S: (policy.checkpoint.tolerate_failures_seconds, names.DEFAULT_TOLERATE_FAILURES_S),
        Env.STALL_AFTER_S: (policy.stalls.after_seconds, names.DEFAULT_STALL_AFTER_S),
        Env.STALL_ACTION: (policy.stalls.action.lower(), names.STALL_REPORT),
    }
    # The contract depends on it, so a value of the container's own does not count.
    in_container = any(variable["name"] == Env.NOT_JOINED_EXIT_CODE for variable in member.container.get("env") or [])
    if in_container or policy.not_joined_exit_code != names.DEFAULT_NOT_JOINED_EXIT_CODE:
        later[Env.NOT_JOINED_EXIT_CODE] = policy.not_joined_exit_code
    return {
        Env.DIRECTORY: _filled_in(policy.checkpoint.directory),
        Env.SAVE_EVERY_STEPS: policy.checkpoint.every_steps,
        Env.KEEP_LAST: policy.checkpoint.keep_last,
        Env.SAVED_EXIT_CODE: policy.after_save.saved_exit_code,
        Env.UNSAVED_EXIT_CODE: policy.after_save.unsaved_exit_code,
        Env.GRACE_PERIOD_S: member.template["spec"]["terminationGracePeriodSeconds"],
        Env.MARGIN: policy.deadline.margin,
        **{name: value for name, value in later.items() if value},
        **{name: value for name, (value, default) in unless_default.items() if value != default},
        **_snapshots_of(policy, member),
        **_cache_of(policy, member),
        **_store_of(policy),
    }


def _snapshots_of(policy: CheckpointPolicySpec, member: TrainingJob) -> dict[str, object]:
    """Returns the variables of snapshots. A container that has chosen an interval keeps it, in whichever unit."""
    memory = policy.checkpoint.memory
    if memory is None:
        return {}
    interval = {Env.SNAPSHOT_EVERY_STEPS: memory.every_steps, Env.SNAPSHOT_EVERY_S: memory.every_seconds}
    chosen = {variable["name"] for variable in member.container.get("env") or []}
    if not chosen.isdisjoint(interval):
        interval = {name: value for name, value in interval.items() if name in chosen}
    return {**{name: value for name, value in interval.items() if value}, Env.SNAPSHOT_COPIES: memory.copies}


def _filled_in(directory: str) -> str:
    # With variables, because a JobSet with generateName has no name yet.
    return directory.replace("{namespace}", f"$({Env.NAMESPACE})").replace("{jobset}", f"$({Env.JOBSET_NAME})")


def _cache_of(policy: CheckpointPolicySpec, member: TrainingJob) -> dict[str, object]:
    """Returns the variables of JAX's persistent cache. Empty if it is off, or if the container has chosen another."""
    cache = policy.compilation_cache
    container_env = {variable["name"]: variable for variable in member.container.get("env") or []}
    if not cache.enabled or container_env.keys() & {names.ENV_JAX_CACHE_DIR, Env.COMPILATION_CACHE}:
        return {}
    # The API server may call the webhook again, after another one has changed the object.
    policy_directory = {"name": Env.DIRECTORY, "value": _filled_in(policy.checkpoint.directory)}
    if not cache.directory and container_env.get(Env.DIRECTORY, policy_directory) != policy_directory:
        return {Env.COMPILATION_CACHE: names.COMPILATION_CACHE_ON}  # the library knows where its checkpoints go
    checkpoints = policy.checkpoint.directory.rstrip("/")
    where = _filled_in(cache.directory or f"{checkpoints}/{names.PROGRAMS_FOLDER}").removeprefix("file://")
    if not cache.directory and "://" in where:
        return {}  # JAX needs more packages for a bucket, so somebody has to choose it
    variables: dict[str, object] = {
        names.ENV_JAX_CACHE_DIR: where,
        names.ENV_JAX_MIN_COMPILE_S: 0,  # also the many small programs of a start
    }
    if "://" in where:
        variables[names.ENV_JAX_XLA_CACHES] = "none"  # XLA's own caches know no buckets
    return variables


def _store_of(policy: CheckpointPolicySpec) -> dict[str, object]:
    """Returns the variables that the stores' clients know, for what the policy sets."""
    store = policy.checkpoint.object_store
    encryption, is_s3 = store.server_side_encryption, policy.checkpoint.directory.startswith("s3://")
    variables: dict[str, object] = {
        names.ENV_S3_ENDPOINT if is_s3 else names.ENV_GCS_ENDPOINT: store.endpoint,
        names.ENV_S3_REGION: store.region,
        names.ENV_S3_KEY if is_s3 else names.ENV_GCS_KEY: encryption.key_id,
        names.ENV_S3_BUCKET_KEY: "true" if encryption.bucket_key else "",
    }
    if encryption.algorithm is not EncryptionAlgorithm.BUCKET_DEFAULT:
        variables[names.ENV_S3_ENCRYPTION] = encryption.algorithm.value
    return {name: value for name, value in variables.items() if value}


def _mark(template: Json, labels: dict[str, str]) -> None:
    metadata = template.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}


def _inject_template(member: TrainingJob, policy_name: str, environment: list[Json]) -> None:
    _mark(member.template, {names.LABEL_POLICY: policy_name})
    pod, container = member.template["spec"], member.container
    container["env"] = _merged(environment, container.get("env") or [])
    token = {
        "audience": names.TOKEN_AUDIENCE,
        "expirationSeconds": TOKEN_LIFETIME_S,
        "path": names.TOKEN_FILE.removeprefix(f"{names.TOKEN_DIRECTORY}/"),
    }
    volume = {"name": TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}}
    mount = {"name": TOKEN_VOLUME, "mountPath": names.TOKEN_DIRECTORY, "readOnly": True}
    pod["volumes"] = _with(pod.get("volumes") or [], volume)
    container["volumeMounts"] = _with(container.get("volumeMounts") or [], mount)


def _merged(injected: list[Json], written: list[Json]) -> list[Json]:
    """Returns our variables, then the user's, which may refer to ours. Returns ``written`` if nothing is missing."""
    present: dict[str, Any] = {variable["name"]: variable for variable in written}
    kept = {name for name in YIELDING if name in present}
    overriding = [variable for variable in injected if variable["name"] not in kept]
    if all(present.get(variable["name"]) == variable for variable in overriding):
        return written
    replaced = {variable["name"] for variable in overriding}
    return overriding + [variable for variable in written if variable["name"] not in replaced]


def _with(items: list[Json], item: Json) -> list[Json]:
    """Returns ``items`` with ``item`` in place of the item of the same name. At the end if there is none."""
    if any(other["name"] == item["name"] for other in items):
        return [item if other["name"] == item["name"] else other for other in items]
    return [*items, item]


_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
#: The maximum that the API server accepts.
_WEIGHT = 100
#: Limit of names in a pod. If maintenance is announced for whole node pools, thousands of names would have no effect.
MOST_NODES = 500


def avoid_nodes(pod: Json, nodes: frozenset[str]) -> Json:
    """Returns the pod with a preferred node affinity against ``nodes``, the names of Node objects.

    The scheduler ignores labels and conditions, and pods may tolerate a taint. So without this, a restarted job can be
    scheduled to the node that it left. The affinity is a preference, not a requirement, because a pod keeps its
    affinity for life, and clouds give the machine that replaces a node the same node name. With a requirement, a pod
    that fits nowhere else would stay pending for ever.

    The pod's own affinities stay. At most ``MOST_NODES`` of the nodes are used.
    """
    changed = copy.deepcopy(pod)
    if not nodes:
        return changed
    spec = changed.setdefault("spec", {})
    affinity = spec["affinity"] = spec.get("affinity") or {}
    node_affinity = affinity["nodeAffinity"] = affinity.get("nodeAffinity") or {}
    preferred: list[Json] = node_affinity.get(_PREFERRED) or []
    present = [field for term in preferred for field in term["preference"].get("matchFields") or []]
    # By the name of the object, not by the hostname label, which has another value in some clouds. The API server
    # accepts one name in each requirement.
    requirements = [
        {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in sorted(nodes)[:MOST_NODES]
    ]
    if new := [requirement for requirement in requirements if requirement not in present]:
        preferred = [*preferred, {"weight": _WEIGHT, "preference": {"matchFields": new}}]
    node_affinity[_PREFERRED] = preferred
    return changed
