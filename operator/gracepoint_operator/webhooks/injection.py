"""What the pods of a gang are given: label, environment, bound token. Pure.

Everything that is constant for the JobSet's life goes into its pod templates at CREATE, so that a restart
while the operator is down still makes pods that know their gang, and so that all pods of a gang have the same
settings however often the policy was edited meanwhile. At pod CREATE only what belongs to the operator's
installation is refreshed: its URL and CA.

Variables that say who a pod is, where the operator is, or what the release contract depends on (exit codes,
grace period) are always ours. Those of ``YIELDING`` are the user's if the container sets them.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from gracepoint.wire import names
from gracepoint.wire.names import Env
from gracepoint_operator.resources import CheckpointPolicySpec
from gracepoint_operator.webhooks.pod_template import TOKEN_VOLUME
from gracepoint_operator.webhooks.training_jobs import Json, Problems, TrainingJob, gang

#: Lifetime of a projected token; the kubelet renews it after 80 %.
TOKEN_LIFETIME_S = 3600

#: Settings where a value that the container already has wins over the policy's.
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
        Env.METADATA,
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """Of the operator's installation."""

    operator_url: str  # https://<service>.<namespace>.svc:<port>
    ca_certificate: str  # PEM, with which pods check the operator's certificate


def _downward(name: str, field: str) -> Json:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": field}}}


def _label(name: str, label: str) -> Json:
    return _downward(name, f"metadata.labels['{label}']")


_IDENTITY: list[Json] = [
    _downward(Env.NAMESPACE, "metadata.namespace"),
    _downward(Env.POD_NAME, "metadata.name"),
    _downward(Env.POD_UID, "metadata.uid"),
    _downward(Env.NODE_NAME, "spec.nodeName"),
    _label(Env.JOBSET_NAME, names.JOBSET_LABEL_NAME),
    _label(Env.JOBSET_UID, names.JOBSET_LABEL_UID),
    _label(Env.RESTART_ATTEMPT, names.JOBSET_LABEL_RESTART_ATTEMPT),
    _label(Env.REPLICATED_JOB, names.JOBSET_LABEL_REPLICATED_JOB),
    _label(Env.JOB_INDEX, names.JOBSET_LABEL_JOB_INDEX),
]


def inject_jobset(jobset: Json, policy_name: str, policy: CheckpointPolicySpec, settings: AdmissionSettings) -> Json:
    """The JobSet with everything that its gang's pods need in their templates.

    Args:
        jobset: One that keeps the release contract.
        policy_name: Name of the policy, for the pods' label.
        policy: Its spec.
        settings: Of the operator's installation.
    """
    made = copy.deepcopy(jobset)
    members = gang(made, policy.training, Problems())
    process_count = sum(member.processes for member in members)
    subdomain = (made["spec"].get("network") or {}).get("subdomain") or f"$({Env.JOBSET_NAME})"
    offset = 0
    for member in members:
        constants = {
            Env.PROCESS_COUNT: process_count,
            Env.PROCESS_OFFSET: offset,
            Env.PODS_PER_JOB: member.pods_per_job,
            Env.COORDINATOR_JOB: members[0].name,
            Env.COORDINATOR_PORT: policy.training.coordinator_port,
            Env.SUBDOMAIN: subdomain,
            Env.POLICY: policy_name,
            Env.TOKEN_FILE: names.TOKEN_FILE,
            **_installation(settings),
            **_settings_of(policy, member),
        }
        # Identity first: $(NAME) in a value reads only variables that stand before it.
        environment = [*_IDENTITY, *({"name": k, "value": str(v)} for k, v in constants.items())]
        _inject_template(member, policy_name, environment)
        offset += member.processes
    return made


def refresh_pod(pod: Json, settings: AdmissionSettings) -> Json:
    """The pod with the operator's present URL and CA. One that was not injected is left alone."""
    made = copy.deepcopy(pod)
    fresh = _installation(settings)
    for container in made.get("spec", {}).get("containers") or []:
        for variable in container.get("env") or []:
            if variable["name"] in fresh:
                variable["value"] = fresh[variable["name"]]
    return made


def is_injected(pod: Json) -> bool:
    """Whether a container of the pod was given the operator's URL through its JobSet."""
    containers: list[Json] = pod.get("spec", {}).get("containers") or []
    return any(v["name"] == Env.OPERATOR_URL for c in containers for v in c.get("env") or [])


def _installation(settings: AdmissionSettings) -> dict[str, str]:
    return {Env.OPERATOR_URL: settings.operator_url, Env.CA_CERTIFICATE: settings.ca_certificate}


def _settings_of(policy: CheckpointPolicySpec, member: TrainingJob) -> dict[str, object]:
    # As variables, since a JobSet with generateName has no name yet.
    directory = policy.checkpoint.directory.replace("{namespace}", f"$({Env.NAMESPACE})").replace(
        "{jobset}", f"$({Env.JOBSET_NAME})"
    )
    # Only where they are asked for: a library from before these settings refuses what it does not know.
    later = {
        Env.METADATA: ",".join(policy.cloud_metadata).lower(),
        Env.SAVE_EVERY_S: policy.checkpoint.every_seconds,
        Env.KEEP_EVERY_STEPS: policy.checkpoint.keep_every_steps,
        Env.KEEP_FOR_S: policy.checkpoint.keep_for_seconds,
    }
    head_start_s = policy.deadline.head_start_seconds
    return {
        Env.DIRECTORY: directory,
        Env.SAVE_EVERY_STEPS: policy.checkpoint.every_steps,
        Env.KEEP_LAST: policy.checkpoint.keep_last,
        Env.SAVED_EXIT_CODE: policy.after_save.saved_exit_code,
        Env.UNSAVED_EXIT_CODE: policy.after_save.unsaved_exit_code,
        Env.GRACE_PERIOD_S: member.template["spec"]["terminationGracePeriodSeconds"],
        Env.MARGIN: policy.deadline.margin,
        **{name: value for name, value in later.items() if value},
        **({Env.HEAD_START_S: head_start_s} if head_start_s != names.DEFAULT_HEAD_START_S else {}),
    }


def _inject_template(member: TrainingJob, policy_name: str, environment: list[Json]) -> None:
    metadata = member.template.setdefault("metadata", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), names.LABEL_POLICY: policy_name}
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


def _merged(ours: list[Json], theirs: list[Json]) -> list[Json]:
    """Our variables, then the user's, which may thus refer to ours; unchanged where nothing is missing."""
    present: dict[str, Any] = {variable["name"]: variable for variable in theirs}
    kept = {name for name in YIELDING if name in present}
    wanted = [variable for variable in ours if variable["name"] not in kept]
    if all(present.get(variable["name"]) == variable for variable in wanted):
        return theirs
    replaced = {variable["name"] for variable in wanted}
    return wanted + [variable for variable in theirs if variable["name"] not in replaced]


def _with(items: list[Json], item: Json) -> list[Json]:
    """``items`` with ``item`` in the place of the one of its name, or at the end."""
    if any(other["name"] == item["name"] for other in items):
        return [item if other["name"] == item["name"] else other for other in items]
    return [*items, item]
