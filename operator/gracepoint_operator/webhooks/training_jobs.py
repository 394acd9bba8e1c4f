"""Which Jobs of a workload form the gang, in the order of their processes: a JobSet's, or the workload itself. Pure.

If the policy does not name the replicatedJobs that train, these are all of a JobSet, with two exceptions. A pod
template with the label ``wire.names.LABEL_ROLE`` does not train. And if some ask for accelerators and others do not,
the others do not train: they load data, or start the rest.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from gracepoint.wire.names import LABEL_POLICY, LABEL_ROLE, ROLE_HELPER
from gracepoint_operator.resources import Training

Json = dict[str, Any]

#: Names of extended resources that are accelerators, for example nvidia.com/gpu and google.com/tpu. Some are a part of
#: other words, like "tpu" of "output", and count only at the beginning of a word.
_ACCELERATOR = re.compile(r"/(.*(gpu|neuron|gaudi|i915|(?<![a-z])v?[tnx]pu).*|mig-.*|xe)$", re.IGNORECASE)


class Problems(list[str]):
    """Violations of the contract. Each names the field, what was found, what was expected, and the fix."""

    def add(self, path: str, *, found: object, expected: str, fix: str) -> None:
        self.append(f"{path}: found {found}, expected {expected}. {fix}")


@dataclasses.dataclass(frozen=True)
class TrainingJob:
    """One replicatedJob of the gang, or the Job. The dicts are parts of the workload: a change to them changes it."""

    path: str  # spec.replicatedJobs[i].template.spec, or spec
    name: str  # of the replicatedJob; empty for a Job
    replicas: int
    job: Json  # the Job's spec
    template: Json  # its pod template
    container: Json  # the one that trains
    depends_on: tuple[Json, ...] = ()  # the replicatedJobs that JobSet starts before this one

    @property
    def pods_per_job(self) -> int:
        """Number of pods of one Job. Under the contract parallelism and completions are equal."""
        return int(self.job.get("parallelism") or 1)

    @property
    def processes(self) -> int:
        return self.replicas * self.pods_per_job


@dataclasses.dataclass(frozen=True)
class HelperJob:
    """One replicatedJob that does not train. The dicts are parts of the JobSet, as in ``TrainingJob``."""

    path: str
    name: str
    job: Json
    template: Json


def is_job(workload: Json) -> bool:
    """Returns whether it is a Job. Otherwise it is a JobSet."""
    return workload.get("kind") == "Job"


def gang(workload: Json, training: Training, problems: Problems) -> list[TrainingJob]:
    """Returns the members in the order of the process ids: those of a JobSet in its order, or the Job itself."""
    if is_job(workload):
        member = _of_spec("spec", "", 1, workload.setdefault("spec", {}), training, problems)
        return [] if member is None else [member]
    return _of_jobset(workload, training, problems)


def helpers(workload: Json, training: Training) -> list[HelperJob]:
    """Returns the replicatedJobs of a JobSet that are not of the gang. A Job has none."""
    if is_job(workload):
        return []
    jobs = _replicated_jobs(workload)
    training_names = training.replicated_jobs or training_by_default(jobs)
    return [
        HelperJob(f"spec.replicatedJobs[{i}].template.spec", job["name"], spec, spec.setdefault("template", {}))
        for i, job in enumerate(jobs)
        if job.get("name") not in training_names
        for spec in (job.setdefault("template", {}).setdefault("spec", {}),)
    ]


def training_by_default(jobs: Sequence[Json]) -> list[str]:
    """Returns the names of the replicatedJobs that train if the policy names none."""
    may_train = [job for job in jobs if _labels(job).get(LABEL_ROLE) != ROLE_HELPER]
    # Of a JobSet that was injected before, possibly by a version with another default, those that it was made with.
    labelled = [job for job in may_train if LABEL_POLICY in _labels(job)]
    asking = [job for job in may_train if asks_for_accelerators(job)]
    return [job.get("name", "") for job in labelled or asking or may_train]


def asks_for_accelerators(job: Json) -> bool:
    """Returns whether the pods of a replicatedJob ask for accelerators."""
    pod = _template(job).get("spec") or {}
    resources = [container.get("resources") or {} for container in pod.get("containers") or ()]
    resource_names = [name for item in resources for kind in ("requests", "limits") for name in item.get(kind) or ()]
    claimed = any(item.get("claims") for item in resources)
    return claimed or any(_ACCELERATOR.search(name) for name in resource_names)


def _replicated_jobs(jobset: Json) -> list[Json]:
    return jobset.get("spec", {}).get("replicatedJobs") or []


def _template(job: Json) -> Json:
    return ((job.get("template") or {}).get("spec") or {}).get("template") or {}


def _labels(job: Json) -> Json:
    return (_template(job).get("metadata") or {}).get("labels") or {}


def _of_jobset(jobset: Json, training: Training, problems: Problems) -> list[TrainingJob]:
    jobs = _replicated_jobs(jobset)
    names = [job.get("name", "") for job in jobs]
    for missing in sorted(set(training.replicated_jobs) - set(names)):
        problems.add(
            "spec.replicatedJobs",
            found=names,
            expected=f"one named {missing!r}, which the policy's spec.training.replicatedJobs lists",
            fix="Correct the name in the JobSet or in the policy",
        )
    for i, job in enumerate(jobs):
        if job.get("name") in training.replicated_jobs and _labels(job).get(LABEL_ROLE) == ROLE_HELPER:
            problems.add(
                f"spec.replicatedJobs[{i}].template.spec.template.metadata.labels[{LABEL_ROLE}]",
                found=ROLE_HELPER,
                expected="no such label, as the policy's spec.training.replicatedJobs says that it trains",
                fix="Remove the label, or the name from the policy",
            )
    training_names = training.replicated_jobs or training_by_default(jobs)
    members = [_member(i, job, training, problems) for i, job in enumerate(jobs) if job.get("name") in training_names]
    if not members and not problems:
        problems.add("spec.replicatedJobs", found="none that trains", expected="at least one", fix="Add one")
    return [member for member in members if member is not None]


def _member(index: int, job: Json, training: Training, problems: Problems) -> TrainingJob | None:
    path = f"spec.replicatedJobs[{index}]"
    replicas = job.get("replicas", 1)
    if replicas < 1:
        problems.add(
            f"{path}.replicas",
            found=replicas,
            expected="at least 1, as the replicatedJob is part of the gang",
            fix="Set it, or name the replicatedJobs that train in the policy's spec.training.replicatedJobs",
        )
        return None
    spec = job.setdefault("template", {}).setdefault("spec", {})
    return _of_spec(
        f"{path}.template.spec", job["name"], replicas, spec, training, problems, tuple(job.get("dependsOn") or ())
    )


def _of_spec(
    path: str,
    name: str,
    replicas: int,
    spec: Json,
    training: Training,
    problems: Problems,
    depends_on: tuple[Json, ...] = (),
) -> TrainingJob | None:
    template = spec.setdefault("template", {})
    containers: list[Json] = template.setdefault("spec", {}).get("containers") or []
    names = [container.get("name") for container in containers]
    for container in containers:
        if container.get("name") == training.container or not training.container:
            return TrainingJob(path, name, replicas, spec, template, container, depends_on)
    problems.add(
        f"{path}.template.spec.containers",
        found=names,
        expected=f"the container {training.container!r} of the policy's spec.training.container"
        if training.container
        else "at least one container",
        fix="Correct the name in the manifest or in the policy",
    )
    return None


def label_handed_on(trainjob: Json) -> Json:
    """Returns the TrainJob with the policy's label among those that the Trainer copies to the JobSet.

    Raises:
        AttributeError, LookupError, TypeError: It is not of TrainJob's schema.
    """
    labelled = copy.deepcopy(trainjob)
    name = ((labelled.get("metadata") or {}).get("labels") or {}).get(LABEL_POLICY)
    if name is not None:
        labels = labelled["spec"].setdefault("labels", {})
        labels.setdefault(LABEL_POLICY, name)
    return labelled
