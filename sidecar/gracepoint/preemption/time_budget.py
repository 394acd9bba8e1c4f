"""How much time is left until the deadline of a preemption, and whether it is enough.

The deadline is the time at which the pod is killed. A **reserve** before it is kept for exiting with the right code. So
every wait is bounded by ``time_left_s``, which is zero two reserves before the deadline: one reserve for the report of
a failure, one for the exit. If the deadline is very near or has passed, the save is tried all the same, for
``_LEAST_S``: operators round, and clouds are late.

The freeze begins as late as possible: when the time that is left is what drain and save are predicted to take in the
worst case, times the margin; but no later than the head start before the deadline. As long as there are no predictions,
the freeze begins at once.

Any thread may call the methods, but ``begin`` and ``end``, which belong to the agreement's reading thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from gracepoint.deadline import Deadline
from gracepoint.preemption.forecast import Figures
from gracepoint.receivers import Mailbox
from gracepoint.settings import Settings

_LEAST_S = 3.0
_RESERVE_S = 1.0
_RESERVE_PART = 0.1


class TimeBudget:
    """See the module.

    Args:
        mailbox: The notices, with their deadlines.
        settings: ``margin`` and ``head_start_s``.
        figures: Returns what an emergency save would take now. None while that is not known.
        clock: Returns monotonic seconds; the mailbox's clock.

    Attributes:
        reserve_s: Seconds before the deadline that are kept for the report of a failure, and again for the exit.
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
        self._floor_s = math.inf  # training may be held before ``begin`` was called
        self.reserve_s = _RESERVE_S

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        """Returns the seconds until the freeze must begin. 0 or less means now.

        Args:
            remaining_s: Seconds until the deadline of a notice that is not in the mailbox yet. Infinite if there is
                none.
        """
        figures = self._figures()
        if figures is None:
            return 0.0
        needed_s = self._settings.margin * figures.needed_at_worst_s + 2 * _RESERVE_S
        return min(remaining_s, self._mailbox.remaining_s()) - max(self._settings.head_start_s, needed_s)

    def begin(self) -> None:
        """Notes that an epoch opens."""
        self._floor_s = self._clock() + _LEAST_S
        self.reserve_s = min(_RESERVE_S, _RESERVE_PART * self.until_deadline_s())

    def end(self) -> None:
        """Notes that the epoch has ended and training goes on."""
        self._floor_s = math.inf

    def until_deadline_s(self) -> float:
        """Returns the seconds until the process must have exited."""
        return max(self._mailbox.remaining_s(), self._floor_s - self._clock())

    def time_left_s(self) -> float:
        """Returns the seconds that are left for work, without the two reserves. Negative when they are in use."""
        return self.until_deadline_s() - 2 * self.reserve_s

    def deadline(self) -> Deadline:
        """Returns the point in time after which work must stop. It moves to an earlier time with the notices."""
        return Deadline.following(self.time_left_s, self._clock)

    def doubt(self, *, drained: bool) -> str:
        """Returns why the save will probably not be done in time. Empty if nothing says so.

        Args:
            drained: True if the devices are done with the steps in flight, so that only the save is left.
        """
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
