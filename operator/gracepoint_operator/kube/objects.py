"""What the operator needs to know about nodes and pods: small frozen records read from the API. Pure.

Decisions use these records, so that no rule depends on the shape of API objects. Times are seconds since the epoch
(``_at``), durations are seconds (``_s``). Workloads and their Jobs are read in ``workloads``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint.wire import names
from gracepoint_operator.kube import autoscaler_annotations
from gracepoint_operator.kube.fields import (
    label_number,
    object_name,
    optional_number,
    parse_time,
    read_labels,
    shared,
    text,
    true_conditions,
)
from gracepoint_operator.read_errors import reading

#: The label that the API server gives to every namespace: its name.
LABEL_NAMESPACE_NAME = "kubernetes.io/metadata.name"
LABEL_JOB_NAME = "batch.kubernetes.io/job-name"
LABEL_JOB_UID = "batch.kubernetes.io/controller-uid"
LABEL_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
DEFAULT_GRACE_S = 30.0  # terminationGracePeriodSeconds if the API server has not set it

_SPOT_LABELS = ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")


@dataclasses.dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node.

    Attributes:
        added_at: ``timeAdded``. Usually only NoExecute taints have it. None if it is missing.
    """

    key: str
    value: str
    effect: str
    added_at: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node.

    Attributes:
        spot: True for GKE's Spot and preemptible nodes, which cut the grace period of pods.
        holds_evictions: False if an administrator has said that nothing holds up evictions from it
            (``wire.names.LABEL_EVICTION_HOLD``).
    """

    name: str
    uid: str
    spot: bool
    holds_evictions: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace."""

    name: str
    uid: str
    labels: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration of a pod. If ``seconds`` is None, the taint is tolerated forever."""

    key: str
    operator: str
    value: str
    effect: str
    seconds: float | None

    def tolerates(self, taint: Taint) -> bool:
        """Returns whether it tolerates a taint, as ``Toleration.ToleratesTaint`` of k8s.io/api/core/v1."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or self.value == taint.value


@dataclasses.dataclass(frozen=True, slots=True)
class Membership:
    """Which workload a pod belongs to, as its labels say.

    Attributes:
        workload_uid: UID of the workload. Empty if the pod belongs to none.
        restart_attempt: How often the workload had restarted when the pod was made. -1 if the label is not a number:
            such a pod belongs to no attempt.
        replicated_job: Name of the part of the workload that makes it. Empty if the workload has no parts.
    """

    workload_uid: str = ""
    restart_attempt: int = 0
    replicated_job: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Pod:
    """A pod.

    Attributes:
        node: Name of its node. Empty while it has none.
        created_at: When it was created. 0 if the object does not say.
        bound_at: When the scheduler bound it to ``node``. None while it is not bound, or if the object does not say.
        grace_s: Its own grace period, in seconds.
        deletion_at: When it will have been killed (``deletionTimestamp``, which includes the grace period). None if it
            is not being deleted.
        deletion_grace_s: The grace period of that deletion. None if it is not being deleted.
        phase: As in the status: Pending, Running, Succeeded or Failed.
        ready: Whether its condition Ready is True.
        started_at: When the last of its containers was started. None while one was not.
        ended_at: When the last of its containers ended. None while one has not.
        membership: The workload to which it belongs.
        protection: Its annotations that autoscalers look at, and the operator's note about them.
    """

    namespace: str
    name: str
    uid: str
    node: str
    labels: Mapping[str, str]
    created_at: float
    bound_at: float | None
    grace_s: float
    tolerations: tuple[Toleration, ...]
    deletion_at: float | None
    deletion_grace_s: float | None
    phase: str
    ready: bool
    started_at: float | None
    ended_at: float | None
    membership: Membership
    protection: tuple[tuple[str, str], ...] = ()

    @property
    def finished(self) -> bool:
        """True if all its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def workload_uid(self) -> str:
        return self.membership.workload_uid

    @property
    def restart_attempt(self) -> int:
        return self.membership.restart_attempt

    @property
    def job_name(self) -> str:
        return self.labels.get(LABEL_JOB_NAME, "")

    @property
    def job_uid(self) -> str:
        """UID of its Job. Empty if the pod does not say."""
        return self.labels.get(LABEL_JOB_UID, "")

    @property
    def policy(self) -> str:
        return self.labels.get(names.LABEL_POLICY, "")

    @property
    def helps(self) -> bool:
        """True if it is no process of the gang: it loads data, or starts the others."""
        return self.labels.get(names.LABEL_ROLE) == names.ROLE_HELPER

    @property
    def replicated_job(self) -> str:
        return self.membership.replicated_job

    @property
    def completion_index(self) -> int:
        """The completion index of the pod in its Job. 0 if it has none."""
        return label_number(self.labels.get(LABEL_COMPLETION_INDEX, "0"), 0)


def read_taint(entry: Mapping[str, Any]) -> Taint:
    """Reads an entry of a node's ``spec.taints``.

    Raises:
        Unreadable: It is not a taint.
    """
    with reading("a taint"):
        return Taint(
            key=text(entry["key"]),
            value=text(entry.get("value") or ""),
            effect=text(entry.get("effect") or ""),
            added_at=parse_time(entry.get("timeAdded")),
        )


def read_node(body: Mapping[str, Any]) -> Node:
    """Reads a node.

    Raises:
        Unreadable: It is not a node.
    """
    with reading("a node"):
        meta = body["metadata"]
        labels = read_labels(meta)
        return Node(
            name=text(meta["name"]),
            uid=text(meta["uid"]),
            spot=any(labels.get(label) == "true" for label in _SPOT_LABELS),
            holds_evictions=labels.get(names.LABEL_EVICTION_HOLD) != names.EVICTION_HOLD_OFF,
        )


def read_namespace(body: Mapping[str, Any]) -> Namespace:
    """Reads a namespace.

    Raises:
        Unreadable: It is not a namespace.
    """
    with reading("a namespace"):
        meta = body["metadata"]
        return Namespace(name=text(meta["name"]), uid=text(meta["uid"]), labels=read_labels(meta))


def read_pod(body: Mapping[str, Any], membership_of: Callable[[Mapping[str, str]], Membership]) -> Pod:
    """Reads a pod.

    Args:
        body: The object as the API server gives it.
        membership_of: Finds the workload in the labels of a pod; see ``workloads``.

    Raises:
        Unreadable: It is not a pod.
    """
    with reading("a pod"):
        meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        conditions, labels = true_conditions(status), read_labels(meta)
        containers = [entry.get("state") or {} for entry in status.get("containerStatuses") or ()]
        scheduled = conditions.get("PodScheduled")
        return Pod(
            namespace=shared(text(meta["namespace"])),
            name=text(meta["name"]),
            uid=text(meta["uid"]),
            node=shared(object_name(spec.get("nodeName") or "")),
            labels=labels,
            created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
            bound_at=parse_time(scheduled.get("lastTransitionTime")) if scheduled else None,
            grace_s=optional_number(spec.get("terminationGracePeriodSeconds"), DEFAULT_GRACE_S),
            tolerations=shared(
                tuple(
                    Toleration(
                        key=text(item.get("key") or ""),
                        operator=text(item.get("operator") or "Equal"),
                        value=text(item.get("value") or ""),
                        effect=text(item.get("effect") or ""),
                        seconds=optional_number(item.get("tolerationSeconds"), None),
                    )
                    for item in spec.get("tolerations") or ()
                )
            ),
            deletion_at=parse_time(meta.get("deletionTimestamp")),
            deletion_grace_s=optional_number(meta.get("deletionGracePeriodSeconds"), None),
            phase=shared(text(status.get("phase") or "Pending")),
            ready="Ready" in conditions,
            started_at=_last([_time_of(state, "startedAt", "running", "terminated") for state in containers]),
            ended_at=_last([_time_of(state, "finishedAt", "terminated") for state in containers]),
            membership=shared(membership_of(labels)),
            protection=_protection(meta.get("annotations") or {}),
        )


def _protection(annotations: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    present = [key for key in autoscaler_annotations.READ if key in annotations]
    found: tuple[tuple[str, str], ...] = shared(tuple((key, text(annotations[key])) for key in present))
    return found


def _time_of(state: Mapping[str, Any], field: str, *names_of_states: str) -> float | None:
    """Returns a time in the state of a container, which has one entry. None if it is in another state."""
    return next((parse_time(state[name].get(field)) for name in names_of_states if state.get(name)), None)


def _last(times: Sequence[float | None]) -> float | None:
    """Returns the latest time. None if there are none, or one of them has not come."""
    known = [at for at in times if at is not None]
    return max(known) if known and len(known) == len(times) else None
