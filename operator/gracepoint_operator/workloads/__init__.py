"""Workloads: the objects that run gangs, each kind behind one protocol.

``model``, the rooms above it and the command line call it to read workloads and their pods. It calls ``kube`` alone,
and is pure.
"""

from gracepoint_operator.workloads.registry import (
    ANY_NAME,
    ANY_NAME_OR_MAKER,
    ANY_PLURAL,
    BY_NAME,
    BY_PLACE,
    JOB_LABEL,
    MAKERS,
    POD_LABEL,
    REASON_DELETED,
    REASON_FINISHED,
    TYPES,
    membership_of,
    read_job,
    read_pod,
)
from gracepoint_operator.workloads.workload import (
    CREATED_WITH,
    Job,
    Workload,
    WorkloadIdentity,
    WorkloadMaker,
    WorkloadType,
)

__all__ = [
    "ANY_NAME",
    "ANY_NAME_OR_MAKER",
    "ANY_PLURAL",
    "BY_NAME",
    "BY_PLACE",
    "CREATED_WITH",
    "JOB_LABEL",
    "MAKERS",
    "POD_LABEL",
    "REASON_DELETED",
    "REASON_FINISHED",
    "TYPES",
    "Job",
    "Workload",
    "WorkloadIdentity",
    "WorkloadMaker",
    "WorkloadType",
    "membership_of",
    "read_job",
    "read_pod",
]
