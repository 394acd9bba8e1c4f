"""How much time there is, and whether it will do.

The deadline is when the pod dies. A **reserve** before it is kept for ending with the right code, so everything
that waits is bounded by ``time_left_s``, which is zero two reserves before the deadline: one for the report of a
failure, one for leaving. A deadline that is very near or past is no reason not to try: at least ``_LEAST_S`` are
taken, as operators round and clouds are late.

Late as possible: the freeze begins when the time that is left is what drain and save are predicted to take, at
worst and times the margin; but never later than the head start before the deadline. What is not known is not
waited for: without figures it begins at once.

May be asked by any thread; ``begin`` and ``end`` are for the agreement's reading thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gracepoint.preemption.forecast import Figures
from gracepoint.receivers import Mailbox
from gracepoint.settings import Settings

_LEAST_S = 3.0
_RESERVE_S = 1.0
_RESERVE_PART = 0.1


class TimeBudget:
    """See the module.

    Args:
        mailbox: Deadlines.
        settings: ``margin`` and ``head_start_s``.
        figures: What an emergency would take now; None while that is not known.
        clock: Monotonic seconds; the mailbox's.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        settings: Settings,
        figures: Callable[[], Figures | None],
        clock: Callable[[], float],
    ) -> None:
        self._mailbox = mailbox
        self._settings = settings
        self._figures = figures
        self._clock = clock
        self._floor_s = math.inf  # training may be held before ``begin`` has said how long
        self.reserve_s = _RESERVE_S

    def start_in_s(self) -> float:
        """Seconds until the freeze must begin; 0 or less: now."""
        figures = self._figures()
        if figures is None:
            return 0.0
        needed_s = self._settings.margin * figures.needed_at_worst_s + 2 * _RESERVE_S
        return self._mailbox.remaining_s() - max(self._settings.head_start_s, needed_s)

    def begin(self) -> None:
        """An epoch opens."""
        self._floor_s = self._clock() + _LEAST_S
        self.reserve_s = min(_RESERVE_S, _RESERVE_PART * self.until_deadline_s())

    def end(self) -> None:
        """It has ended, and training goes on."""
        self._floor_s = math.inf

    def until_deadline_s(self) -> float:
        """Until the process should be gone."""
        return max(self._mailbox.remaining_s(), self._floor_s - self._clock())

    def time_left_s(self) -> float:
        """For all work, without what ending takes."""
        return self.until_deadline_s() - 2 * self.reserve_s

    def doubt(self, *, drained: bool) -> str:
        """Why the save will not be done in time, by what is known; empty where nothing says so."""
        figures = self._figures()
        left_s = self.until_deadline_s() - self.reserve_s
        if figures is None:
            return ""
        needed_s = figures.save_s if drained else figures.needed_s
        if needed_s <= left_s:
            return ""
        what = "the save is" if drained else f"a step takes {figures.step_s:.1f} s, drain and save are"
        return (
            f"the deadline cannot be met by what is known: {what} predicted to take {needed_s:.1f} s, and "
            f"{max(left_s, 0.0):.1f} s are left"
        )
