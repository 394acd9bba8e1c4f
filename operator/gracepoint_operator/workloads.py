"""Workloads: the objects that run gangs, each kind behind one protocol.

A workload is the object that a user creates to run a gang: a JobSet, or a Job without a JobSet. The rest of the
operator uses the values here. Only the implementations of ``WorkloadType`` know the fields and labels of a kind.

What the end of a pod by a disruption means for its Job, and what the failure of a Job means for its JobSet, is here,
too. The controllers decide by rules, of which the first that matches counts: ``podFailurePolicy`` of a Job
(k8s.io/kubernetes/pkg/controller/job, pod_failure_policy.go), and ``failurePolicy`` of a JobSet (pkg/controllers,
failure_policy.go). The webhook asks when a JobSet is created; the operator asks of the objects as they are.

``model``, the packages above it and the command line call it to read workloads and their pods. It calls ``kube`` alone,
and is pure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from gracepoint.wire import names
from gracepoint_operator.kube import objects
from gracepoint_operator.kube.objects import (
    JOBS,
    LABEL_JOB_NAME,
    LABEL_JOB_UID,
    Kind,
    Membership,
    Pod,
    label_number,
    optional_number,
    owner_uid,
    parse_time,
    read_labels,
    shared,
    text,
    true_conditions,
)
from gracepoint_operator.read_errors import reading

Json = Mapping[str, Any]

#: Exit codes of a container that is ended by SIGTERM, and by SIGKILL.
_ENDED_BY_SIGNAL = (143, 137)
_DEFAULT_BACKOFF_LIMIT = 6
#: Actions that make one Job again and leave the others alone (JobSet 0.11 and newer).
_ALONE = frozenset({"RestartJob", "RestartJobAndIgnoreMaxRestarts"})
IN_PLACE = "InPlaceRestart"


@dataclasses.dataclass(frozen=True, slots=True)
class JobFailure:
    """How a Job fails: the reason and the message of its condition Failed."""

    reason: str
    message: str


@dataclasses.dataclass(frozen=True, slots=True)
class FailureRule:
    """A rule of a JobSet's failure policy. An empty tuple matches everything."""

    name: str
    action: str
    reasons: tuple[str, ...]
    patterns: tuple[str, ...]
    targets: tuple[str, ...]

    def matches(self, replicated_job: str, failure: JobFailure) -> bool:
        """Returns whether the rule is for such a failure of a Job."""
        return (
            (not self.targets or replicated_job in self.targets)
            and (not self.reasons or failure.reason in self.reasons)
            and (not self.patterns or any(_found(pattern, failure.message) for pattern in self.patterns))
        )


def failures_at_disruption(job: Json, failed: int = 0) -> list[JobFailure | None]:
    """Returns how a Job may fail when one of its pods is disrupted, for each way in which its containers may end.

    Args:
        job: Spec of the Job.
        failed: How many of its pods have failed before.

    Returns:
        None stands for a Job that continues: it makes another pod.
    """
    return [_failure(job, code, failed) for code in _ENDED_BY_SIGNAL]


def failure_rules(jobset: Json) -> tuple[FailureRule, ...]:
    """Returns the rules in the spec of a JobSet."""
    return tuple(
        FailureRule(
            str(rule.get("name") or ""),
            str(rule.get("action") or ""),
            tuple(map(str, rule.get("onJobFailureReasons") or ())),
            tuple(map(str, rule.get("onJobFailureMessagePatterns") or ())),
            tuple(map(str, rule.get("targetReplicatedJobs") or ())),
        )
        for rule in (jobset.get("failurePolicy") or {}).get("rules") or ()
    )


def restarts_in_place(jobset: Json) -> bool:
    """Returns whether a pod that is made again restarts the others in place. ``jobset``: its spec."""
    return bool((jobset.get("failurePolicy") or {}).get("restartStrategy") == IN_PLACE)


def action_at(rules: Iterable[FailureRule], replicated_job: str, failure: JobFailure) -> str:
    """Returns what a JobSet with these rules does at such a failure of a Job."""
    return next((rule.action for rule in rules if rule.matches(replicated_job, failure)), "RestartJobSet")


def restarts_alone(rules: Iterable[FailureRule], replicated_job: str, failure: JobFailure) -> bool:
    """Returns whether such a failure of a Job leaves the other Jobs of the JobSet alone."""
    return action_at(rules, replicated_job, failure) in _ALONE


def _failure(job: Json, exit_code: int, failed: int) -> JobFailure | None:
    action = _action(job, exit_code)
    if action == "Ignore":
        return None
    if action == "FailJob":
        message = f"Container ended with exit code {exit_code} matching FailJob rule"
        if not _matching(job, exit_code).get("onExitCodes"):
            message = "Pod has condition DisruptionTarget matching FailJob rule"
        return JobFailure("PodFailurePolicy", message)
    of_index = job.get("backoffLimitPerIndex")
    if action == "FailIndex" or of_index == 0:
        most = job.get("maxFailedIndexes")
        if most == 0:
            return JobFailure(
                "MaxFailedIndexesExceeded", "Job has exceeded the specified maximal number of failed indexes"
            )
        if int(job.get("completions") or 1) == 1:
            return JobFailure("FailedIndexes", "Job has failed indexes")
    # With a limit for each index, none for all of them is the default.
    limit = job.get("backoffLimit")
    if limit is None:
        limit = _DEFAULT_BACKOFF_LIMIT if of_index is None else failed + 1
    return (
        JobFailure("BackoffLimitExceeded", "Job has reached the specified backoff limit")
        if failed + 1 > limit
        else None
    )


def _action(job: Json, exit_code: int) -> str:
    return str(_matching(job, exit_code).get("action") or "Count")


def _matching(job: Json, exit_code: int) -> Json:
    """The first rule of the podFailurePolicy that matches a pod that is disrupted. Empty if there is none."""
    for rule in (job.get("podFailurePolicy") or {}).get("rules") or ():
        on_codes = rule.get("onExitCodes")
        if on_codes and (exit_code in (on_codes.get("values") or ())) is (on_codes.get("operator") == "In"):
            return dict(rule)
        for condition in rule.get("onPodConditions") or ():
            if condition.get("type") == "DisruptionTarget" and condition.get("status", "True") == "True":
                return dict(rule)
    return {}


def _found(pattern: str, message: str) -> bool:
    with contextlib.suppress(re.error):
        return re.search(pattern, message) is not None
    return False


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
        kind: Its kind in the API, for example JobSet. ``BY_NAME`` has its type.
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
        in_place: Whether a pod that is made again restarts all others in place.
        suspended: Whether it makes no pods now.
        job_count: How many Jobs it makes at once, before others that depend on them.
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
    suspended: bool = False
    job_count: int = 0

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
        pod_count: How many pods it has at a time.
        suspended: Whether it makes no pods now.
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
    pod_count: int = 1
    suspended: bool = False


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
    annotation = text((meta.get("annotations") or {}).get(CREATED_WITH) or "")
    return annotation if len(annotation) <= _LONGEST_CREATED_WITH else ""


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
        """The name of the workload that a pod's labels name. None if it is of another kind."""

    def may_have_made(self, workload_name: str, pod_name: str) -> bool:
        """Whether a pod of this name may belong to a workload of that name, by the way in which pods are named."""

    def record_labels(self, name: str, uid: str) -> dict[str, str]:
        """Labels that the pods of a workload have. Its Preemptions have them too, so that a user finds them."""


def read_member_job(body: Mapping[str, Any], membership: Membership) -> Job:
    """Reads a Job of a workload.

    Raises:
        Unreadable: It is not a Job.
    """
    with reading("a Job"):
        meta, status = body["metadata"], body.get("status") or {}
        spec = body.get("spec") or {}
        completions = optional_number(spec.get("completions"), None)
        parallel = int(optional_number(spec.get("parallelism"), 1 if completions is None else completions))
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
            pod_count=parallel if completions is None else min(parallel, int(completions)),
            suspended=spec.get("suspend") is True,
        )


#: The Jobs that are workloads. They are watched apart from the Jobs that workloads make, as their labels differ.
LONE_JOBS = Kind(JOBS.prefix, JOBS.plural, subset="alone")


class JobType:
    """A Job without a JobSet (batch/v1), with completion mode Indexed, as a workload.

    A Job of a JobSet is no workload: its JobSet is. The label that JobSet sets distinguishes the two.
    """

    name = "Job"
    kind = LONE_JOBS
    selector = f"{names.LABEL_POLICY},!{names.JOBSET_LABEL_UID}"
    makes_jobs = False

    def read(self, body: Mapping[str, Any]) -> Workload:
        with reading("a Job"):
            meta = body["metadata"]
            job = read_member_job(body, Membership(text(meta["uid"])))
            pod_template = (body.get("spec") or {}).get("template") or {}
            return Workload(
                kind=self.name,
                namespace=job.namespace,
                name=job.name,
                uid=job.uid,
                policy=read_labels(meta).get(names.LABEL_POLICY, ""),
                restarts=0,  # it replaces its pods one by one, without a number for the attempt
                deleted=job.deleted,
                finished=job.finished,
                injected=names.LABEL_POLICY in read_labels(pod_template.get("metadata") or {}),
                owner_uid=owner_uid(meta),
                created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
                job=job,
                created_with=created_with(meta),
                suspended=job.suspended,
            )

    def membership(self, labels: Mapping[str, str]) -> Membership | None:
        uid = labels.get(LABEL_JOB_UID)
        if not uid or names.LABEL_POLICY not in labels or labels.get(names.JOBSET_LABEL_UID):
            return None
        return Membership(uid)

    def name_in(self, labels: Mapping[str, str]) -> str | None:
        return None if names.JOBSET_LABEL_NAME in labels else labels.get(LABEL_JOB_NAME)

    def may_have_made(self, workload_name: str, pod_name: str) -> bool:
        # <job>-<completion index>-<five random characters>
        return pod_name.startswith(f"{workload_name}-")

    def record_labels(self, name: str, uid: str) -> dict[str, str]:
        # A name longer than a label's value allows is not a name of a Job of which pods can be made.
        return {LABEL_JOB_NAME: name, LABEL_JOB_UID: uid}


JOBSETS = Kind("/apis/jobset.x-k8s.io/v1alpha2", "jobsets")

_FINISHED = {"Completed", "Failed"}


class JobSetType:
    """JobSet (jobset.sigs.k8s.io, api/jobset/v1alpha2) as a workload."""

    name = "JobSet"
    kind = JOBSETS
    selector = names.LABEL_POLICY
    makes_jobs = True

    def read(self, body: Mapping[str, Any]) -> Workload:
        with reading("a JobSet"):
            meta, status = body["metadata"], body.get("status") or {}
            spec = body.get("spec") or {}
            replicated_jobs = spec.get("replicatedJobs")
            return Workload(
                kind=self.name,
                namespace=text(meta["namespace"]),
                name=text(meta["name"]),
                uid=text(meta["uid"]),
                policy=read_labels(meta).get(names.LABEL_POLICY, ""),
                restarts=int(optional_number(status.get("restarts"), 0)),
                deleted="deletionTimestamp" in meta,
                finished=bool(_FINISHED & true_conditions(status).keys()) or bool(status.get("terminalState")),
                injected=any(names.LABEL_POLICY in labels for labels in _pod_labels(replicated_jobs)),
                owner_uid=owner_uid(meta),
                created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
                failure_rules=failure_rules(spec),
                created_with=created_with(meta),
                in_place=restarts_in_place(spec),
                suspended=spec.get("suspend") is True,
                job_count=_jobs_at_once(spec),
            )

    def membership(self, labels: Mapping[str, str]) -> Membership | None:
        uid = labels.get(names.JOBSET_LABEL_UID)
        if not uid:
            return None
        return Membership(
            uid,
            label_number(labels.get(names.JOBSET_LABEL_RESTART_ATTEMPT, "0"), -1),
            labels.get(names.JOBSET_LABEL_REPLICATED_JOB, ""),
            label_number(labels.get(names.JOBSET_LABEL_JOB_INDEX, "0"), 0),
        )

    def name_in(self, labels: Mapping[str, str]) -> str | None:
        return labels.get(names.JOBSET_LABEL_NAME)

    def may_have_made(self, workload_name: str, pod_name: str) -> bool:
        # JobSet begins the names of its Jobs with its own name, and a Job those of its pods.
        return pod_name.startswith(f"{workload_name}-")

    def record_labels(self, name: str, uid: str) -> dict[str, str]:
        return {names.JOBSET_LABEL_NAME: name, names.JOBSET_LABEL_UID: uid}


def _jobs_at_once(jobset: Json) -> int:
    """How many Jobs a JobSet makes at once. Others follow when what they depend on is ready, or complete."""
    replicated_jobs = jobset.get("replicatedJobs") or ()
    in_order = (jobset.get("startupPolicy") or {}).get("startupPolicyOrder") == "InOrder"
    first = replicated_jobs[:1] if in_order else [item for item in replicated_jobs if not item.get("dependsOn")]
    return sum(int(optional_number(item.get("replicas"), 1)) for item in first)


def _pod_labels(replicated_jobs: Any) -> Iterator[Mapping[str, str]]:
    """The labels of the pods that each replicated Job makes."""
    for item in replicated_jobs or ():
        pod_template = item["template"]["spec"]["template"]
        yield read_labels(pod_template.get("metadata") or {})


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
    memberships = (workload_type.membership(labels) for workload_type in TYPES)
    return next((member for member in memberships if member is not None), Membership())


def place_in(labels: Mapping[str, str]) -> tuple[Kind, str]:
    """The kind and the name of the workload that a pod's labels name.

    Raises:
        KeyError: They name none.
    """
    for workload_type in TYPES:
        if (name := workload_type.name_in(labels)) is not None:
            return workload_type.kind, name
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
    return read_member_job(body, membership_of(labels))


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
