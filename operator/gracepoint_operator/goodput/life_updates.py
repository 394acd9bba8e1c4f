"""What becomes of a life when a process tells of it. Pure."""

from __future__ import annotations

import dataclasses

from gracepoint_operator.goodput.life import Life
from gracepoint_operator.goodput.observations import ProcessTimes


def joined(life: Life, told: ProcessTimes) -> Life:
    """Returns the life with what its process says. What is known already stays, except for sums such as ``saves``.

    Messages take different times to arrive. So all times of a process are placed by the message that took least time.
    """
    before = told.attached_ms if life.attached_ms is None else life.attached_ms
    attached = min(before, told.attached_ms)
    late, early = told.attached_ms - attached, before - attached
    first_step = told.first_step
    if life.restored_ms is not None or life.trained_ms is not None:
        first_step = life.first_step
    goes_on = any(life.goes_on(mark, told.saving_ms) for mark in told.marks)
    started = life.started_ms
    if told.started_ms is not None:  # better than the time that kubelets write, in whole seconds
        started = max(life.created_ms, told.started_ms - late)
    elif started is not None and started == life.attached_ms:  # no more was known of it
        started = attached
    return dataclasses.replace(
        life,
        session=told.session,
        attached_ms=attached,
        started_ms=attached if started is None and life.bound_ms is not None else started,
        joined_ms=_known(life.joined_ms, told.joined_ms, late, early),
        restored_ms=_known(life.restored_ms, told.restored_ms, late, early),
        first_step=first_step,
        trained_ms=_known(life.trained_ms, told.trained_ms, late, early),
        left_ms=_known(life.left_ms, told.left_ms, late, early),
        saving_ms=max(life.saving_ms, told.saving_ms),
        saves=max(life.saves, told.saves),
        saves_ms=max(life.saves_ms, told.saves_ms),
        saved_ms=_newest(life.saved_ms, None if told.saved_ms is None else told.saved_ms - late),
        stalled_ms=None if goes_on else life.stalled_ms,
        marks=life.with_marks(told.marks),
    )


def _known(first: int | None, told: int | None, late: int, early: int) -> int | None:
    if first is not None:
        return first - early
    return None if told is None else told - late


def _newest(known: int | None, told: int | None) -> int | None:
    return max((moment for moment in (known, told) if moment is not None), default=None)
