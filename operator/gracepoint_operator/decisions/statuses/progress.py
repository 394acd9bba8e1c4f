"""What is said of gangs that make no progress: the condition Progressing and the Events. Pure.

A policy has the condition, and so has a Preemption within which the gang stalled.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping

from gracepoint.wire.messages import Stall
from gracepoint_operator.decisions.statuses.event_notes import Note
from gracepoint_operator.model.preemption import CONDITION_PROGRESSING, joined_status
from gracepoint_operator.resources import CheckpointPolicy, Condition, ConditionStatus, PreemptionStatus
from gracepoint_operator.workloads import ANY_PLURAL

REASON_STALLED = "TrainingStalled"
REASON_PROGRESS = "TrainingProgresses"
_STAGE_CHARACTERS = 64


def in_words(stall: Stall) -> str:
    """Returns what is known of the stall, in one sentence, with the innermost line of the stack."""
    told = f"no progress for {stall.for_s:.0f} s in {stall.stage}; {stall.message}"
    lines = [line.strip() for line in stall.stack.splitlines() if line.strip()]
    return f"{told}; it is at: {' '.join(lines[-2:])}" if lines else told


def stage_of(stall: Stall) -> str:
    """Returns the stage without the step, for a metric."""
    return re.sub(r" (of|after) step .*", "", stall.stage)[:_STAGE_CHARACTERS]


def is_over(stall: Stall, told_at: float, progress_at: float) -> bool:
    """True if the progress was made after the stall had begun.

    There was none for ``for_s`` seconds before the stall was told. So the middle of that time is far enough from the
    progress before and from that after the stall, though these times may be by the clocks of different replicas.

    Args:
        stall: The stall.
        told_at: When a replica was told of it, in seconds since the epoch.
        progress_at: When any replica was told of progress of the gang.
    """
    return progress_at > told_at - stall.for_s / 2


def note(stall: Stall) -> Note:
    """Returns the Event on the workload."""
    if stall.over:
        return Note(REASON_PROGRESS, f"there is progress again after step {stall.step}")
    return Note(REASON_STALLED, in_words(stall), warning=True)


def condition(policy: CheckpointPolicy, stalled: Mapping[str, str], now: float) -> Condition:
    """Returns the condition Progressing.

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
    return _condition(bool(stalled), message, now, policy.generation)


def of_preemption(status: PreemptionStatus, stalled: str | None, stage: str, now: float) -> PreemptionStatus:
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
    after = _condition(stalled is not None, message, now, None)
    if before is not None and (before.status, before.message) == (after.status, after.message):
        return status
    return joined_status(PreemptionStatus(conditions=[after]), status)


def _condition(is_stalled: bool, message: str, now: float, generation: int | None) -> Condition:
    return Condition(
        type=CONDITION_PROGRESSING,
        status=ConditionStatus.FALSE if is_stalled else ConditionStatus.TRUE,
        reason="Stalled" if is_stalled else "Progressing",
        message=message[:4096],
        last_transition_time=datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0),
        observed_generation=generation,
    )
