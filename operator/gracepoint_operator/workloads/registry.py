"""The kinds of workloads that this operator knows, and what follows from all of them together. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracepoint.wire import names
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.fields import read_labels
from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.kube.objects import Membership, Pod
from gracepoint_operator.read_errors import reading
from gracepoint_operator.workloads import workload
from gracepoint_operator.workloads.job import JobType
from gracepoint_operator.workloads.jobset import JobSetType
from gracepoint_operator.workloads.workload import Job, WorkloadMaker, WorkloadType

_JOBSET = JobSetType()
TYPES: tuple[WorkloadType, ...] = (_JOBSET, JobType())
#: The types by where their objects are in the API.
BY_PLACE: dict[Kind, WorkloadType] = {known.kind: known for known in TYPES}
#: The types by the names of their kinds.
BY_NAME: dict[str, WorkloadType] = {known.name: known for known in TYPES}
#: Kinds of which users create objects, and whose controllers make the workloads of them (the Kubeflow Trainer).
MAKERS: tuple[WorkloadMaker, ...] = (
    WorkloadMaker("TrainJob", Kind("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs"), _JOBSET),
)

#: The label by which the Jobs are watched that workloads make.
JOB_LABEL = names.JOBSET_LABEL_UID
#: The label by which pods are watched. The webhook writes it into the pod templates of a gang.
POD_LABEL = names.LABEL_POLICY
#: What messages call a workload whose kind is not known, and several workloads.
ANY_NAME = " or ".join(BY_NAME)
ANY_PLURAL = " and ".join(f"{name}s" for name in BY_NAME)
#: The same with the kinds that make workloads.
ANY_NAME_OR_MAKER = " or ".join([", ".join([*BY_NAME, *(maker.name for maker in MAKERS)][:-1]), MAKERS[-1].name])
#: Reasons of a Preemption that was retracted because its workload was deleted, or finished.
REASON_DELETED = f"{_JOBSET.name}Deleted"
REASON_FINISHED = f"{_JOBSET.name}Finished"


def membership_of(labels: Mapping[str, str]) -> Membership:
    """The workload to which a Job or pod with these labels belongs, if there is one."""
    found = (known.membership(labels) for known in TYPES)
    return next((member for member in found if member is not None), Membership())


def place_in(labels: Mapping[str, str]) -> tuple[Kind, str]:
    """The kind and the name of the workload that a pod's labels tell.

    Raises:
        KeyError: They tell none.
    """
    for known in TYPES:
        if (name := known.name_in(labels)) is not None:
            return known.kind, name
    raise KeyError(f"the pod's labels name no {ANY_NAME}")


def read_pod(body: Mapping[str, Any]) -> Pod:
    """Reads a pod, and to which workload it belongs.

    Raises:
        Unreadable: It is not a pod.
    """
    return objects.read_pod(body, membership_of)


def read_job(body: Mapping[str, Any]) -> Job:
    """Reads a Job, and to which workload it belongs.

    Raises:
        Unreadable: It is not a Job.
    """
    with reading("a Job"):
        labels = read_labels(body["metadata"])
    return workload.read_job(body, membership_of(labels))
