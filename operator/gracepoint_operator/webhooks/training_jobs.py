"""Which Jobs of a workload form the gang, in the order of their processes: a JobSet's, or the workload itself. Pure."""

from __future__ import annotations

import dataclasses
from typing import Any

from gracepoint_operator.resources import Training

Json = dict[str, Any]


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


def is_job(workload: Json) -> bool:
    """Returns whether it is a Job. Otherwise it is a JobSet."""
    return workload.get("kind") == "Job"


def gang(workload: Json, training: Training, problems: Problems) -> list[TrainingJob]:
    """Returns the members in the order of the process ids: those of a JobSet in its order, or the Job itself."""
    if is_job(workload):
        member = _of_spec("spec", "", 1, workload.setdefault("spec", {}), training, problems)
        return [] if member is None else [member]
    return _of_jobset(workload, training, problems)


def _of_jobset(jobset: Json, training: Training, problems: Problems) -> list[TrainingJob]:
    jobs: list[Json] = jobset.get("spec", {}).get("replicatedJobs") or []
    names = [job.get("name", "") for job in jobs]
    for missing in sorted(set(training.replicated_jobs) - set(names)):
        problems.add(
            "spec.replicatedJobs",
            found=names,
            expected=f"one named {missing!r}, which the policy's spec.training.replicatedJobs lists",
            fix="Correct the name in the JobSet or in the policy",
        )
    wanted = training.replicated_jobs or names
    members = [_member(i, job, training, problems) for i, job in enumerate(jobs) if job.get("name") in wanted]
    if not members and not problems:
        problems.add("spec.replicatedJobs", found="none", expected="at least one", fix="Add one")
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
