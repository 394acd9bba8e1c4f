"""What marks mean for a pod: signals. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from gracepoint.wire.messages import Confidence
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.resources import SignalKind
from gracepoint_operator.signals.matching import Mark
from gracepoint_operator.signals.rows import Cause, On

#: A signal further ahead than this number of seconds starts no epoch yet, since it may still move or be cancelled.
HORIZON_S = 3600.0

#: Texts of signals that the gang reported: a SIGTERM that only the gang saw, and a notice of which there is no record,
#: because all replicas that had seen the signal ended before one of them could record it.
TOLD_BY_GANG = "SIGTERM, as the gang reports"
TOLD_BEFORE = "a notice without a record, as the gang reports"
#: The gang knows of these signals already, so no notice is sent for them.
KNOWN_TO_GANG = frozenset({TOLD_BY_GANG, TOLD_BEFORE})


@dataclasses.dataclass(frozen=True)
class Signal:
    """A sign that a pod is going to be disrupted.

    Attributes:
        kind: Its kind, as policies name it.
        mark: The id of the mark; see ``matching.Mark``.
        cause: One of ``Cause``, or the cause that a request names.
        text: Description for users, e.g. "taint cloud.google.com/impending-node-termination:NoSchedule".
        node: Name of the pod's node. Empty for a request.
        pod: The pod that it concerns.
        confidence: How certain it is that the pod will be killed.
        cancelable: Whether it may go away again, which retracts the notice.
        lead_s: Seconds from its beginning to the deadline, if ``until_at`` is None.
        grace_s: The part of ``lead_s`` that is the pod's grace period.
        limit: Whether it is a time limit that was set before.
        on: Kind of the object that shows it. None for an eviction, a request, or a report of the gang.
        until_at: The deadline that the object names, in seconds since the epoch. None if it names none.
        lasting: Whether it may have existed when the pod was bound. Such a signal does not count: the scheduler chose
            that node all the same, and would again.
    """

    kind: SignalKind
    mark: str
    cause: str
    text: str
    node: str
    pod: Pod
    confidence: Confidence
    cancelable: bool
    lead_s: float
    until_at: float | None = None
    lasting: bool = False
    grace_s: float = 0.0
    limit: bool = False
    on: On | None = None

    def deadline_at(self, since_at: float) -> float:
        """Returns when the pod will be gone. A named time before the beginning of the signal is ignored."""
        told = self.until_at is not None and self.until_at >= since_at
        return self.until_at if told and self.until_at is not None else since_at + self.lead_s

    @property
    def stays(self) -> bool:
        """True if the gang saves and continues to train: an exit would only start its time limit again."""
        return self.cause is Cause.TIME_LIMIT

    def is_far(self, since_at: float, now: float) -> bool:
        """Returns True if it is too far ahead to start an epoch."""
        return self.near_at(since_at) > now

    def near_at(self, since_at: float) -> float:
        """Returns from when on it is not too far ahead any more, in seconds since the epoch.

        The grace period is not counted as lead: it may have begun already, or be cut short.
        """
        at = self.deadline_at(since_at)
        return (at if at == self.until_at else at - self.grace_s) - HORIZON_S


def of_pod(pod: Pod, marks: Iterable[Mark]) -> list[Signal]:
    """Returns the signals that these marks are for a pod. Empty if the pod has finished.

    Args:
        pod: The pod.
        marks: All marks that concern it: its own and those on its node, Job, JobSet, ...
    """
    if pod.finished:
        return []
    marks = tuple(marks)
    told = {mark.row.name: mark.until_at for mark in marks if mark.until_at is not None}
    return [signal for mark in marks if (signal := _of_mark(pod, mark, told)) is not None]


def told_by_gang(pod: Pod, cause: str, text: str = TOLD_BY_GANG) -> Signal:
    """Returns the signal that the gang itself reported. ``text`` is one of ``KNOWN_TO_GANG``."""
    known = Cause(cause) if cause in set(Cause) else Cause.POD_DELETION
    return Signal(SignalKind.POD_DELETION, "", known, text, pod.node, pod, Confidence.SURE, False, _grace_s(pod))


def is_suspension(mark: Mark) -> bool:
    """Returns True if it is the suspension of a Job or JobSet itself, of which Kueue's Workload may tell the reason."""
    row = mark.row
    return row.kind is SignalKind.SUSPENSION and row.match.kind in (On.JOB, On.JOB_SET)


def marks_node(mark: Mark) -> bool:
    """Returns True if a mark on a node says, surely or likely, that the node goes away for all pods."""
    matched = mark.row.match.taint
    for_some = matched is not None and matched.key is None  # "any other taint": may be meant for some pods
    return mark.row.confidence is not Confidence.HINT and not for_some


def _of_mark(pod: Pod, mark: Mark, told: Mapping[str, float]) -> Signal | None:
    row, rule, tolerated_s, evicts = mark.row, mark.row.deadline, 0.0, False
    if mark.taint is not None and mark.taint.effect == "NoExecute":
        # The taint manager uses the first toleration that matches.
        tolerations = pod.tolerations if mark.tolerations is None else mark.tolerations
        toleration = next((item for item in tolerations if item.tolerates(mark.taint)), None)
        if toleration is not None:
            if toleration.seconds is None and row.tolerable:
                return None
            tolerated_s = max(toleration.seconds or 0.0, 0.0)
        evicts = toleration is None or toleration.seconds is not None
    grace_s = _grace_s(pod) if rule.after_seconds is None else 0.0
    if rule.grace_cap_seconds is not None:
        grace_s = min(grace_s, rule.grace_cap_seconds)
    lead_s = (tolerated_s if rule.tolerated else 0.0) + (rule.after_seconds or 0.0) + grace_s
    if evicts and tolerated_s + _grace_s(pod) < lead_s:  # what the row says comes later
        grace_s = _grace_s(pod)
        lead_s = tolerated_s + grace_s
    return Signal(
        kind=row.kind,
        mark=mark.id,
        cause=row.cause,
        text=mark.text,
        node=pod.node,
        pod=pod,
        confidence=row.confidence,
        cancelable=row.cancelable,
        lead_s=lead_s,
        grace_s=grace_s,
        until_at=mark.until_at if mark.until_at is not None else told.get(rule.row),
        lasting=row.match.kind is not On.POD and not row.limit,
        limit=row.limit,
        on=row.match.kind,
    )


def _grace_s(pod: Pod) -> float:
    """Returns the grace period of the deletion under way, or the pod's own."""
    return pod.grace_s if pod.deletion_grace_s is None else pod.deletion_grace_s
