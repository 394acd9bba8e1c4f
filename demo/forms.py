"""The forms in which the example's training can be run: what is created, and what the API server shows of it. Pure.

Each form has a manifest that users are given (``examples``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from gracepoint.wire import names

Json = dict[str, Any]

_JOB_NAME = "batch.kubernetes.io/job-name"
#: How often the Job controller has replaced the pod of an index: failures that count, and those that do not.
_REPLACED = ("batch.kubernetes.io/job-index-failure-count", "batch.kubernetes.io/job-index-ignored-failure-count")


@dataclasses.dataclass(frozen=True)
class Form:
    """A kind of workload.

    Attributes:
        kind: The kind that the operator handles. Its object has the name of what is created.
        resource: The resource of that kind, as kubectl names it.
        example: The file in ``examples``. Its last object is the one that users suspend and delete.
        created: The resource of that object.
        name_label: The label of its pods that has its name.
        pod_template: Finds the pod template in the example's objects.
        attempt: How often a pod's process had been started again when the pod was made.
        end: How it ended: Completed or Failed. None while it runs.
        counted: How many of its restarts or failures count towards its limit.
    """

    kind: str
    resource: str
    example: str
    created: str
    name_label: str
    pod_template: Callable[[list[Json]], Json]
    attempt: Callable[[Json], int]
    end: Callable[[Json], str | None]
    counted: Callable[[Json], int]


def _pod_template_of_jobset(items: list[Json]) -> Json:
    template: Json = items[-1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return template


def _pod_template_of_job(items: list[Json]) -> Json:
    template: Json = items[-1]["spec"]["template"]
    return template


def _pod_template_of_runtime(items: list[Json]) -> Json:
    template: Json = items[0]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return template


def _end_of_job(status: Json) -> str | None:
    ends = {"Complete": "Completed", "Failed": "Failed"}
    types = [item["type"] for item in status.get("conditions", []) if item["status"] == "True"]
    return next((ends[type] for type in types if type in ends), None)


def _attempt_in_job(metadata: Json) -> int:
    annotations = metadata.get("annotations", {})
    return sum(int(annotations.get(name, 0)) for name in _REPLACED)


JOBSET = Form(
    kind="JobSet",
    resource="jobsets.jobset.x-k8s.io",
    example="jobset.yaml",
    created="jobsets.jobset.x-k8s.io",
    name_label=names.JOBSET_LABEL_NAME,
    pod_template=_pod_template_of_jobset,
    attempt=lambda metadata: int(metadata.get("labels", {}).get(names.JOBSET_LABEL_RESTART_ATTEMPT, 0)),
    end=lambda status: status.get("terminalState") or None,
    counted=lambda status: int(status.get("restartsCountTowardsMax", 0)),
)
JOB = Form(
    kind="Job",
    resource="jobs.batch",
    example="job.yaml",
    created="jobs.batch",
    name_label=_JOB_NAME,
    pod_template=_pod_template_of_job,
    attempt=_attempt_in_job,
    end=_end_of_job,
    counted=lambda status: int(status.get("failed", 0)),
)
#: The Kubeflow Trainer makes a JobSet of it.
TRAINJOB = dataclasses.replace(
    JOBSET,
    example="trainjob.yaml",
    created="trainjobs.trainer.kubeflow.org",
    pod_template=_pod_template_of_runtime,
)
