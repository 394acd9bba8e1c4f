"""What the operator needs to know of nodes, pods, Jobs and JobSets: small frozen records read from the API.

Pure. Everything that is decided is decided on these, so that no rule depends on the shape of API objects.
Times are seconds since the epoch (``_at``), durations seconds (``_s``).
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterable, Mapping
from typing import Any

from gracepoint.wire import names
from gracepoint_operator.unreadable import Unreadable, reading

LABEL_JOB_NAME = "batch.kubernetes.io/job-name"
LABEL_JOB_UID = "batch.kubernetes.io/controller-uid"
LABEL_COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
DEFAULT_GRACE_S = 30.0  # terminationGracePeriodSeconds where the API server filled in nothing

_SPOT_LABELS = ("cloud.google.com/gke-spot", "cloud.google.com/gke-preemptible")
_FINISHED_JOB = {"Complete", "Failed", "SuccessCriteriaMet", "FailureTarget"}
_FINISHED_JOBSET = {"Completed", "Failed"}


@dataclasses.dataclass(frozen=True)
class Taint:
    """A taint of a node.

    Attributes:
        added_at: ``timeAdded``; only NoExecute taints usually have it.
    """

    key: str
    value: str
    effect: str
    added_at: float | None


@dataclasses.dataclass(frozen=True)
class Node:
    """A node.

    Attributes:
        spot: True for GKE's Spot and preemptible nodes, which cut the grace period of pods.
    """

    name: str
    uid: str
    spot: bool


@dataclasses.dataclass(frozen=True)
class Toleration:
    """A toleration of a pod; ``seconds`` None means forever."""

    key: str
    operator: str
    value: str
    effect: str
    seconds: float | None

    def tolerates(self, taint: Taint) -> bool:
        """As ``Toleration.ToleratesTaint`` of k8s.io/api/core/v1."""
        if self.effect not in ("", taint.effect) or self.key not in ("", taint.key):
            return False
        return self.operator == "Exists" or self.value == taint.value


@dataclasses.dataclass(frozen=True)
class Pod:
    """A pod of a JobSet.

    Attributes:
        bound_at: When the scheduler bound it to ``node``; None while unbound or not told.
        deletion_at: When it will have been killed (``deletionTimestamp``, which includes the grace period).
        deletion_grace_s: The grace period of that deletion.
        phase: As in the status: Pending, Running, Succeeded or Failed.
        ready: The condition Ready.
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

    @property
    def finished(self) -> bool:
        """True once all its containers have ended for good."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def workload_uid(self) -> str:
        return self.labels.get(names.JOBSET_LABEL_UID, "")

    @property
    def restart_attempt(self) -> int:
        """-1 where the label is no number: then the pod is of no attempt."""
        return _whole(self.labels.get(names.JOBSET_LABEL_RESTART_ATTEMPT, "0"), -1)

    @property
    def replicated_job(self) -> str:
        return self.labels.get(names.JOBSET_LABEL_REPLICATED_JOB, "")

    @property
    def job_name(self) -> str:
        return self.labels.get(LABEL_JOB_NAME, "")

    @property
    def job_uid(self) -> str:
        """Empty where it does not say."""
        return self.labels.get(LABEL_JOB_UID, "")

    @property
    def policy(self) -> str:
        return self.labels.get(names.LABEL_POLICY, "")

    @property
    def completion_index(self) -> int:
        """Its place in its Job; 0 where it has none."""
        return _whole(self.labels.get(LABEL_COMPLETION_INDEX, "0"), 0)


@dataclasses.dataclass(frozen=True)
class Job:
    """A Job of a JobSet. ``finished`` also while it is still being brought to its end (FailureTarget).

    ``completions``: how many pods it is of, where it says so; their indices are smaller.
    """

    namespace: str
    name: str
    uid: str
    workload_uid: str
    deleted: bool
    finished: bool
    completions: int | None


@dataclasses.dataclass(frozen=True)
class Named:
    """Which object of a kind is meant."""

    namespace: str
    name: str
    uid: str


@dataclasses.dataclass(frozen=True)
class Workload(Named):
    """A JobSet. ``restarts`` is also the attempt of its current pods.

    ``policy``: empty where it has lost the label. ``injected``: the webhook saw it at its creation, so that its pods
    know the operator.
    """

    policy: str
    restarts: int
    deleted: bool
    finished: bool
    injected: bool


def read_taint(entry: Mapping[str, Any]) -> Taint:
    """An entry of a node's ``spec.taints``.

    Raises:
        Unreadable: It is none.
    """
    with reading("a taint"):
        return Taint(
            key=_text(entry["key"]),
            value=_text(entry.get("value") or ""),
            effect=_text(entry.get("effect") or ""),
            added_at=parse_time(entry.get("timeAdded")),
        )


def read_node(body: Mapping[str, Any]) -> Node:
    """Reads a node.

    Raises:
        Unreadable: It is none.
    """
    with reading("a node"):
        meta = body["metadata"]
        labels = _labels(meta)
        return Node(
            name=_text(meta["name"]),
            uid=_text(meta["uid"]),
            spot=any(labels.get(label) == "true" for label in _SPOT_LABELS),
        )


def read_pod(body: Mapping[str, Any]) -> Pod:
    """Reads a pod.

    Raises:
        Unreadable: It is none.
    """
    with reading("a pod"):
        meta, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
        conditions = _conditions(status)
        scheduled = conditions.get("PodScheduled")
        return Pod(
            namespace=_text(meta["namespace"]),
            name=_text(meta["name"]),
            uid=_text(meta["uid"]),
            node=_text(spec.get("nodeName") or ""),
            labels=_labels(meta),
            created_at=parse_time(meta.get("creationTimestamp")) or 0.0,
            bound_at=parse_time(scheduled.get("lastTransitionTime")) if scheduled else None,
            grace_s=_number(spec.get("terminationGracePeriodSeconds"), DEFAULT_GRACE_S),
            tolerations=tuple(
                Toleration(
                    key=_text(item.get("key") or ""),
                    operator=_text(item.get("operator") or "Equal"),
                    value=_text(item.get("value") or ""),
                    effect=_text(item.get("effect") or ""),
                    seconds=_number(item.get("tolerationSeconds"), None),
                )
                for item in spec.get("tolerations") or ()
            ),
            deletion_at=parse_time(meta.get("deletionTimestamp")),
            deletion_grace_s=_number(meta.get("deletionGracePeriodSeconds"), None),
            phase=_text(status.get("phase") or "Pending"),
            ready="Ready" in conditions,
        )


def read_job(body: Mapping[str, Any]) -> Job:
    """Reads a Job.

    Raises:
        Unreadable: It is none.
    """
    with reading("a Job"):
        meta, status = body["metadata"], body.get("status") or {}
        completions = _number((body.get("spec") or {}).get("completions"), None)
        return Job(
            namespace=_text(meta["namespace"]),
            name=_text(meta["name"]),
            uid=_text(meta["uid"]),
            workload_uid=_labels(meta).get(names.JOBSET_LABEL_UID, ""),
            deleted="deletionTimestamp" in meta,
            finished=bool(_FINISHED_JOB & _conditions(status).keys()),
            completions=None if completions is None else int(completions),
        )


def read_jobset(body: Mapping[str, Any]) -> Workload:
    """Reads a JobSet.

    Raises:
        Unreadable: It is none.
    """
    with reading("a JobSet"):
        meta, status = body["metadata"], body.get("status") or {}
        replicated_jobs = (body.get("spec") or {}).get("replicatedJobs")
        return Workload(
            namespace=_text(meta["namespace"]),
            name=_text(meta["name"]),
            uid=_text(meta["uid"]),
            policy=_labels(meta).get(names.LABEL_POLICY, ""),
            restarts=int(_number(status.get("restarts"), 0)),
            deleted="deletionTimestamp" in meta,
            finished=bool(_FINISHED_JOBSET & _conditions(status).keys()) or bool(status.get("terminalState")),
            injected=any(names.LABEL_POLICY in labels for labels in _template_labels(replicated_jobs)),
        )


def parse_time(text: str | None) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None for none."""
    return None if not text else datetime.datetime.fromisoformat(text).timestamp()


def format_time(at: float) -> str:
    """RFC 3339 in UTC with microseconds, as the API's MicroTime."""
    moment = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _conditions(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The conditions that are True, by type."""
    return {_text(item["type"]): item for item in status.get("conditions") or () if item.get("status") == "True"}


def _template_labels(replicated_jobs: Any) -> Iterable[Mapping[str, str]]:
    """The labels of the pods that each replicatedJob makes."""
    for item in replicated_jobs or ():
        pod_template = item["template"]["spec"]["template"]
        yield _labels(pod_template.get("metadata") or {})


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise Unreadable(f"expected a text, found {value!r:.80}")
    return value


def _labels(meta: Mapping[str, Any]) -> dict[str, str]:
    return {_text(key): _text(value) for key, value in (meta.get("labels") or {}).items()}


def _number(value: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(number := float(value)):
        raise Unreadable(f"expected a number, found {value!r:.80}")
    return number


def _whole(label: str, default: int) -> int:
    """The number in a label, which has 63 characters at most."""
    return int(label) if label.isdecimal() and len(label) < 64 else default
