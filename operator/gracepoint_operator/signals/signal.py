"""What marks mean for a pod: signals. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from gracepoint.wire.messages import Confidence
from gracepoint_operator.kube.objects import Pod
from gracepoint_operator.resources import SignalKind
from gracepoint_operator.signals.matching import Mark
from gracepoint_operator.signals.rows import Cause, On

#: What is further ahead starts no epoch yet: until then it may be moved or called off without anybody's noticing.
HORIZON_S = 3600.0

#: Texts of signals that the gang reported: one that only it had, and one of which this operator was told by nobody
#: else any more, since all replicas that had seen it ended before one could record it.
TOLD_BY_GANG = "SIGTERM, as the gang reports"
TOLD_BEFORE = "a notice without a record, as the gang reports"
#: The gang knows of these already, so nobody is told of them.
KNOWN_TO_GANG = frozenset({TOLD_BY_GANG, TOLD_BEFORE})


@dataclasses.dataclass(frozen=True)
class Signal:
    """A sign that a pod is going to be disrupted.

    Attributes:
        mark: Which of the marks this is; see ``reading.Mark``.
        cause: One of ``Cause``, or what somebody who asks for it calls it.
        text: For people: what was seen, e.g. "taint cloud.google.com/impending-node-termination:NoSchedule".
        cancelable: True if it may go away again, which retracts the notice.
        lead_s: Seconds from its beginning to the deadline, where no time was told.
        grace_s: The part of these that is the pod's grace period.
        limit: It is a time limit, set before.
        until_at: The time that was told, in seconds since the epoch; None where none was.
        lasting: It may have been there when the pod was bound: then the pod was put there all the same, and would be
            again.
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

    def deadline_at(self, since_at: float) -> float:
        """When the pod will be gone; a told time that was over when the signal began tells nothing."""
        told = self.until_at is not None and self.until_at >= since_at
        return self.until_at if told and self.until_at is not None else since_at + self.lead_s

    @property
    def stays(self) -> bool:
        """True if the gang is to save and train on: leaving would only begin its time anew."""
        return self.cause is Cause.TIME_LIMIT

    def is_far(self, since_at: float, now: float) -> bool:
        """True if it is too far ahead to start an epoch.

        A grace period is no announcement: it may run already, or be cut short.
        """
        at = self.deadline_at(since_at)
        return (at if at == self.until_at else at - self.grace_s) > now + HORIZON_S


def of_pod(pod: Pod, marks: Iterable[Mark]) -> list[Signal]:
    """What these marks mean for the pod; nothing for a pod that has finished.

    Args:
        pod: The pod.
        marks: All that concern it: its own and those on its node, Job, JobSet, ...
    """
    if pod.finished:
        return []
    marks = tuple(marks)
    told = {mark.row.name: mark.until_at for mark in marks if mark.until_at is not None}
    return [signal for mark in marks if (signal := _of_mark(pod, mark, told)) is not None]


def told_by_gang(pod: Pod, cause: str, text: str = TOLD_BY_GANG) -> Signal:
    """The signal of which only the gang itself knows: ``text`` is one of ``KNOWN_TO_GANG``."""
    known = Cause(cause) if cause in set(Cause) else Cause.POD_DELETION
    return Signal(SignalKind.POD_DELETION, "", known, text, pod.node, pod, Confidence.SURE, False, _grace_s(pod))


def marks_node(mark: Mark) -> bool:
    """True if the mark, of a node, says surely or likely that the node is going away, whoever tolerates it."""
    matched = mark.row.match.taint
    for_some = matched is not None and matched.key is None  # a taint as any other: it keeps off whom it is to keep off
    return mark.row.confidence is not Confidence.HINT and not for_some


def _of_mark(pod: Pod, mark: Mark, told: Mapping[str, float]) -> Signal | None:
    row, rule, tolerated_s = mark.row, mark.row.deadline, 0.0
    if mark.taint is not None and mark.taint.effect == "NoExecute":
        # The taint manager asks the first toleration that matches.
        toleration = next((item for item in pod.tolerations if item.tolerates(mark.taint)), None)
        if toleration is not None:
            if toleration.seconds is None and row.tolerable:
                return None
            tolerated_s = max(toleration.seconds or 0.0, 0.0)
    grace_s = _grace_s(pod) if rule.after_seconds is None else 0.0
    if rule.grace_cap_seconds is not None:
        grace_s = min(grace_s, rule.grace_cap_seconds)
    return Signal(
        kind=row.kind,
        mark=mark.id,
        cause=row.cause,
        text=mark.text,
        node=pod.node,
        pod=pod,
        confidence=row.confidence,
        cancelable=row.cancelable,
        lead_s=(tolerated_s if rule.tolerated else 0.0) + (rule.after_seconds or 0.0) + grace_s,
        grace_s=grace_s,
        until_at=mark.until_at if mark.until_at is not None else told.get(rule.row),
        lasting=row.match.kind is not On.POD and not row.limit,
        limit=row.limit,
    )


def _grace_s(pod: Pod) -> float:
    """The grace period of the deletion that is under way, else the pod's own."""
    return pod.grace_s if pod.deletion_grace_s is None else pod.deletion_grace_s
