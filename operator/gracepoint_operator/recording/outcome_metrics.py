"""What a preemption comes to in the metrics.

Called by the recorder right after a write that moved the phase. The API server takes such a write only of the version
that was read, so of two replicas one alone gets it through, and what is counted here is counted once for each
preemption: sums over the replicas are right. No state.
"""

from __future__ import annotations

from gracepoint.wire.messages import Phase
from gracepoint_operator import signals
from gracepoint_operator.decisions import preemption_status
from gracepoint_operator.model.preemption import EndReason, PreemptionRecord
from gracepoint_operator.observability.metrics import Metrics

#: The cause of all requests whose cause is none of the catalogue's.
REQUESTED = "Requested"
#: Part of an emergency -> the stages that it lies between.
PARTS = {
    "agreement": ("frozen", "agreed"),
    "drain": ("agreed", "drained"),
    "save": ("drained", "durable"),
    "commit": ("durable", "committed"),
}


def count(metrics: Metrics, before: PreemptionRecord, after: PreemptionRecord, *, pods_live: bool) -> None:
    """Counts what the move from one recorded state to the next says.

    Args:
        metrics: Are counted in.
        before: As the API had it.
        after: As it was written, in another phase.
        pods_live: Whether a pod that the signals were about lives on.
    """
    cause, phase = _cause(after), after.phase
    if phase is not Phase.NOTICED:
        metrics.phases.labels(phase=phase, cause=cause).inc()
    if before.status.phase is None:
        # Every preemption begins so, also one that is further on when it is written for the first time.
        metrics.phases.labels(phase=Phase.NOTICED, cause=cause).inc()
        lead_s = (after.spec.deadline - after.spec.observed_at).total_seconds()
        metrics.lead_s.labels(cause=cause).observe(max(lead_s, 0.0))
    if not phase.ended:
        return
    if phase in (Phase.COMMITTED, Phase.PROMOTED):
        _count_save(metrics, after)
    if _was_false_alarm(after, pods_live=pods_live):
        metrics.false_alarms.labels(cause=cause, phase=phase).inc()


def count_receipts(metrics: Metrics, before: PreemptionRecord, after: PreemptionRecord) -> None:
    """Counts the receipts that did not come, once none is to come any more; for every write, whatever it changed."""
    receipts = after.status.acknowledgements
    if preemption_status.is_told(after) and receipts is not None and _is_settled(after) and not _is_settled(before):
        metrics.undelivered.inc(max(receipts.expected - receipts.received, 0))


def _was_false_alarm(epoch: PreemptionRecord, *, pods_live: bool) -> bool:
    """True if what the signals said did not happen. A rehearsal says nothing, and one that gave way to a disruption
    that asks for more, or whose workload ended first, was none."""
    if epoch.is_rehearsal:
        return False
    return epoch.end_reason == EndReason.SIGNAL_WENT_AWAY or (epoch.phase is Phase.EXPIRED and pods_live)


def _is_settled(epoch: PreemptionRecord) -> bool:
    """True when it is over for the gang as well: replicas write down receipts up to a second late."""
    return epoch.phase.ended and (not epoch.leaves or epoch.timing("exited") is not None)


def _cause(epoch: PreemptionRecord) -> str:
    """As a label. Who makes requests may write any word, and each one would be another time series."""
    cause = epoch.spec.cause
    return cause if cause in {str(known) for known in signals.Cause} else REQUESTED


def _count_save(metrics: Metrics, epoch: PreemptionRecord) -> None:
    status = epoch.status
    for part, (begin, end) in PARTS.items():
        began_s, ended_s = epoch.timing(begin), epoch.timing(end)
        if began_s is not None and ended_s is not None:
            metrics.emergency_s.labels(part=part).observe(max(ended_s - began_s, 0.0))
    if status.seconds_to_spare is not None:
        metrics.spare_s.observe(status.seconds_to_spare)
    metrics.steps_lost.inc(status.steps_lost or 0)
