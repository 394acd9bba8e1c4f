"""The status of a Preemption: how it follows from reports, receipts and the operator's own decisions. Pure.

The stages of a Preemption's timings, in seconds after the signal was first observed, in their usual order:

    noticeSent            the notice was sent to all pods of the gang
    firstAck, lastAck     the first receipt came; all receipts came
    frozen, agreed, drained, written, durable, committed
                          reported by the primary process for the gang
    exited                every pod of the gang has ended
    podsBack              as many new pods are running
    started, attaching    the new primary process has started; has called attach, after its imports
    joined                the new processes have joined each other
    restored, compiled    the restarted gang has restored a checkpoint; has the programs of its first step. With a
                          compilation beside the restore, either may be first
    training              it has passed its first step
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping

from gracepoint.wire.messages import Mode, Phase, Report, Resumption, Spent
from gracepoint_operator.decisions.statuses.phase_messages import phase_message, signal_message
from gracepoint_operator.model.missing_acks import Places, missing
from gracepoint_operator.model.preemption import CONDITION_ENDED, EndReason, PreemptionRecord, joined_status
from gracepoint_operator.resources import (
    Acknowledgements,
    Condition,
    ConditionStatus,
    PreemptionSpec,
    PreemptionStatus,
    Replica,
    StageTime,
)
from gracepoint_operator.signals import KNOWN_TO_GANG, Cause

#: False: the gang is not told to exit. Its reason says why.
CONDITION_EXITS = "Exits"
REASON_EXIT_BREAKER = "ExitBreakerOpen"
REASON_TIME_LIMIT = "TimeLimit"

#: A choice of the library: the newest snapshot is committed in place of the current step.
_PROMOTE = "Promote"


def is_told(epoch: PreemptionRecord) -> bool:
    """True if the operator sends notices: not in mode Observe, and not if the gang itself reported the preemption."""
    return epoch.spec.mode is not Mode.OBSERVE and epoch.spec.signal not in KNOWN_TO_GANG


def noticed(expected: int, spec: PreemptionSpec) -> PreemptionStatus:
    """Returns the status of a new epoch."""
    return PreemptionStatus(
        phase=Phase.NOTICED,
        message=signal_message(spec),
        acknowledgements=Acknowledgements(expected=expected, received=0),
        conditions=None if spec.exits else [exits_condition(spec)],
    )


def ended(status: PreemptionStatus, phase: Phase, reason: EndReason, message: str, now: float) -> PreemptionStatus:
    """Returns the status after the operator ended the epoch. Unchanged if it had ended before."""
    after = PreemptionStatus(phase=phase, message=message, conditions=[_ended_condition(reason, message, now)])
    return joined_status(after, status)


def reported(epoch: PreemptionRecord, report: Report, notice_s: float, now: float) -> PreemptionStatus:
    """Returns the status after a report of the primary process. Unchanged if it is further on already.

    Args:
        epoch: The epoch before the report.
        report: The report. Its stages are in seconds after the reporting process received the notice.
        notice_s: Seconds from the signal until the notice was sent to that process.
        now: When the report came, in seconds since the epoch.
    """
    message = (report.message or phase_message(report.phase, report))[:1024]
    if epoch.spec.mode is Mode.ENFORCE:
        # To the library, every epoch after which the gang trains on is a drill, so also one of a time limit.
        message = message.removeprefix("drill: ")
    after = PreemptionStatus(
        phase=report.phase,
        message=message,
        ordinal=report.ordinal,
        step=report.step,
        bytes=report.bytes,
        processes=len(report.participants) or report.process_count,
        choice=None if report.choice is None else report.choice[:32] or None,
        choice_reason=report.choice_reason[:1024] or None,
        steps_lost=report.steps_lost,
        seconds_to_spare=None if report.seconds_to_spare is None else round(report.seconds_to_spare, 3),
        timings=[
            StageTime(
                stage=stage,
                seconds=_seconds(notice_s + timing.max_s),
                p50_seconds=_seconds(timing.p50_s),
                max_seconds=_seconds(timing.max_s),
                time=_time(now),
            )
            for stage, timing in report.stages.items()
        ],
        conditions=[_ended_condition(str(report.phase), message, now)] if report.phase.ended else None,
    )
    return joined_status(after, epoch.status)


def with_stage(status: PreemptionStatus, stage: str, observed_at: float, at: float) -> PreemptionStatus:
    """Returns the status with a stage that was reached at ``at``. Unchanged if it has the stage."""
    timing = StageTime(stage=stage, seconds=_seconds(at - observed_at), time=_time(at))
    return joined_status(PreemptionStatus(timings=[timing]), status)


def resumed(epoch: PreemptionRecord, resumption: Resumption, now: float) -> PreemptionStatus:
    """Returns the status after the restarted gang has restored or trains again. The first report wins.

    Raises:
        pydantic.ValidationError: The restored step does not fit into a record.
    """
    observed_at = epoch.spec.observed_at.timestamp()
    reached = {"training" if resumption.training else "restored": now - max(0.0, resumption.age_s)}
    if resumption.spent is not None:
        reached = {**_of_the_start(resumption.spent, now), **reached}
    status = epoch.status
    for stage, at in reached.items():
        # A process may say any time; nothing came back before the signal.
        status = with_stage(status, stage, observed_at, max(observed_at, min(at, now)))
    # Validated, since a pod may report any number: the API server would refuse the record with a larger one forever.
    restored = PreemptionStatus(restored_step=resumption.restored_step)
    if status.restored_step is None:
        status = status.model_copy(update={"restored_step": restored.restored_step})
    return status


def proves_commit(epoch: PreemptionRecord, resumption: Resumption) -> bool:
    """Returns whether the restored step was saved for this epoch. Then its save was committed, whoever knows of that.

    The checkpoint says for which epoch it was saved. An older library, or processes that did not learn of the epoch
    from the operator, leave that open. Then the step that the gang was saving proves it, if this is the next start.
    It does not if an older snapshot was being committed, or if the gang trained on after a retraction: then steps may
    be lost.
    """
    step, saved_for = resumption.restored_step, resumption.saved_for
    if step is None or not epoch.may_be_committed:
        return False
    attempt = epoch.spec.restart_attempt
    if saved_for is not None and saved_for.preemption == epoch.name:
        return attempt is None or saved_for.restart_attempt == attempt
    # The number of restarts does not tell starts apart in which a workload was suspended, nor those of a Job.
    is_next = epoch.status.restored_step in (None, step)
    is_next &= attempt is None or resumption.restart_attempt <= attempt + 1
    trained_on = epoch.phase is Phase.RETRACTED
    return is_next and not trained_on and epoch.status.choice != _PROMOTE and epoch.status.step == step


def proven_committed(epoch: PreemptionRecord, resumption: Resumption, now: float) -> PreemptionStatus:
    """Returns the status of an epoch of which a resumption ``proves_commit``."""
    step = resumption.restored_step
    message = f"step {step} is saved, 0 steps lost: the next start has restored it. No report of the commit had arrived"
    after = PreemptionStatus(
        phase=Phase.COMMITTED,
        message=message,
        step=step,
        steps_lost=0,
        conditions=[_ended_condition(EndReason.NEXT_START_RESTORED, message, now)],
    )
    return joined_status(after, epoch.status)


def _of_the_start(spent: Spent, now: float) -> Mapping[str, float]:
    """Returns when the process reached each stage of its start, as it says. In seconds since the epoch."""
    attached_at = now - spent.now_s
    after_s = {
        "started": None if spent.age_s is None else -spent.age_s,
        "attaching": 0.0,
        "joined": spent.joined_s,
        "compiled": spent.compiled_s,
    }
    told = {stage: attached_at + seconds for stage, seconds in after_s.items() if seconds is not None}
    return {stage: at for stage, at in told.items() if math.isfinite(at)}


def own_entry(status: PreemptionStatus, own: Replica) -> Replica:
    """Returns the entry that a replica writes. Its numbers never decrease.

    A replica whose container was restarted has the same name, but does not know its earlier receipts.
    """
    before = next((entry for entry in status.replicas or () if entry.name == own.name), None)
    if before is None:
        return own
    told = Places([*before.told_pods, *own.told_pods])
    heard = Places([*before.acknowledged_pods, *own.acknowledged_pods])
    return Replica(
        name=own.name,
        told=max(before.told, own.told, len(told)),
        acknowledged=max(before.acknowledged, own.acknowledged, len(heard)),
        told_pods=told.lines(),
        acknowledged_pods=heard.lines(),
        told_at=_later(before.told_at, own.told_at),
        acknowledged_at=_later(before.acknowledged_at, own.acknowledged_at),
    )


def acknowledged(status: PreemptionStatus, names: Iterable[str], observed_at: float) -> PreemptionStatus:
    """Returns the status with the receipts of all replicas, computed from their entries.

    Each replica first writes its own entry, and then this sum for the same version of the object. So the last replica
    that writes sees all entries, and no count decreases. A process that got the notice from two replicas, and sent a
    receipt to both, counts once.

    Args:
        status: The status in the API.
        names: The known pods of the gang. Empty if no notice is sent.
        observed_at: When the signal was first observed, in seconds since the epoch.
    """
    entries = status.replicas or []
    before = status.acknowledgements or Acknowledgements(expected=0, received=0)
    told = Places(line for entry in entries for line in entry.told_pods)
    heard = Places(line for entry in entries for line in entry.acknowledged_pods)
    received = max([before.received, len(heard), *(entry.acknowledged for entry in entries)])
    # A pod stays listed until its receipt comes, even if it does not exist any more.
    known = [*names, *(laggard.pod for laggard in before.laggards)]
    after = Acknowledgements(
        expected=max(before.expected, received),
        received=received,
        laggards=missing(known, told, heard),
    )
    status = status.model_copy(update={"acknowledgements": after})
    told_times = [entry.told_at.timestamp() for entry in entries if entry.told_at is not None]
    if told_times and max([len(told), *(entry.told for entry in entries)]) >= after.expected:
        status = with_stage(status, "noticeSent", observed_at, max(told_times))
    heard_times = [entry.acknowledged_at.timestamp() for entry in entries if entry.acknowledged_at is not None]
    if heard_times and after.received >= after.expected:
        status = with_stage(status, "lastAck", observed_at, max(heard_times))
    return status


def exits_condition(spec: PreemptionSpec) -> Condition:
    breaker = spec.policy.spec.exit_breaker
    if spec.cause == Cause.TIME_LIMIT:
        reason = REASON_TIME_LIMIT
        message = "the gang saves and trains on: its time is limited, and an exit would start that time again"
    else:
        reason = REASON_EXIT_BREAKER
        message = (
            f"the gang saves and trains on: it has saved and left {breaker.saved_exits} times within "
            f"{breaker.within_seconds} s (the policy's exitBreaker); find out what disrupts it wherever it starts"
        )
    return Condition(
        type=CONDITION_EXITS,
        status=ConditionStatus.FALSE,
        reason=reason,
        message=message,
        last_transition_time=spec.observed_at,
    )


def _ended_condition(reason: str, message: str, now: float) -> Condition:
    return Condition(
        type=CONDITION_ENDED,
        status=ConditionStatus.TRUE,
        reason=reason,
        message=message,
        last_transition_time=_time(now),
    )


def _seconds(value: float) -> float:
    """Never below zero: clocks of two replicas may differ by a little."""
    return round(max(value, 0.0), 4)


def _later(one: datetime.datetime | None, other: datetime.datetime | None) -> datetime.datetime | None:
    return max((at for at in (one, other) if at is not None), default=None)


def _time(at: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(at, datetime.UTC)
