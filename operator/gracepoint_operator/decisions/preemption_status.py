"""The status of a Preemption: how it follows from reports, receipts and the operator's own decisions. Pure.

The stages of a Preemption's timings, in seconds after the signal was first observed, in their usual order:

    noticeSent            the notice was sent to all pods of the gang
    firstAck, lastAck     the first receipt came; all receipts came
    frozen, agreed, drained, written, durable, committed
                          reported by the primary process for the gang
    exited                every pod of the gang has ended
    unblocked             what the next start waited for is there: a node, an image, the end of a pod
    podsBack              as many new pods are running
    started, attaching    the new primary process has started; has called attach, after its imports
    joined                the new processes have joined each other
    restored, compiled    the restarted gang has restored a checkpoint; has the programs of its first step. With a
                          compilation during the restore, either may be first
    training              it has passed its first step
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import re
from collections.abc import Iterable, Mapping

from gracepoint.wire.messages import Mode, Phase, Report, Resumption, SavedFor, Spent, Stall
from gracepoint_operator.model.preemption_record import (
    CONDITION_ENDED,
    CONDITION_PROGRESSING,
    LEFT_BEFORE,
    EndReason,
    Places,
    PreemptionRecord,
    joined_status,
    missing,
)
from gracepoint_operator.resources import (
    Acknowledgements,
    CheckpointPolicy,
    Condition,
    ConditionStatus,
    PreemptionSpec,
    PreemptionStatus,
    Replica,
    StageTime,
)
from gracepoint_operator.signals import KNOWN_TO_GANG, Cause
from gracepoint_operator.workloads import ANY_PLURAL


def signal_message(spec: PreemptionSpec) -> str:
    """Describes the signal and what follows from it."""
    seconds = (spec.deadline - spec.observed_at).total_seconds()
    where = f" on {', '.join(spec.nodes[:5])}" if spec.nodes else ""
    return f"{spec.cause}: {spec.signal}{where}, {seconds:.0f} s ahead; {_request(spec)}"


def phase_message(phase: Phase, at: PreemptionStatus | Report) -> str:
    """Describes a phase that the gang has reached."""
    step, spare_s = at.step, at.seconds_to_spare
    match phase:
        case Phase.FROZEN:
            return "every process is held at its next sync point"
        case Phase.AGREED:
            # The step at that point is known when the processes have come there.
            return f"all processes save at their sync point {at.ordinal}"
        case Phase.DRAINED:
            return f"all processes have reached step {step}, and their devices are idle"
        case Phase.WRITTEN:
            return f"every process has written its part of step {step}"
        case Phase.DURABLE:
            return f"all parts of step {step} are on stable storage"
        case Phase.EVACUATED | Phase.COMMITTED | Phase.PROMOTED:
            lost = "" if at.steps_lost is None else f", {at.steps_lost} steps lost"
            spare = "" if spare_s is None else f", {spare_s:.1f} s to spare"
            where = "in the memory of snapshot servers" if phase is Phase.EVACUATED else "saved"
            return f"step {step} is {where}{lost}{spare}"
        case _:
            return str(phase)


def _request(spec: PreemptionSpec) -> str:
    """Describes what the gang is asked to do."""
    match spec.mode:
        case Mode.OBSERVE:
            return "observed only"
        case Mode.DRILL:
            return "a drill: the gang saves and trains on"
        case Mode.ENFORCE:
            return "the gang is notified" if spec.exits else "the gang saves and trains on"


#: False: the gang does not exit. Its reason says why.
CONDITION_EXITS = "Exits"
REASON_EXIT_BREAKER = "ExitBreakerOpen"
REASON_TIME_LIMIT = "TimeLimit"
REASON_LEFT_BEFORE = "LeftBefore"

#: A choice of the library: the newest snapshot is committed in place of the current step.
_PROMOTE = "Promote"


def is_announced(preemption: PreemptionRecord) -> bool:
    """True if the operator sends notices: not in mode Observe, and not if the gang itself reported the preemption."""
    return preemption.spec.mode is not Mode.OBSERVE and preemption.spec.signal not in KNOWN_TO_GANG


def noticed(expected: int, spec: PreemptionSpec) -> PreemptionStatus:
    """Returns the status of a new preemption."""
    return PreemptionStatus(
        phase=Phase.NOTICED,
        message=signal_message(spec),
        acknowledgements=Acknowledgements(expected=expected, received=0),
        conditions=None if spec.exits else [exits_condition(spec)],
    )


def with_cause(status: PreemptionStatus, spec: PreemptionSpec) -> PreemptionStatus:
    """Returns the status of a preemption whose cause may have been corrected: the message of Noticed names it."""
    named = status.phase is not Phase.NOTICED or not status.message or status.message.startswith(f"{spec.cause}: ")
    return status if named else status.model_copy(update={"message": signal_message(spec)})


def ended(status: PreemptionStatus, phase: Phase, reason: EndReason, message: str, now: float) -> PreemptionStatus:
    """Returns the status after the operator ended the preemption. Unchanged if it had ended before."""
    after = PreemptionStatus(phase=phase, message=message, conditions=[_ended_condition(reason, message, now)])
    return joined_status(after, status)


def reported(preemption: PreemptionRecord, report: Report, notice_s: float, now: float) -> PreemptionStatus:
    """Returns the status after a report of the primary process. Unchanged if it is further on already.

    Args:
        preemption: The preemption before the report.
        report: The report. Its stages are in seconds after the reporting process received the notice.
        notice_s: Seconds from the signal until the notice was sent to that process.
        now: When the report came, in seconds since the epoch.
    """
    message = (report.message or phase_message(report.phase, report))[:1024]
    if preemption.spec.mode is Mode.ENFORCE:
        # To the library, every preemption after which the gang trains on is a drill, so also one of a time limit.
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
    return joined_status(after, preemption.status)


def with_stage(status: PreemptionStatus, stage: str, observed_at: float, at: float) -> PreemptionStatus:
    """Returns the status with a stage that was reached at ``at``. Unchanged if it has the stage."""
    timing = StageTime(stage=stage, seconds=_seconds(at - observed_at), time=_time(at))
    return joined_status(PreemptionStatus(timings=[timing]), status)


def resumed(preemption: PreemptionRecord, resumption: Resumption, now: float) -> PreemptionStatus:
    """Returns the status after the restarted gang has restored or trains again. The first report wins.

    Raises:
        pydantic.ValidationError: The restored step does not fit into a record.
    """
    observed_at = preemption.spec.observed_at.timestamp()
    reached = {"training" if resumption.training else "restored": now - max(0.0, resumption.age_s)}
    if resumption.spent is not None:
        reached = {**_of_the_start(resumption.spent, now), **reached}
    status = preemption.status
    for stage, at in reached.items():
        # A process may say any time; nothing came back before the signal.
        status = with_stage(status, stage, observed_at, max(observed_at, min(at, now)))
    # Validated, since a pod may report any number: the API server would refuse the record with a larger one forever.
    restored = PreemptionStatus(restored_step=resumption.restored_step)
    if status.restored_step is None:
        from_memory = True if resumption.from_memory else None
        update = {"restored_step": restored.restored_step, "restored_from_memory": from_memory}
        status = status.model_copy(update=update)
    return status


def proves_commit(preemption: PreemptionRecord, resumption: Resumption, disrupted: str = "") -> bool:
    """Returns whether the restored step was saved for this preemption. Then its save was committed.

    The checkpoint says for which preemption it was saved. An older library, or processes that did not learn of it
    from the operator, leave that open. Then the step that the gang was saving proves it, if this is the next start.
    It does not if an older snapshot was being committed, or if the gang trained on after a retraction: then steps may
    be lost. A step from the memory of nodes says nothing of storage. If nobody said which step the gang was saving, it
    is proven by a step with which the start that was to leave has ended.

    Args:
        preemption: The preemption.
        resumption: What a later start has restored.
        disrupted: Session of the start right before that one, if the preemption disrupted it. Empty: it is not known.
    """
    step, saved_for = resumption.restored_step, resumption.saved_for
    if step is None or resumption.from_memory or not preemption.may_be_committed:
        return False
    attempt = preemption.spec.restart_attempt
    if saved_for is not None and saved_for.preemption == preemption.name:
        return attempt is None or saved_for.restart_attempt == attempt
    # The number of restarts is the same for starts in which a workload was suspended, and for those of a Job.
    is_next = preemption.status.restored_step in (None, step)
    is_next &= attempt is None or resumption.restart_attempt <= attempt + 1
    trained_on = preemption.phase is Phase.RETRACTED
    if not is_next or trained_on or preemption.status.choice == _PROMOTE:
        return False
    return preemption.status.step == step or _left_with(preemption, saved_for, disrupted)


def _left_with(preemption: PreemptionRecord, saved_for: SavedFor | None, disrupted: str) -> bool:
    """Returns whether a step is the last one of the start that the preemption asked to leave.

    Its processes learnt of the disruption by SIGTERM or from the machine alone, saved, and left. The session says that
    it was this start: the number of restarts may be that of an earlier start that was suspended, or of another workload
    that had the same directory before.
    """
    if saved_for is None or saved_for.preemption or saved_for.spent.left_s is None or not disrupted:
        return False
    return saved_for.session == disrupted and preemption.status.step is None and preemption.asks_to_leave


def proven_committed(preemption: PreemptionRecord, resumption: Resumption, now: float) -> PreemptionStatus:
    """Returns the status of a preemption of which a resumption ``proves_commit``."""
    step = resumption.restored_step
    message = f"step {step} is saved, 0 steps lost: the next start has restored it. No report of the commit had arrived"
    after = PreemptionStatus(
        phase=Phase.COMMITTED,
        message=message,
        step=step,
        steps_lost=0,
        conditions=[_ended_condition(EndReason.NEXT_START_RESTORED, message, now)],
    )
    return joined_status(after, preemption.status)


def is_saved_since(preemption: PreemptionRecord, spent: Spent | None) -> bool:
    """Returns whether the start that restored an evacuated step has saved to storage since, as it says."""
    return spent is not None and spent.saved_s is not None and _began_with_evacuated(preemption, spent)


def is_saved_by(preemption: PreemptionRecord, report: Report) -> bool:
    """Returns whether the start that restored an evacuated step has saved it, or a later one, for its own preemption.

    Without periodic saves that is its first save to storage. A later start may have begun at an older step.
    """
    spent = report.spent
    if spent is None or report.step is None or report.step < spent.first_step:
        return False
    return _began_with_evacuated(preemption, spent)


def _began_with_evacuated(preemption: PreemptionRecord, spent: Spent) -> bool:
    """Returns whether a start began with the step that a preemption evacuated, as it says."""
    status = preemption.status
    return preemption.phase is Phase.EVACUATED and status.restored_step == status.step == spent.first_step


def saved_since(status: PreemptionStatus) -> PreemptionStatus:
    """Returns the status of a preemption that ``is_saved_since``, or ``is_saved_by`` the next one."""
    message = f"step {status.step} is saved, 0 steps lost: it was in snapshot servers, and the next start has saved it"
    return joined_status(PreemptionStatus(phase=Phase.COMMITTED, message=message), status)


def _of_the_start(spent: Spent, now: float) -> Mapping[str, float]:
    """Returns when the process reached each stage of its start, as it says. In seconds since the epoch."""
    attached_at = now - spent.now_s
    after_s = {
        "started": None if spent.age_s is None else -spent.age_s,
        "attaching": 0.0,
        "joined": spent.joined_s,
        "compiled": spent.compiled_s,
    }
    reached_at = {stage: attached_at + seconds for stage, seconds in after_s.items() if seconds is not None}
    return {stage: at for stage, at in reached_at.items() if math.isfinite(at)}


def own_entry(status: PreemptionStatus, own: Replica) -> Replica:
    """Returns the entry that a replica writes. Its numbers never decrease.

    A replica whose container was restarted has the same name, but does not know its earlier receipts.
    """
    before = next((entry for entry in status.replicas or () if entry.name == own.name), None)
    if before is None:
        return own
    notified = Places([*before.told_pods, *own.told_pods])
    acknowledging = Places([*before.acknowledged_pods, *own.acknowledged_pods])
    return Replica(
        name=own.name,
        told=max(before.told, own.told, len(notified)),
        acknowledged=max(before.acknowledged, own.acknowledged, len(acknowledging)),
        told_pods=notified.lines(),
        acknowledged_pods=acknowledging.lines(),
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
    notified = Places(line for entry in entries for line in entry.told_pods)
    acknowledging = Places(line for entry in entries for line in entry.acknowledged_pods)
    received = max([before.received, len(acknowledging), *(entry.acknowledged for entry in entries)])
    # A pod stays listed until its receipt comes, even if it does not exist any more.
    expected_names = [*names, *(laggard.pod for laggard in before.laggards)]
    after = Acknowledgements(
        expected=max(before.expected, received),
        received=received,
        laggards=missing(expected_names, notified, acknowledging),
    )
    status = status.model_copy(update={"acknowledgements": after})
    notified_times = [entry.told_at.timestamp() for entry in entries if entry.told_at is not None]
    if notified_times and max([len(notified), *(entry.told for entry in entries)]) >= after.expected:
        status = with_stage(status, "noticeSent", observed_at, max(notified_times))
    acknowledged_times = [entry.acknowledged_at.timestamp() for entry in entries if entry.acknowledged_at is not None]
    if acknowledged_times and after.received >= after.expected:
        status = with_stage(status, "lastAck", observed_at, max(acknowledged_times))
    return status


def exits_condition(spec: PreemptionSpec) -> Condition:
    breaker = spec.policy.spec.exit_breaker
    if spec.cause == Cause.TIME_LIMIT:
        reason = REASON_TIME_LIMIT
        message = "the gang saves and trains on: its time is limited, and an exit would start that time again"
    elif spec.signal.endswith(LEFT_BEFORE):
        reason = REASON_LEFT_BEFORE
        message = "the gang saves and trains on: it has left this node before, and was started there again"
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


#: Who writes the Events.
EVENT_CONTROLLER = "gracepoint.dev/operator"

REASON_RESUMED = "Resumed"
REASON_MOVED = "DeadlineMoved"
#: The reasons of Events of phases. Other phases have no Event.
PHASE_REASONS = {
    Phase.NOTICED: "PreemptionNoticed",
    Phase.AGREED: "SaveAgreed",
    Phase.EVACUATED: "StepEvacuated",
    Phase.COMMITTED: "CheckpointCommitted",
    Phase.PROMOTED: "SnapshotPromoted",
    Phase.RETRACTED: "PreemptionRetracted",
    Phase.EXPIRED: "PreemptionExpired",
    Phase.FAILED: "PreemptionFailed",
}
#: The reasons of all Events, in the order in which they usually come.
STORY = (
    *("PreemptionNoticed", REASON_EXIT_BREAKER, REASON_TIME_LIMIT, REASON_LEFT_BEFORE, REASON_MOVED, "SaveAgreed"),
    *("StepEvacuated", "CheckpointCommitted", "SnapshotPromoted", "PreemptionRetracted", "PreemptionExpired"),
    *("PreemptionFailed", REASON_RESUMED),
)
_WARNINGS = frozenset({Phase.EXPIRED, Phase.FAILED})


@dataclasses.dataclass(frozen=True)
class Note:
    """An Event to post.

    Attributes:
        reason: Its reason, one of ``STORY``.
        message: Its note.
        warning: Whether its type is Warning instead of Normal.
    """

    reason: str
    message: str
    warning: bool = False


def note_of_phase(preemption: PreemptionRecord, phase: Phase) -> Note | None:
    """The Event of having reached ``phase``. None if this phase has no Event."""
    reason = PHASE_REASONS.get(phase)
    if reason is None:
        return None
    spec, status = preemption.spec, preemption.status
    if phase is Phase.NOTICED:
        text = signal_message(spec)
    elif phase is Phase.AGREED or phase in (Phase.EVACUATED, Phase.COMMITTED, Phase.PROMOTED):
        text = phase_message(phase, status)
    else:
        text = status.message or str(phase)
    return Note(reason, f"{preemption.name}: {text}", phase in _WARNINGS)


def note_of_breaker(preemption: PreemptionRecord) -> Note:
    """The Event of a gang that is to save and to continue to train."""
    exits = exits_condition(preemption.spec)
    return Note(exits.reason, f"{preemption.name}: {exits.message}", warning=exits.reason == REASON_EXIT_BREAKER)


def note_of_move(preemption: PreemptionRecord) -> Note:
    """The Event of a deadline that moved."""
    seconds = (preemption.spec.deadline - preemption.spec.observed_at).total_seconds()
    message = f"the deadline is now {seconds:.0f} s after the first signal: {preemption.spec.signal}"
    return Note(REASON_MOVED, f"{preemption.name}: {message}")


def note_of_resumption(preemption: PreemptionRecord) -> Note:
    """The Event of a gang that has restored a checkpoint."""
    status = preemption.status
    where = ", which the memory of nodes had" if status.restored_from_memory else ""
    is_lost = preemption.phase is Phase.EVACUATED and (status.restored_step or 0) < (status.step or 0)
    lost = f"; no snapshot server has step {status.step} any more" if is_lost else ""
    message = f"{preemption.name}: training continues from step {status.restored_step}{where}{lost}"
    return Note(REASON_RESUMED, message, warning=is_lost)


REASON_STALLED = "TrainingStalled"
REASON_PROGRESS = "TrainingProgresses"
_STAGE_CHARACTERS = 64


def stall_sentence(stall: Stall) -> str:
    """Returns what is known of the stall, in one sentence, with the innermost line of the stack."""
    summary = f"no progress for {stall.for_s:.0f} s in {stall.stage}; {stall.message}"
    lines = [line.strip() for line in stall.stack.splitlines() if line.strip()]
    return f"{summary}; it is at: {' '.join(lines[-2:])}" if lines else summary


def stall_stage(stall: Stall) -> str:
    """Returns the stage without the step, for a metric."""
    return re.sub(r" (of|after) step .*", "", stall.stage)[:_STAGE_CHARACTERS]


def stall_is_over(stall: Stall, reported_at: float, progress_at: float) -> bool:
    """True if the progress was made after the stall had begun.

    There was none for ``for_s`` seconds before the report of the stall. So the middle of that time is far enough from
    the progress before and from that after the stall, though these times may be by the clocks of different replicas.

    Args:
        stall: The stall.
        reported_at: When a replica got the report, in seconds since the epoch.
        progress_at: When any replica got a report of progress of the gang.
    """
    return progress_at > reported_at - stall.for_s / 2


def stall_note(stall: Stall) -> Note:
    """Returns the Event on the workload."""
    if stall.over:
        return Note(REASON_PROGRESS, f"there is progress again after step {stall.step}")
    return Note(REASON_STALLED, stall_sentence(stall), warning=True)


def progress_condition(policy: CheckpointPolicy, stalled: Mapping[str, str], now: float) -> Condition:
    """Returns the condition Progressing of a policy. A Preemption within which a gang stalled has it, too.

    Args:
        policy: The policy.
        stalled: What is known of each stall, by the name of the workload.
        now: Seconds since the epoch.
    """
    message = f"no {ANY_PLURAL} of this policy are stalled"
    if stalled:
        names = sorted(stalled)
        message = (
            f"{len(names)} {ANY_PLURAL} make no progress ({', '.join(names[:5])}). {names[0]}: {stalled[names[0]]}"
        )
    return _progress_condition(bool(stalled), message, now, policy.generation)


def with_stalls(status: PreemptionStatus, stalled: str | None, stage: str, now: float) -> PreemptionStatus:
    """Returns the status of a preemption after its gang has stalled, or makes progress again.

    A stall that begins after the end of the preemption is not within it.

    Args:
        status: The status before.
        stalled: What is known of the gang's stalls. None: it makes progress again.
        stage: What made progress again.
        now: Seconds since the epoch.
    """
    before = next((item for item in status.conditions or () if item.type == CONDITION_PROGRESSING), None)
    was_stalled = before is not None and before.status is ConditionStatus.FALSE
    if stalled is None and not was_stalled:
        return status
    if stalled is not None and status.phase is not None and status.phase.ended:
        return status
    message = f"there is progress again in {stage}" if stalled is None else stalled
    after = _progress_condition(stalled is not None, message, now, None)
    if before is not None and (before.status, before.message) == (after.status, after.message):
        return status
    return joined_status(PreemptionStatus(conditions=[after]), status)


def _progress_condition(is_stalled: bool, message: str, now: float, generation: int | None) -> Condition:
    return Condition(
        type=CONDITION_PROGRESSING,
        status=ConditionStatus.FALSE if is_stalled else ConditionStatus.TRUE,
        reason="Stalled" if is_stalled else "Progressing",
        message=message[:4096],
        last_transition_time=datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0),
        observed_generation=generation,
    )
