"""One life of a gang: from the creation of its first pod until its last process has ended. Immutable values. Pure.

A life keeps the times at which its stages were reached. Its account is computed from these, so a time that becomes
known late only moves time from one category to another: the categories of a life always add up to its length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from gracepoint_operator.goodput.categories import Category, Spent

#: At most this number of marks is kept: a restart restores one of the newest checkpoints.
MARKS = 8
#: Less than this is not lost: all times are rounded.
_LEAST_MS = 10
#: The time at which a process ended is known to within about this. The time at which it says that it left is known to
#: within some milliseconds.
_END_MS = 1000
#: A process that says that it leaves ends within this time, or is killed.
_LEAVES_MS = 10_000
#: From fewer saves, the time between two of them cannot be told.
_FEW_SAVES = 2


@dataclasses.dataclass(frozen=True, order=True)
class StepMark:
    """A step that was passed.

    Attributes:
        step: Number of the step.
        trained_ms: For how long this life had trained when it passed that step, without the time of saves.
    """

    step: int
    trained_ms: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """See the module. A time that is not known, or has not come yet, is None.

    Attributes:
        began_ms: When the life before ended. For the first life, when the workload was created.
        attempt: Number of the workload's restarts before this life.
        created_ms: When its first pod was created.
        bound_ms: When its last pod was bound to a node.
        bound_pods: How many pods were, at that time.
        started_ms: When the last of its processes was started, as they say. Until they do: when the last of its
            containers was, as kubelets write.
        session: Session of the process that tells of this life. Empty if none has.
        attached_ms: When that process began to join the others. What it tells counts from there.
        joined_ms: When all processes had joined.
        restored_ms: When the state was restored.
        first_step: The step from which it trained: the one that it restored. 0 if it restored none.
        trained_ms: When the first step was done.
        left_ms: When training ended for good, after the emergency save, as the processes say.
        stalled_ms: When the last step was passed before it stalled. None: it has not, or training went on after that.
        broke_ms: When its first process ended, or the node of one was deleted.
        gone_ms: When its last process had ended. None while one runs.
        saving_ms: For how long saves stopped the training.
        saves: Number of periodic saves.
        saves_ms: For how long periodic saves stopped the training.
        saved_ms: When the newest step was passed that this life has in a committed checkpoint.
        marks: Steps that it has passed, in their order: the newest at which saves began, or of which it told.
    """

    began_ms: int
    attempt: int
    created_ms: int
    bound_ms: int | None = None
    bound_pods: int = 0
    started_ms: int | None = None
    session: str = ""
    attached_ms: int | None = None
    joined_ms: int | None = None
    restored_ms: int | None = None
    first_step: int = 0
    trained_ms: int | None = None
    left_ms: int | None = None
    stalled_ms: int | None = None
    broke_ms: int | None = None
    gone_ms: int | None = None
    saving_ms: int = 0
    saves: int = 0
    saves_ms: int = 0
    saved_ms: int | None = None
    marks: tuple[StepMark, ...] = ()

    @property
    def has_trained(self) -> bool:
        """True if it is known to have done a step."""
        return self.trained_ms is not None

    @property
    def stopped_ms(self) -> int | None:
        """When it stopped to train, or to prepare for that. None while it goes on."""
        broke_ms = self.broke_ms
        if broke_ms is not None and self.left_ms is not None and 0 < self.left_ms - broke_ms < _END_MS:
            broke_ms = self.left_ms
        ended = [at for at in (self.left_ms, broke_ms, self.gone_ms) if at is not None]
        if ended and self.stalled_ms is not None and self.left_ms is None:  # it stalled until it ended
            ended.append(self.stalled_ms)
        return min(ended, default=None)

    def spent(self, now_ms: int) -> Spent:
        """Returns where the time from ``began_ms`` to its end went, or to now if it has not ended.

        Steps count as kept; see ``lost_ms``.
        """
        end = max(self.began_ms, now_ms if self.gone_ms is None else self.gone_ms)
        stop = end if self.stopped_ms is None else min(end, max(self.began_ms, self.stopped_ms))
        spent: dict[Category, int] = {}
        at = self.began_ms

        def until(moment: int, category: Category) -> None:
            nonlocal at
            later = min(max(at, moment), stop)
            if later > at:
                spent[category] = spent.get(category, 0) + later - at
            at = later

        stages = (
            (self.created_ms, Category.WAITING),
            (self.bound_ms, Category.SCHEDULING),
            (self.started_ms, Category.IMAGE),
            (self.joined_ms, Category.JOIN),
            (self.restored_ms, Category.RESTORE),
            (self.trained_ms, Category.COMPILE),
        )
        known = max((number for number, (moment, _) in enumerate(stages) if moment is not None), default=-1)
        for moment, category in stages[: known + 1]:
            if moment is not None:
                until(moment, category)
        if self.has_trained:
            saving = min(self.saving_ms, stop - at)
            if saving:
                spent[Category.SAVING] = saving
            if stop - at > saving:
                spent[Category.TRAINING] = stop - at - saving
        elif stop > at:
            category = self._next(known)
            spent[category] = spent.get(category, 0) + stop - at
        if end > stop:
            spent[Category.LEAVING] = end - stop
        return spent

    def unseen_end_ms(self, next_ms: int) -> int:
        """Guesses when it was gone if nobody saw its processes end. ``next_ms``: when the next pods were created.

        If it is known when they stopped to train, they have not taken long to end.
        """
        stopped_ms = self.broke_ms if self.left_ms is None else self.left_ms
        if stopped_ms is None or stopped_ms >= next_ms:
            return next_ms
        return stopped_ms + min((next_ms - stopped_ms) // 2, _LEAVES_MS)

    def at_most_until_ms(self, step: int) -> int | None:
        """Returns until when it trained at most, if ``step`` was the newest that it saved. None if that is not known.

        If it had gone on for longer, it would have saved a later step: half as long again as between two saves.
        """
        if self.trained_ms is None or self.saves < _FEW_SAVES or not self.marks or step <= self.first_step:
            return None
        every_ms = self.marks[-1].trained_ms / self.saves
        trained_ms = self._trained_until_ms(step, None)
        return self.trained_ms + trained_ms + self.saving_ms + round(every_ms * 1.5)

    def state(self) -> Category:
        """Returns what the time goes into now."""
        if self.gone_ms is not None:
            return Category.WAITING
        if self.stopped_ms is not None:
            return Category.LEAVING
        if self.has_trained:
            return Category.TRAINING
        stages = (self.created_ms, self.bound_ms, self.started_ms, self.joined_ms, self.restored_ms)
        return self._next(max(number for number, moment in enumerate(stages) if moment is not None))

    @property
    def pace_ms(self) -> float | None:
        """How long a step takes it. None while that is not known."""
        newest = self.marks[-1] if self.marks else None
        if newest is None or newest.step <= self.first_step:
            return None
        return newest.trained_ms / (newest.step - self.first_step)

    def lost_ms(self, step: int, now_ms: int, pace_ms: float | None = None) -> int:
        """Returns for how long it trained after it had passed ``step``: what is lost if that step is restored.

        Between two steps whose times are known, each step counts alike.

        Args:
            step: The step.
            now_ms: The time.
            pace_ms: How long a step takes in another life of the gang, if that is known. Counts if this life did not
                tell when it passed any step.
        """
        trained = self.spent(now_ms).get(Category.TRAINING, 0)
        lost = trained - self._trained_until_ms(step, pace_ms)
        return lost if lost > _LEAST_MS else 0

    def _trained_until_ms(self, step: int, pace_ms: float | None) -> int:
        """For how long it had trained when it passed ``step``."""
        if step <= self.first_step:
            return 0
        before, after = StepMark(self.first_step, 0), None
        for mark in self.marks:
            if mark.step <= step:
                before = max(before, mark)
            else:
                after = mark
                break
        if after is None:  # later than the newest mark, at the pace until then
            pace = pace_ms if self.pace_ms is None else self.pace_ms
            if pace is None:  # of no step it is known when it was passed; so nothing is known to be lost
                return self.spent(self.began_ms).get(Category.TRAINING, 0)
        else:
            pace = (after.trained_ms - before.trained_ms) / (after.step - before.step)
        return before.trained_ms + round(pace * (step - before.step))

    def goes_on(self, told: StepMark, saving_ms: int) -> bool:
        """Returns whether a step that is told of was passed after the stall that is known.

        Args:
            told: The step.
            saving_ms: For how long saves have stopped the training so far.
        """
        if self.stalled_ms is None or self.trained_ms is None:
            return False
        return self.trained_ms + told.trained_ms + saving_ms > self.stalled_ms + _END_MS

    def with_marks(self, marks: Iterable[StepMark]) -> tuple[StepMark, ...]:
        """Returns its marks and ``marks``; of two for one step the first that was known."""
        joined = {mark.step: mark for mark in (*marks, *self.marks)}
        return tuple(sorted(joined.values()))[-MARKS:]

    def _next(self, known: int) -> Category:
        """What comes after the last stage that is known."""
        following = (Category.SCHEDULING, Category.IMAGE, Category.UNKNOWN, Category.RESTORE, Category.COMPILE)
        return Category.WAITING if known < 0 else following[known]
