"""The disruption catalogue: what in the cluster says that a pod is going to be disrupted. Data and pure code.

A row says how to recognise a signal and what it means: the cause, how certain it is, whether it may be taken
back, and by when the pod will be gone. ``of_pod`` matches the rows against one pod and its node.

Rows of confidence "hint" are known so that they are not taken for something else; alone they tell nobody.

Deadlines, and where they come from:

* GKE, ``impending-node-termination``: Spot and preemptible nodes get 30 s in all, of which the kubelet leaves
  user pods 15 s by default (cloud.google.com/kubernetes-engine/docs/concepts/spot-vms, "graceful node
  shutdown"); a longer terminationGracePeriodSeconds is cut to that.
* GKE, ``maintenance-window-started``: GPU and TPU nodes become NotReady 12 to 41 minutes later; the earliest
  counts.
* AWS ``spot-itn``: the interruption notice comes two minutes ahead
  (docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html). The other taints of
  the AWS Node Termination Handler carry no time.
* cluster-autoscaler: drains with the pod's own grace period, at most 600 s
  (``--max-graceful-termination-sec``).
* AKS: a Spot node is preempted 30 s after its scheduled event (learn.microsoft.com/azure/virtual-machines/
  linux/scheduled-events); other events leave more.
* Karpenter's ``karpenter.sh/disrupted`` and everything else without a known time: the pod's own grace period.
* ``NoExecute``: the taint manager deletes the pod once its tolerationSeconds are over, at once without; then
  the grace period runs (kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration). On a node that
  is not ready or unreachable nobody grants that grace period.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import StrEnum

from gracepoint.wire.messages import Confidence
from gracepoint_operator.objects import Node, Pod, Taint
from gracepoint_operator.resources import SignalKind


class Cause(StrEnum):
    """Why the pod is disrupted, in one word; part of the notice and of the Preemption."""

    SPOT_TERMINATION = "SpotTermination"  # the provider takes a spot or preemptible machine back
    MAINTENANCE = "Maintenance"  # the provider repairs, updates or moves the machine
    SCALE_DOWN = "ScaleDown"  # an autoscaler removes the node
    REBALANCE = "Rebalance"  # the provider recommends to leave
    DRAIN = "Drain"  # the pod is evicted through the Eviction API
    PRIORITY_PREEMPTION = "PriorityPreemption"  # a pod of higher priority needs the place
    NODE_TAINT = "NodeTaint"  # a NoExecute taint that the pod does not tolerate
    NODE_LOST = "NodeLost"  # the node is gone, unreachable or out of service
    NODE_PRESSURE = "NodePressure"  # the kubelet ends the pod: pressure, or the node shuts down
    POD_DELETION = "PodDeletion"  # somebody deleted the pod, and neither its Job nor its JobSet


@dataclasses.dataclass(frozen=True)
class Signal:
    """A sign that a pod is going to be disrupted.

    Attributes:
        mark: Which of the marks on the pod or its node this is; see ``marks_of_node``.
        text: For people: what was seen, e.g. "taint cloud.google.com/impending-node-termination:NoSchedule".
        cancelable: True if it may go away again, which retracts the notice.
        lead_s: Seconds from its beginning to the deadline.
    """

    kind: SignalKind
    mark: str
    cause: Cause
    text: str
    node: str
    pod: Pod
    confidence: Confidence
    cancelable: bool
    lead_s: float


#: Deadline rule: the pod and the seconds that it tolerates the taint -> seconds from the taint's beginning.
Lead = Callable[[Pod, float], float]


def _grace(pod: Pod, tolerated_s: float) -> float:
    return pod.grace_s


def _capped(cap_s: float) -> Lead:
    return lambda pod, tolerated_s: min(pod.grace_s, cap_s)


def _fixed(lead_s: float) -> Lead:
    return lambda pod, tolerated_s: lead_s


def _tolerated(pod: Pod, tolerated_s: float) -> float:
    return tolerated_s


def _tolerated_and_grace(pod: Pod, tolerated_s: float) -> float:
    return tolerated_s + pod.grace_s


@dataclasses.dataclass(frozen=True)
class TaintRow:
    """One row of the catalogue. ``effect`` is matched only where the row names one.

    ``obeys_toleration``: a pod that tolerates the taint for good stays, so that it means nothing to it.
    """

    key: str
    cause: Cause
    confidence: Confidence
    cancelable: bool
    lead: Lead
    effect: str = ""
    obeys_toleration: bool = False

    def matches(self, taint: Taint) -> bool:
        return taint.key == self.key and self.effect in ("", taint.effect)


_SURE, _LIKELY, _HINT = Confidence.SURE, Confidence.LIKELY, Confidence.HINT
_NTH = "aws-node-termination-handler"

GKE_SPOT_GRACE_S = 15.0

TAINTS: tuple[TaintRow, ...] = (
    TaintRow(
        "cloud.google.com/impending-node-termination",
        Cause.SPOT_TERMINATION,
        _SURE,
        False,
        _capped(GKE_SPOT_GRACE_S),
    ),
    TaintRow("cloud.google.com/maintenance-window-started", Cause.MAINTENANCE, _SURE, False, _fixed(720.0)),
    TaintRow(f"{_NTH}/spot-itn", Cause.SPOT_TERMINATION, _SURE, False, _fixed(120.0)),
    TaintRow(f"{_NTH}/scheduled-maintenance", Cause.MAINTENANCE, _SURE, True, _grace),
    TaintRow(f"{_NTH}/asg-lifecycle-termination", Cause.SCALE_DOWN, _SURE, False, _grace),
    TaintRow(f"{_NTH}/rebalance-recommendation", Cause.REBALANCE, _HINT, True, _grace),
    TaintRow("karpenter.sh/disrupted", Cause.SCALE_DOWN, _SURE, False, _grace),
    TaintRow("ToBeDeletedByClusterAutoscaler", Cause.SCALE_DOWN, _SURE, False, _capped(600.0)),
    TaintRow("DeletionCandidateOfClusterAutoscaler", Cause.SCALE_DOWN, _HINT, True, _grace),
    TaintRow("remediator.kubernetes.azure.com/unschedulable", Cause.MAINTENANCE, _SURE, True, _fixed(30.0)),
    TaintRow("node.kubernetes.io/out-of-service", Cause.NODE_LOST, _SURE, False, _fixed(0.0), "NoExecute", True),
    TaintRow("node.kubernetes.io/not-ready", Cause.NODE_LOST, _LIKELY, True, _tolerated, "NoExecute", True),
    TaintRow("node.kubernetes.io/unreachable", Cause.NODE_LOST, _LIKELY, True, _tolerated, "NoExecute", True),
    TaintRow("node.kubernetes.io/unschedulable", Cause.DRAIN, _HINT, True, _grace),
)

#: Texts of signals that the gang reported: one that only it had, and one of which this operator was told by nobody
#: else any more, since all replicas that had seen it ended before one could record it.
TOLD_BY_GANG = "SIGTERM, as the gang reports"
TOLD_BEFORE = "a notice without a record, as the gang reports"
#: The gang knows of these already, so nobody is told of them.
KNOWN_TO_GANG = frozenset({TOLD_BY_GANG, TOLD_BEFORE})

#: Any other NoExecute taint, where the pod does not tolerate it for good.
_ANY_NO_EXECUTE = TaintRow("", Cause.NODE_TAINT, _SURE, True, _tolerated_and_grace, "NoExecute", obeys_toleration=True)

#: Reasons of the pod condition DisruptionTarget (k8s.io/api/core/v1, PodReason...).
DISRUPTION_REASONS: Mapping[str, Cause] = {
    "PreemptionByScheduler": Cause.PRIORITY_PREEMPTION,
    "DeletionByTaintManager": Cause.NODE_TAINT,
    "EvictionByEvictionAPI": Cause.DRAIN,
    "DeletionByPodGC": Cause.NODE_LOST,
    "TerminationByKubelet": Cause.NODE_PRESSURE,
}


def marks_of_node(node: Node) -> dict[str, float | None]:
    """What on the node may be a signal, each with the latest time at which it can have begun.

    A mark is equal for the same thing seen again and different for a new one: a taint that is put again with
    another value or time is a new mark. None: the API does not tell a time.
    """
    return {_taint_mark(node, taint): taint.added_at or node.taints_written_at for taint in node.taints}


def marks_of_pod(pod: Pod) -> dict[str, float | None]:
    """Like ``marks_of_node``, for a pod."""
    marks: dict[str, float | None] = {}
    if pod.disruption is not None:
        marks[_disruption_mark(pod)] = pod.disruption.since_at
    if pod.deletion_at is not None:
        marks[_deletion_mark(pod)] = pod.deletion_at - _deletion_grace(pod)
    return marks


def of_pod(pod: Pod, node: Node | None) -> list[Signal]:
    """All signals for one pod, those on its node included; none for a pod that has finished."""
    if pod.finished:
        return []
    signals = []
    if node is not None:
        signals += [signal for taint in node.taints if (signal := _of_taint(pod, node, taint)) is not None]
    if pod.disruption is not None:
        reason = pod.disruption.reason
        cause = DISRUPTION_REASONS.get(reason, Cause.POD_DELETION)
        text = f"condition DisruptionTarget ({reason})"
        signals.append(_on_pod(pod, SignalKind.DISRUPTION_TARGET, _disruption_mark(pod), cause, text))
    if pod.deletion_at is not None:
        text = "deletion of the pod"
        signals.append(_on_pod(pod, SignalKind.POD_DELETION, _deletion_mark(pod), Cause.POD_DELETION, text))
    return signals


def told_by_gang(pod: Pod, cause: str, text: str = TOLD_BY_GANG) -> Signal:
    """The signal of which only the gang itself knows: ``text`` is one of ``KNOWN_TO_GANG``."""
    known = Cause(cause) if cause in set(Cause) else Cause.POD_DELETION
    return Signal(SignalKind.POD_DELETION, "", known, text, pod.node, pod, _SURE, False, _deletion_grace(pod))


def is_disrupted(node: Node) -> bool:
    """True if a row of the catalogue says, surely or likely, that the node is going away."""
    return any(row.matches(taint) and row.confidence is not _HINT for taint in node.taints for row in TAINTS)


def _on_pod(pod: Pod, kind: SignalKind, mark: str, cause: Cause, text: str) -> Signal:
    return Signal(kind, mark, cause, text, pod.node, pod, _SURE, False, _deletion_grace(pod))


def _of_taint(pod: Pod, node: Node, taint: Taint) -> Signal | None:
    row = next((row for row in TAINTS if row.matches(taint)), None)
    tolerated_s = 0.0
    if taint.effect == "NoExecute":
        # The taint manager asks the first toleration that matches.
        toleration = next((item for item in pod.tolerations if item.tolerates(taint)), None)
        if toleration is not None:
            if toleration.seconds is None and (row is None or row.obeys_toleration):
                return None
            tolerated_s = max(toleration.seconds or 0.0, 0.0)
        row = row or _ANY_NO_EXECUTE
    if row is None:
        return None
    return Signal(
        kind=SignalKind.NODE_TAINT,
        mark=_taint_mark(node, taint),
        cause=row.cause,
        text=f"taint {taint.key}:{taint.effect}",
        node=node.name,
        pod=pod,
        confidence=row.confidence,
        cancelable=row.cancelable,
        lead_s=row.lead(pod, tolerated_s),
    )


def _deletion_grace(pod: Pod) -> float:
    return pod.grace_s if pod.deletion_grace_s is None else pod.deletion_grace_s


def _taint_mark(node: Node, taint: Taint) -> str:
    return f"{node.uid}/taint/{taint.key}={taint.value}:{taint.effect}@{taint.added_at or ''}"


def _disruption_mark(pod: Pod) -> str:
    return f"{pod.uid}/DisruptionTarget/{pod.disruption.reason if pod.disruption else ''}"


def _deletion_mark(pod: Pod) -> str:
    return f"{pod.uid}/deletion"
