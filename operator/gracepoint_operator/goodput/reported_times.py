"""What a process says of its time, on the clock of the operator. Pure."""

from __future__ import annotations

import math

from gracepoint.wire.messages import Spent
from gracepoint_operator.goodput.life import MARKS, StepMark
from gracepoint_operator.goodput.observations import ProcessTimes, StallTimes
from gracepoint_operator.kube.objects import Pod

#: A process that says it runs for longer is not believed: ten years.
_LONGEST_S = 3e8
_MOST_STEPS = 2**53
_MOST_DIGITS = 16
_LONGEST_SESSION = 64


def process_times(spent: Spent, session: str, pod: Pod, now: float, *, of_former: bool = False) -> ProcessTimes | None:
    """Reads what a process says. None if the figures contradict each other: a process may say anything.

    Args:
        spent: What it says.
        session: Its session.
        pod: Its pod.
        now: The time, in seconds since the epoch.
        of_former: As in ``ProcessTimes``.
    """
    if not _is_sound(spent) or not 0 < len(session) <= _LONGEST_SESSION:
        return None

    def at_ms(offset_s: float) -> int:
        return round((now - spent.now_s + offset_s) * 1000)

    return ProcessTimes(
        session=session,
        attempt=pod.restart_attempt,
        created_ms=_ms(pod.created_at),
        attached_ms=at_ms(0.0),
        joined_ms=at_ms(spent.joined_s),
        # Clocks of machines differ, but none of the processes is started after all have joined.
        started_ms=None if spent.last_started_s is None else at_ms(min(spent.last_started_s, spent.joined_s)),
        restored_ms=None if spent.restored_s is None else at_ms(spent.restored_s),
        first_step=spent.first_step,
        trained_ms=None if spent.trained_s is None else at_ms(spent.trained_s),
        left_ms=None if spent.left_s is None else at_ms(spent.left_s),
        saving_ms=_ms(spent.saving_s),
        saves=spent.saves,
        saves_ms=_ms(spent.saves_s),
        saved_ms=None if spent.saved_s is None else at_ms(spent.saved_s),
        marks=tuple(sorted(StepMark(int(step), _ms(trained_s)) for step, trained_s in (spent.passed or {}).items())),
        of_former=of_former,
    )


def stall_times(stalled_s: float, pod: Pod, now: float) -> StallTimes | None:
    """Reads that training has stalled for so many seconds. None if that cannot be."""
    if not 0 <= stalled_s <= _LONGEST_S:
        return None
    return StallTimes(
        attempt=pod.restart_attempt, created_ms=_ms(pod.created_at), stalled_ms=round((now - stalled_s) * 1000)
    )


def _is_sound(spent: Spent) -> bool:
    offsets = [spent.joined_s, spent.restored_s, spent.trained_s, spent.left_s]
    known = [0.0, *(offset for offset in offsets if offset is not None), spent.now_s, _LONGEST_S]
    passed = spent.passed or {}
    durations = [spent.saving_s, spent.saves_s, spent.saved_s or 0.0, *passed.values()]
    if len(passed) > MARKS or not all(step.isdecimal() and len(step) <= _MOST_DIGITS for step in passed):
        return False
    started_s = 0.0 if spent.last_started_s is None else spent.last_started_s
    numbers = [spent.first_step, spent.saves, *map(int, passed)]
    return (
        all(math.isfinite(value) for value in (*known, *durations))
        and abs(started_s) <= _LONGEST_S
        and known == sorted(known)
        and all(0 <= duration <= spent.now_s for duration in durations)
        and all(0 <= number < _MOST_STEPS for number in numbers)
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
