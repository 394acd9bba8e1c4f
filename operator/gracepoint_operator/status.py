"""What the cluster is told: statuses, conditions, Events; all reasons and messages in one place. Pure.

Stages of a Preemption's timings, seconds after the signal was first observed, in the order in which they
usually come:

    noticeSent   the notice was written to the streams of all pods of the gang
    firstAck, lastAck                      the first, and all, acknowledged it
    frozen, agreed, drained, written, durable, committed   as the primary process reports for the gang
    exited       every pod of the gang has ended
    podsBack     as many new pods are running
    restored, training                     the new gang has restored; has passed its first step
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence, Set

from gracepoint.wire.messages import Mode, Phase, Report, Resumption
from gracepoint_operator import signals
from gracepoint_operator.epochs import CONDITION_ENDED, Epoch, joined_status
from gracepoint_operator.objects import JobSet, Node, Pod
from gracepoint_operator.resources import (
    Acknowledgements,
    CheckpointPolicy,
    Condition,
    ConditionStatus,
    JobSetForecast,
    LastSave,
    PreemptionStatus,
    Replica,
    StageTiming,
)

CONDITION_READY = "Ready"
CONDITION_FITS_GRACE = "FitsGrace"
CONDITION_INJECTED = "Injected"

_FORECASTS = 50  # as many as the resource's schema allows

#: Who writes the Events.
EVENT_CONTROLLER = "gracepoint.dev/operator"

REASON_RESUMED = "Resumed"
_REASONS = {
    Phase.NOTICED: "PreemptionNoticed",
    Phase.COMMITTED: "CheckpointCommitted",
    Phase.PROMOTED: "SnapshotPromoted",
    Phase.RETRACTED: "PreemptionRetracted",
    Phase.EXPIRED: "PreemptionExpired",
    Phase.FAILED: "PreemptionFailed",
}
_WARNINGS = frozenset({Phase.EXPIRED, Phase.FAILED})


@dataclasses.dataclass(frozen=True)
class Note:
    """An Event to be."""

    reason: str
    message: str
    warning: bool = False


def note_of_phase(epoch: Epoch, phase: Phase) -> Note | None:
    """The Event of having reached ``phase``; None where that is no news for people."""
    reason = _REASONS.get(phase)
    if reason is None:
        return None
    spec, status = epoch.spec, epoch.status
    if phase is Phase.NOTICED:
        seconds = (spec.deadline - spec.observed_at).total_seconds()
        told = "the gang is told" if spec.mode is Mode.ENFORCE else "observed only"
        where = f" on {', '.join(spec.nodes[:5])}" if spec.nodes else ""
        text = f"{spec.cause}: {spec.signal}{where}, {seconds:.0f} s ahead; {told}"
    elif phase in (Phase.COMMITTED, Phase.PROMOTED):
        lost = "" if status.steps_lost is None else f", {status.steps_lost} steps lost"
        spare = "" if status.seconds_to_spare is None else f", {status.seconds_to_spare:.1f} s to spare"
        text = f"step {status.step} is saved{lost}{spare}"
    else:
        text = status.message or str(phase)
    return Note(reason, f"{epoch.name}: {text}", phase in _WARNINGS)


def note_of_resumption(epoch: Epoch) -> Note:
    """The Event of having restored."""
    return Note(REASON_RESUMED, f"{epoch.name}: training goes on from step {epoch.status.restored_step}")


def noticed(expected: int) -> PreemptionStatus:
    """A new epoch's status."""
    return PreemptionStatus(
        phase=Phase.NOTICED,
        message="the signal was seen",
        acknowledgements=Acknowledgements(expected=expected, received=0),
    )


def ended(status: PreemptionStatus, phase: Phase, message: str, now: float) -> PreemptionStatus:
    """The status after the operator itself ended the epoch; unchanged where it had ended."""
    after = PreemptionStatus(phase=phase, message=message, conditions=[_ended_condition(phase, message, now)])
    return joined_status(after, status)


def reported(epoch: Epoch, report: Report, notice_s: float, now: float) -> PreemptionStatus:
    """The status after a report of the primary process; unchanged where it is further on already.

    Args:
        epoch: As it was.
        report: Its stages are in seconds after the reporting process had the notice.
        notice_s: Seconds from the signal until that process was sent the notice.
        now: When the report came.
    """
    message = report.message[:1024] or str(report.phase)
    after = PreemptionStatus(
        phase=report.phase,
        message=message,
        ordinal=report.ordinal,
        step=report.step,
        bytes=report.bytes,
        processes=len(report.participants) or report.process_count,
        steps_lost=report.steps_lost,
        seconds_to_spare=None if report.seconds_to_spare is None else round(report.seconds_to_spare, 3),
        timings=[
            StageTiming(
                stage=stage,
                seconds=_seconds(notice_s + timing.max_s),
                p50_seconds=_seconds(timing.p50_s),
                max_seconds=_seconds(timing.max_s),
                time=_time(now),
            )
            for stage, timing in report.stages.items()
        ],
        conditions=[_ended_condition(report.phase, message, now)] if report.phase.ended else None,
    )
    return joined_status(after, epoch.status)


def with_stage(status: PreemptionStatus, stage: str, observed_at: float, at: float) -> PreemptionStatus:
    """The status with a stage that was reached at ``at``; unchanged where the stage is there."""
    timing = StageTiming(stage=stage, seconds=_seconds(at - observed_at), time=_time(at))
    return joined_status(PreemptionStatus(timings=[timing]), status)


def resumed(epoch: Epoch, resumption: Resumption, now: float) -> PreemptionStatus:
    """The status after the new gang restored or trained again. The first to say so counts."""
    stage = "training" if resumption.training else "restored"
    status = with_stage(epoch.status, stage, epoch.spec.observed_at.timestamp(), now - max(0.0, resumption.age_s))
    if status.restored_step is None and resumption.restored_step is not None:
        status = status.model_copy(update={"restored_step": resumption.restored_step})
    return status


def acknowledged(
    status: PreemptionStatus, own: Replica, laggards: Sequence[str], observed_at: float
) -> PreemptionStatus:
    """The status with the receipts of all replicas: their entries of the API, and our own as of now.

    ``laggards`` are the pods that this replica told and has not heard of. Listed only where no other replica
    told anyone, as their receipts may have gone there.
    """
    others = [replica for replica in status.replicas or () if replica.name != own.name]
    before = status.acknowledgements or Acknowledgements(expected=0, received=0)
    received = sum(replica.acknowledged for replica in (*others, own))
    known = before.laggards if own.told == 0 else [] if any(other.told for other in others) else laggards
    after = Acknowledgements(expected=max(before.expected, received), received=received, laggards=sorted(known)[:50])
    status = status.model_copy(update={"acknowledgements": after})
    told = [replica for replica in (*others, own) if replica.told_at is not None]
    if told and sum(replica.told for replica in told) >= after.expected:
        at = max(replica.told_at.timestamp() for replica in told if replica.told_at is not None)
        status = with_stage(status, "noticeSent", observed_at, at)
    times = [replica.acknowledged_at for replica in (*others, own) if replica.acknowledged_at is not None]
    if times and after.received >= after.expected:
        status = with_stage(status, "lastAck", observed_at, max(times).timestamp())
    return status


def readiness(policy: CheckpointPolicy, now: float) -> Condition:
    """The condition Ready of a policy that could be read."""
    message = "every signal is told to the JobSets that name this policy"
    if policy.spec.mode is Mode.OBSERVE:
        message = "signals are recorded and nobody is told (mode Observe)"
    elif not policy.spec.signals:
        message = "no kind of signal counts (spec.signals is empty)"
    return _condition(CONDITION_READY, ConditionStatus.TRUE, "Watching", message, policy, now)


def injection(policy: CheckpointPolicy, jobsets: Iterable[JobSet], now: float) -> Condition:
    """The condition Injected."""
    bare = [jobset.name for jobset in jobsets if not jobset.injected]
    if not bare:
        message = "every JobSet was given at its creation what its pods need to be told"
        return _condition(CONDITION_INJECTED, ConditionStatus.TRUE, "Injected", message, policy, now)
    message = (
        f"{len(bare)} JobSets were created before the policy or its label ({', '.join(bare[:5])}): their pods "
        "cannot be told; delete and create them again"
    )
    return _condition(CONDITION_INJECTED, ConditionStatus.FALSE, "CreatedBeforePolicy", message, policy, now)


def newest_forecasts(
    ours: Iterable[JobSetForecast], theirs: Iterable[JobSetForecast], jobset_uids: Set[str]
) -> list[JobSetForecast]:
    """What two replicas were told as one, so that both say the same: of each JobSet that is there the newest."""
    newest: dict[str, JobSetForecast] = {}
    for item in sorted((*theirs, *ours), key=lambda item: item.time):
        if item.uid in jobset_uids:
            newest[item.uid] = item
    kept = sorted(newest.values(), key=lambda item: item.time)[-_FORECASTS:]
    return sorted(kept, key=lambda item: item.name)


def fit(policy: CheckpointPolicy, worst: tuple[JobSetForecast, float] | None, now: float) -> Condition:
    """The condition FitsGrace.

    Args:
        policy: Whose condition it is.
        worst: Forecast and grace period of the gang with the least time to spare; None where no gang has sent a
            forecast.
        now: Seconds since the epoch.
    """
    if worst is None:
        message = "no JobSet has saved yet, so that nothing can be predicted"
        return _condition(CONDITION_FITS_GRACE, ConditionStatus.UNKNOWN, "NoForecast", message, policy, now)
    forecast, grace_s = worst
    need_s = needed_s(forecast)
    said = (
        f"JobSet {forecast.name}: {need_s:.1f} s needed (drain {forecast.drain_seconds:.1f} s + save "
        f"{forecast.save_seconds:.1f} s, times the margin {forecast.margin:g}), {grace_s:.0f} s granted"
    )
    if need_s <= grace_s:
        return _condition(CONDITION_FITS_GRACE, ConditionStatus.TRUE, "Fits", said, policy, now)
    said += "; raise terminationGracePeriodSeconds where the provider grants it, or use more processes"
    return _condition(CONDITION_FITS_GRACE, ConditionStatus.FALSE, "TooSlow", said, policy, now)


def needed_s(forecast: JobSetForecast) -> float:
    """Seconds that an emergency would take."""
    return (forecast.drain_seconds + forecast.save_seconds) * forecast.margin


def grace_s(pods: Iterable[Pod], nodes: Mapping[str, Node]) -> float | None:
    """The shortest grace period that any of the pods gets; None for no pods."""
    graces = []
    for pod in pods:
        node = nodes.get(pod.node)
        spot = node is not None and node.spot
        graces.append(min(pod.grace_s, signals.GKE_SPOT_GRACE_S) if spot else pod.grace_s)
    return min(graces, default=None)


def last_save(epochs: Iterable[Epoch]) -> LastSave | None:
    """The newest committed epoch."""
    saved = [epoch for epoch in epochs if epoch.phase is Phase.COMMITTED and epoch.status.step is not None]
    if not saved:
        return None
    newest = max(saved, key=lambda epoch: epoch.ended_at or 0.0)
    return LastSave(
        preemption=newest.name,
        job_set=newest.spec.job_set.name,
        step=newest.status.step or 0,
        time=_time(newest.ended_at or 0.0),
    )


def joined_conditions(ours: Iterable[Condition], theirs: Iterable[Condition]) -> list[Condition]:
    """Our conditions over theirs; the time of one whose status did not change stays."""
    joined = {condition.type: condition for condition in theirs}
    for condition in ours:
        known = joined.get(condition.type)
        if known is not None and known.status is condition.status:
            update = {"last_transition_time": known.last_transition_time}
            condition = condition.model_copy(update=update)
        joined[condition.type] = condition
    return list(joined.values())


def _ended_condition(phase: Phase, message: str, now: float) -> Condition:
    return Condition(
        type=CONDITION_ENDED,
        status=ConditionStatus.TRUE,
        reason=str(phase),
        message=message,
        last_transition_time=_time(now),
    )


def _condition(
    kind: str, status: ConditionStatus, reason: str, message: str, policy: CheckpointPolicy, now: float
) -> Condition:
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=_time(now).replace(microsecond=0),
        observed_generation=policy.generation,
    )


def _seconds(value: float) -> float:
    """Never below zero: clocks of two replicas may differ by a little."""
    return round(max(value, 0.0), 4)


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)
