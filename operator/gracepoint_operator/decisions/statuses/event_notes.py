"""The Events of a preemption: their reasons, their messages and their order. Pure."""

from __future__ import annotations

import dataclasses

from gracepoint.wire.messages import Phase
from gracepoint_operator.decisions.statuses.phase_messages import phase_message, signal_message
from gracepoint_operator.decisions.statuses.preemption_status import (
    REASON_EXIT_BREAKER,
    REASON_TIME_LIMIT,
    exits_condition,
)
from gracepoint_operator.model.preemption import PreemptionRecord

#: Who writes the Events.
EVENT_CONTROLLER = "gracepoint.dev/operator"

REASON_RESUMED = "Resumed"
REASON_MOVED = "DeadlineMoved"
#: The reasons of Events of phases. Other phases have no Event.
PHASE_REASONS = {
    Phase.NOTICED: "PreemptionNoticed",
    Phase.AGREED: "SaveAgreed",
    Phase.COMMITTED: "CheckpointCommitted",
    Phase.PROMOTED: "SnapshotPromoted",
    Phase.RETRACTED: "PreemptionRetracted",
    Phase.EXPIRED: "PreemptionExpired",
    Phase.FAILED: "PreemptionFailed",
}
#: The reasons of all Events, in the order in which they usually come.
STORY = (
    *("PreemptionNoticed", REASON_EXIT_BREAKER, REASON_TIME_LIMIT, REASON_MOVED, "SaveAgreed"),
    *("CheckpointCommitted", "SnapshotPromoted", "PreemptionRetracted", "PreemptionExpired", "PreemptionFailed"),
    REASON_RESUMED,
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


def note_of_phase(epoch: PreemptionRecord, phase: Phase) -> Note | None:
    """The Event of having reached ``phase``. None if this phase has no Event."""
    reason = PHASE_REASONS.get(phase)
    if reason is None:
        return None
    spec, status = epoch.spec, epoch.status
    if phase is Phase.NOTICED:
        text = signal_message(spec)
    elif phase is Phase.AGREED or phase in (Phase.COMMITTED, Phase.PROMOTED):
        text = phase_message(phase, status)
    else:
        text = status.message or str(phase)
    return Note(reason, f"{epoch.name}: {text}", phase in _WARNINGS)


def note_of_breaker(epoch: PreemptionRecord) -> Note:
    """The Event of a gang that is told to save and to continue to train."""
    exits = exits_condition(epoch.spec)
    return Note(exits.reason, f"{epoch.name}: {exits.message}", warning=exits.reason == REASON_EXIT_BREAKER)


def note_of_move(epoch: PreemptionRecord) -> Note:
    """The Event of a deadline that moved."""
    seconds = (epoch.spec.deadline - epoch.spec.observed_at).total_seconds()
    said = f"the deadline is now {seconds:.0f} s after the first signal: {epoch.spec.signal}"
    return Note(REASON_MOVED, f"{epoch.name}: {said}")


def note_of_resumption(epoch: PreemptionRecord) -> Note:
    """The Event of a gang that has restored a checkpoint."""
    return Note(REASON_RESUMED, f"{epoch.name}: training goes on from step {epoch.status.restored_step}")
