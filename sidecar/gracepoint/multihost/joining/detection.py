"""Finds the cluster and the process id of a pod from its environment and its labels alone.

JAX's own detection on Kubernetes asks the API server, which most training pods are not allowed to do. It also supports
only a single Job. The same information is in the pod already: in the environment from our webhook, in the Job
controller's completion index, and in the labels that JobSet sets on every pod. The container sees the labels if the
pod template has this:

    volumes:      [{name: podinfo, downwardAPI: {items: [{path: labels, fieldRef: {fieldPath: metadata.labels}}]}}]
    volumeMounts: [{name: podinfo, mountPath: /etc/podinfo}]

The environment has precedence over the labels. The number of processes is in neither, unless the pod was injected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from gracepoint.errors import SettingsError
from gracepoint.settings import Settings
from gracepoint.wire.names import (
    ENV_JOB_COMPLETION_INDEX,
    JOBSET_LABEL_JOB_INDEX,
    JOBSET_LABEL_NAME,
    JOBSET_LABEL_REPLICATED_JOB,
    JOBSET_LABEL_RESTART_ATTEMPT,
    JOBSET_LABEL_UID,
    Env,
)

#: The path at which Kubernetes' documentation mounts a pod's labels.
POD_LABELS_FILE = "/etc/podinfo/labels"
#: The default of the policy.
DEFAULT_COORDINATOR_PORT = 8476
ENV_JAX_COORDINATOR_ADDRESS = "JAX_COORDINATOR_ADDRESS"
ENV_JAX_COORDINATOR_PORT = "JAX_COORDINATOR_PORT"

# Labels of JobSet (api/jobset/v1alpha2) and of the Job controller (batch/v1) that only this module reads.
_LABEL_COORDINATOR = "jobset.sigs.k8s.io/coordinator"  # <pod hostname>.<subdomain>; absent if the JobSet has none
_LABEL_REPLICAS = "jobset.sigs.k8s.io/replicatedjob-replicas"
_LABEL_GLOBAL_REPLICAS = "jobset.sigs.k8s.io/global-replicas"
_LABEL_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

_ENV_OF_LABEL = {
    JOBSET_LABEL_NAME: Env.JOBSET_NAME,
    JOBSET_LABEL_UID: Env.JOBSET_UID,
    JOBSET_LABEL_REPLICATED_JOB: Env.REPLICATED_JOB,
    JOBSET_LABEL_JOB_INDEX: Env.JOB_INDEX,
    JOBSET_LABEL_RESTART_ATTEMPT: Env.RESTART_ATTEMPT,
    _LABEL_COMPLETION_INDEX: ENV_JOB_COMPLETION_INDEX,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a process in the cluster. None for each part that is not known."""

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None


def read_labels(path: str) -> dict[str, str]:
    """Reads a pod's labels from the file of a downward-API volume, which has ``key="value"`` on each line.

    Empty if the file does not exist.
    """
    try:
        text = Path(path).read_text()
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if line)
    return {key: value.strip('"') for key, _, value in pairs}


def detect(environ: Mapping[str, str], labels: Mapping[str, str], given: Place) -> Place | None:
    """Completes the parts of the place that were not given.

    Args:
        environ: The process's environment.
        labels: The pod's labels; see ``read_labels``.
        given: The parts that were given as arguments. They are not changed.

    Returns:
        The place. None if the pod belongs neither to a JobSet nor to an Indexed Job. In an Indexed Job without a
        JobSet, the process id is the completion index, and other parts that are not given stay None. In a JobSet, all
        three parts are set.

    Raises:
        SettingsError: The pod belongs to a JobSet, and a part cannot be determined. The message names it.
    """
    merged = {env: labels[label] for label, env in _ENV_OF_LABEL.items() if label in labels}
    merged |= {name: value for name, value in environ.items() if value}
    if Env.JOBSET_NAME not in merged:
        if ENV_JOB_COMPLETION_INDEX not in merged:
            return None
        index = Settings.from_environment(merged).completion_index
        return dataclasses.replace(given, process_id=index if given.process_id is None else given.process_id)
    if given.num_processes is not None:
        merged[Env.PROCESS_COUNT] = str(given.num_processes)
    if Env.PROCESS_COUNT not in merged:
        raise SettingsError(
            f"num_processes: expected the number of training processes of JobSet {merged[Env.JOBSET_NAME]!r}, which "
            f"no label tells, found none. Give it as an argument or as {Env.PROCESS_COUNT}; the operator's webhook "
            f"sets it in JobSets labelled with gracepoint.dev/policy"
        )
    settings = Settings.from_environment(_defaults(merged, labels) | merged)
    process_id = settings.process_id if given.process_id is None else given.process_id
    address = given.coordinator_address or _address(settings, labels, process_id, told=Env.COORDINATOR_JOB in merged)
    return Place(address, settings.process_count, process_id)


def _defaults(merged: Mapping[str, str], labels: Mapping[str, str]) -> dict[str, str]:
    """Returns JobSet's own defaults for a pod that was not injected, as environment variables."""
    found = {
        Env.COORDINATOR_PORT: merged.get(ENV_JAX_COORDINATOR_PORT, str(DEFAULT_COORDINATOR_PORT)),
        Env.SUBDOMAIN: merged[Env.JOBSET_NAME],
    }
    replicas = labels.get(_LABEL_REPLICAS)
    if replicas is None or replicas != labels.get(_LABEL_GLOBAL_REPLICAS):
        return found  # there are other replicatedJobs, and no label tells which of them train
    count = merged[Env.PROCESS_COUNT]
    if not count.isdecimal() or int(count) % int(replicas):
        raise SettingsError(
            f"num_processes: expected a multiple of the {replicas} Jobs of JobSet {merged[Env.JOBSET_NAME]!r}, found "
            f"{count}"
        )
    return found | {
        Env.PODS_PER_JOB: str(int(count) // int(replicas)),
        Env.COORDINATOR_JOB: labels[JOBSET_LABEL_REPLICATED_JOB],
    }


def _address(settings: Settings, labels: Mapping[str, str], process_id: int, *, told: bool) -> str:
    """Returns the address of process 0.

    The JobSet's own ``coordinator`` has precedence over defaults. If ``told`` is True, the environment names the
    replicatedJob of process 0, which has precedence over ``coordinator``.
    """
    host = labels.get(_LABEL_COORDINATOR)
    if told or host is None:
        return settings.coordinator_address
    own = f"{settings.jobset_name}-{settings.replicated_job}-{settings.job_index}-{settings.completion_index}"
    if process_id == 0 and host.partition(".")[0] != own:
        raise SettingsError(
            f"{_LABEL_COORDINATOR}: expected the pod of process 0, {own}, as JAX's coordination service runs there, "
            f"found {host}. Correct the JobSet's spec.coordinator, or give coordinator_address"
        )
    return f"{host}:{settings.coordinator_port}"
