"""What the operator knows of a workload and its Jobs, and what it asks of each kind of workload. Pure.

A workload is the object that a user creates to run a gang: a JobSet, or a Job by itself. The rest of the operator uses
the values here and ``registry``. Only the implementations of ``WorkloadType`` know the fields and labels of a kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from gracepoint_operator.kube.fields import optional_number, shared, text, true_conditions
from gracepoint_operator.kube.kinds import Kind
from gracepoint_operator.kube.objects import Membership
from gracepoint_operator.read_errors import reading
from gracepoint_operator.workloads.pod_ends import (
    FailureRule,
    JobFailure,
    failures_at_disruption,
    restarts_alone,
)

#: Annotation on a workload: the spec of the policy that it was created with. The webhook writes it.
CREATED_WITH = "gracepoint.dev/created-with"
#: A spec with each list and text as long as its schema allows has 9 kB, and less than 32 KiB if JSON has to escape each
#: character of its directories.
_LONGEST_CREATED_WITH = 32 * 1024
_FAILED_JOB = {"Failed", "FailureTarget"}
_FINISHED_JOB = {"Complete", "SuccessCriteriaMet", *_FAILED_JOB}


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadIdentity:
    """Which workload is meant.

    Attributes:
        kind: Its kind in the API, for example JobSet. ``registry.BY_NAME`` has its type.
    """

    kind: str
    namespace: str
    name: str
    uid: str


@dataclasses.dataclass(frozen=True, slots=True)
class Workload(WorkloadIdentity):
    """A workload as the API server last showed it.

    Attributes:
        policy: Name of its CheckpointPolicy. Empty if it has lost the label.
        restarts: How often it has restarted, which is also the attempt of its current pods.
        deleted: Whether it is being deleted.
        finished: Whether it has ended.
        injected: Whether the webhook changed it when it was created, so that its pods know the operator.
        owner_uid: UID of the object that controls it, such as a TrainJob. Empty if there is none.
        job: The Job that the workload itself is. None if it makes Jobs.
        created_at: When it was created, in seconds since the epoch. 0 if the object does not say.
        failure_rules: What it does when one of its Jobs fails.
        created_with: Spec of the policy that it was created with, as JSON. Empty if it does not say.
        in_place: Whether a pod that is made anew restarts all others in place.
    """

    policy: str
    restarts: int
    deleted: bool
    finished: bool
    injected: bool
    owner_uid: str = ""
    job: Job | None = None
    created_at: float = 0.0
    failure_rules: tuple[FailureRule, ...] = ()
    created_with: str = ""
    in_place: bool = False

    @property
    def queued_as(self) -> tuple[str, ...]:
        """UIDs of the objects to which Kueue's Workload of it may belong: itself, or what controls it."""
        return (self.uid, self.owner_uid) if self.owner_uid else (self.uid,)

    def ends_with(self, replicated_job: str, job: Job) -> bool:
        """Returns whether it ends or restarts as a whole when one pod of that Job of it is disrupted."""
        return self.in_place or any(
            not restarts_alone(self.failure_rules, replicated_job, failure) for failure in job.failures
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """A Job of a workload.

    Attributes:
        workload_uid: UID of the workload. Empty if it belongs to none.
        deleted: Whether it is being deleted.
        finished: Whether it has ended, or is being brought to its end (FailureTarget).
        completions: Number of its pods, whose indices are smaller. None if the Job does not say.
        failed: Whether it has failed, or is being brought to that end.
        failures: How it may fail when one more of its pods is disrupted. Empty if it makes another pod.
    """

    namespace: str
    name: str
    uid: str
    workload_uid: str
    deleted: bool
    finished: bool
    completions: int | None
    failed: bool = False
    failures: tuple[JobFailure, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class WorkloadMaker:
    """A kind whose controller makes one workload, of the same name, from each of its objects.

    Attributes:
        name: The kind in the API, as users and owner references write it.
        kind: Where the objects are in the API.
        makes: The type of the workloads.
    """

    name: str
    kind: Kind
    makes: WorkloadType


def created_with(meta: Mapping[str, Any]) -> str:
    """Returns what the metadata of a workload say of the policy that it was created with. Empty if they say nothing.

    Tenants may write there as much as they like, and it is kept for each workload. What is longer than any spec of the
    webhook does not count.
    """
    said = text((meta.get("annotations") or {}).get(CREATED_WITH) or "")
    return said if len(said) <= _LONGEST_CREATED_WITH else ""


class WorkloadType(Protocol):
    """One kind of workload: where its objects are, and how they and the labels of their pods are read.

    An implementation is pure. Callers watch ``kind`` with ``selector``, and the pods with the label of the policy. To
    look afresh, they read the object of ``kind``, and the Jobs of its pods if it makes Jobs.

    Attributes:
        name: The kind in the API, as users and owner references write it.
        kind: Where the objects are in the API.
        selector: The label selector with which the objects are watched.
        makes_jobs: False if such a workload is itself the Job of its pods.
    """

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def selector(self) -> str: ...

    @property
    def makes_jobs(self) -> bool: ...

    def read(self, body: Mapping[str, Any]) -> Workload:
        """Reads an object as the API server gives it.

        Raises:
            Unreadable: It is not of this kind.
        """

    def membership(self, labels: Mapping[str, str]) -> Membership | None:
        """The workload to which a Job or pod with these labels belongs. None if it belongs to none of this kind."""

    def name_in(self, labels: Mapping[str, str]) -> str | None:
        """The name of the workload that a pod's labels tell. None if it is of another kind."""

    def may_have_made(self, workload_name: str, pod_name: str) -> bool:
        """Whether a pod of this name may belong to a workload of that name, by the way in which pods are named."""

    def record_labels(self, name: str, uid: str) -> dict[str, str]:
        """Labels that the pods of a workload have. Its Preemptions have them too, so that a user finds them."""


def read_job(body: Mapping[str, Any], membership: Membership) -> Job:
    """Reads a Job of a workload.

    Raises:
        Unreadable: It is not a Job.
    """
    with reading("a Job"):
        meta, status = body["metadata"], body.get("status") or {}
        spec = body.get("spec") or {}
        completions = optional_number(spec.get("completions"), None)
        failed_pods, conditions = int(optional_number(status.get("failed"), 0)), true_conditions(status).keys()
        return Job(
            namespace=text(meta["namespace"]),
            name=text(meta["name"]),
            uid=text(meta["uid"]),
            workload_uid=membership.workload_uid,
            deleted="deletionTimestamp" in meta,
            finished=bool(_FINISHED_JOB & conditions),
            completions=None if completions is None else int(completions),
            failed=bool(_FAILED_JOB & conditions),
            failures=shared(tuple(item for item in failures_at_disruption(spec, failed_pods) if item is not None)),
        )
