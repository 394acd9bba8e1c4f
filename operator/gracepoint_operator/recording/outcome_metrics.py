"""Counts the outcome of preemptions in the metrics.

The preemption writer calls it right after a write that changed the phase. The API server accepts such a write only for
the version that was read, so only one of two replicas succeeds, and each preemption is counted once: sums over the
replicas are right. It has no state.
"""

from __future__ import annotations

from gracepoint.wire.messages import Mode, Phase
from gracepoint_operator import signals
from gracepoint_operator.decisions.statuses import preemption_status
from gracepoint_operator.model.preemption import EndReason, PreemptionRecord
from gracepoint_operator.observability.metrics import Metrics

#: The label for requests whose cause is not in the catalogue.
REQUESTED = "Requested"
#: Part of an emergency save -> the stages at which it begins and ends.
PARTS = {
    "agreement": ("frozen", "agreed"),
    "drain": ("agreed", "drained"),
    "save": ("drained", "durable"),
    "commit": ("durable", "committed"),
}


def begin(metrics: Metrics) -> None:
    """Shows the series of losses as 0: Prometheus sees no increase in a series that begins with 1.

    An alert reads those of mode Enforce, and failed drills are counted by those of mode Drill.
    """
    for cause in (*signals.Cause, REQUESTED):
        for phase in (Phase.EXPIRED, Phase.FAILED):
            for mode in (Mode.ENFORCE, Mode.DRILL):
                metrics.phases.labels(phase=phase, cause=cause, mode=mode)


def count(metrics: Metrics, before: PreemptionRecord, after: PreemptionRecord, *, pods_live: bool) -> None:
    """Counts the change from one recorded state to the next.

    Args:
        metrics: The metrics.
        before: The record before the write.
        after: The record that was written, in another phase.
        pods_live: True if a pod that the signals were about still runs.
    """
    cause, phase, mode = _cause(after), after.phase, after.spec.mode
    if phase is not Phase.NOTICED:
        metrics.phases.labels(phase=phase, cause=cause, mode=mode).inc()
    if before.status.phase is None:
        # Every preemption begins as Noticed, also one that is written for the first time in a later phase.
        metrics.phases.labels(phase=Phase.NOTICED, cause=cause, mode=mode).inc()
        lead_s = (after.spec.deadline - after.spec.observed_at).total_seconds()
        metrics.lead_s.labels(cause=cause).observe(max(lead_s, 0.0))
    if not phase.ended:
        return
    if phase in (Phase.COMMITTED, Phase.PROMOTED):
        _count_save(metrics, after)
    if _was_false_alarm(after, pods_live=pods_live):
        metrics.false_alarms.labels(cause=cause, phase=phase).inc()


def count_receipts(metrics: Metrics, before: PreemptionRecord, after: PreemptionRecord) -> None:
    """Counts missing acknowledgements once no more are expected. Call it after every write."""
    receipts = after.status.acknowledgements
    if preemption_status.is_told(after) and receipts is not None and _is_settled(after) and not _is_settled(before):
        metrics.undelivered.inc(max(receipts.expected - receipts.received, 0))


def _was_false_alarm(epoch: PreemptionRecord, *, pods_live: bool) -> bool:
    """True if what the signals announced did not happen.

    A requested drill announces nothing. A preemption that gave way to another one, or whose workload was deleted or
    finished first, was no false alarm.
    """
    if epoch.is_rehearsal:
        return False
    return epoch.end_reason == EndReason.SIGNAL_WENT_AWAY or (epoch.phase is Phase.EXPIRED and pods_live)


def _is_settled(epoch: PreemptionRecord) -> bool:
    """True when it is over for the gang too: replicas record acknowledgements up to a second late."""
    return epoch.phase.ended and (not epoch.leaves or epoch.timing("exited") is not None)


def _cause(epoch: PreemptionRecord) -> str:
    """The cause as a label. A request may have any cause, and each would be another time series."""
    cause = epoch.spec.cause
    return cause if cause in {str(known) for known in signals.Cause} else REQUESTED


def _count_save(metrics: Metrics, epoch: PreemptionRecord) -> None:
    status = epoch.status
    for part, (begin, end) in PARTS.items():
        began_s, ended_s = epoch.timing(begin), epoch.timing(end)
        if began_s is not None and ended_s is not None:
            metrics.emergency_s.labels(part=part).observe(max(ended_s - began_s, 0.0))
    # Nothing is lost when a drill is late: its pods live on.
    if status.seconds_to_spare is not None and epoch.spec.mode is not Mode.DRILL:
        metrics.spare_s.observe(status.seconds_to_spare)
    metrics.steps_lost.inc(status.steps_lost or 0)
