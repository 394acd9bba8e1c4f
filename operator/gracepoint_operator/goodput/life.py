"""One life of a gang: from the creation of its first pod until its last process has ended. Immutable values. Pure.

A life keeps the times at which its stages were reached. Its account is computed from these, so a time that becomes
known late only moves time from one category to another: the categories of a life always add up to its length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum

from gracepoint.wire.messages import Spent
from gracepoint_operator.kube.objects import Pod


class Category(StrEnum):
    """What the time of a workload goes into. At any moment it is exactly one of these."""

    TRAINING = "training"  # steps whose results were kept
    SAVING = "saving"  # training was stopped by a save: periodic, at a preemption, or at a drill
    RECOMPUTATION = "recomputation"  # steps whose results were lost, so that they had to be computed again
    LEAVING = "leaving"  # from the end of training until the last process has ended
    BLOCKED = "blocked"  # no process can run, as something is missing or refused: see ``decisions.waiting``
    WAITING = "waiting"  # there are no pods: the workload is queued, suspended, or about to be created again
    SCHEDULING = "scheduling"  # pods exist, and some are not bound to a node
    IMAGE = "image"  # all pods are bound, and some containers do not run: images, volumes, init containers
    JOIN = "join"  # all containers run, and the processes have not all joined: imports, and waiting for each other
    RESTORE = "restore"  # the processes have joined, and the state is not there
    COMPILE = "compile"  # the state is there, and the first step is not done
    UNKNOWN = "unknown"  # containers run, and no process has said what it does


#: The parts of a restart, in their order.
RESTART = (
    Category.LEAVING,
    Category.BLOCKED,
    Category.WAITING,
    Category.SCHEDULING,
    Category.IMAGE,
    Category.JOIN,
    Category.RESTORE,
    Category.COMPILE,
)
#: Of these, the part in which the gang was blocked counts as that.
BLOCKABLE = frozenset({Category.LEAVING, Category.WAITING, Category.SCHEDULING, Category.IMAGE})
#: While these last, processes run, so that they can be disrupted.
RUNNING = (
    Category.TRAINING,
    Category.SAVING,
    Category.RECOMPUTATION,
    Category.JOIN,
    Category.RESTORE,
    Category.COMPILE,
    Category.UNKNOWN,
)

#: Milliseconds by category. A category without an entry has none.
TimeSpent = Mapping[Category, int]
#: Times from one moment to another, in their order, which do not overlap.
Spans = tuple[tuple[int, int], ...]


def with_span(spans: Spans, begin_ms: int, end_ms: int) -> Spans:
    """Returns the spans and one more, as spans that do not overlap."""
    if end_ms <= begin_ms:
        return spans
    apart = [span for span in spans if span[1] < begin_ms or span[0] > end_ms]
    touching = [(begin_ms, end_ms), *(span for span in spans if span not in apart)]
    return tuple(sorted([*apart, (min(span[0] for span in touching), max(span[1] for span in touching))]))


def spent_in(category: Category, begin_ms: int, end_ms: int, blocked: Spans) -> TimeSpent:
    """Returns the time from one moment to another, which went into a category, but for what was blocked."""
    if end_ms <= begin_ms:
        return {}
    if not blocked or category not in BLOCKABLE:
        return {category: end_ms - begin_ms}
    held_ms = sum(max(0, min(end, end_ms) - max(begin, begin_ms)) for begin, end in blocked)
    spent = {Category.BLOCKED: held_ms, category: end_ms - begin_ms - held_ms}
    return {part: ms for part, ms in spent.items() if ms}


def added(one: TimeSpent, other: TimeSpent) -> TimeSpent:
    """Returns the sums by category."""
    sums = {category: one.get(category, 0) + other.get(category, 0) for category in Category}
    return {category: sum_ms for category, sum_ms in sums.items() if sum_ms}


def total_ms(spent: TimeSpent, categories: tuple[Category, ...] = tuple(Category)) -> int:
    """Returns the milliseconds of some categories together."""
    return sum(spent.get(category, 0) for category in categories)


#: At most this number of marks is kept: a restart restores one of the newest checkpoints.
MARKS = 8
#: Less than this is not lost: all times are rounded.
_LEAST_MS = 10
#: The time at which a process ended is known to within about this. The time at which it says that it left is known to
#: within some milliseconds.
_END_MS = 1000
#: If nobody saw a process end, it is taken to have ended so long after its training: it leaves at once, or is killed.
_LEAVES_MS = 10_000
#: From fewer saves, the time between two of them cannot be estimated.
_FEW_SAVES = 2
#: A life that had trained for longer than so many times that time after a save would have saved once more.
_INTERVALS = 1.5


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
    """One life of a gang. A time that is not known, or has not come yet, is None.

    Attributes:
        began_ms: When the life before ended. For the first life, when the workload was created.
        attempt: Number of the workload's restarts before this life.
        created_ms: When its first pod was created.
        bound_ms: When its last pod was bound to a node.
        bound_pods: How many pods were, at that time.
        started_ms: When the last of its processes was started, as they say. Until they do: when the last of its
            containers was, as kubelets write.
        session: Session of the process that reports this life. Empty if none has.
        attached_ms: When that process began to join the others. What it reports counts from there.
        joined_ms: When all processes had joined.
        restored_ms: When the state was restored.
        first_step: The step from which it trained: the one that it restored. 0 if it restored none.
        trained_ms: When the first step was done.
        left_ms: When training ended for good, as the processes say: after the emergency save, or with the last step.
        stalled_ms: When the last step was passed before it stalled. None: it has not, or training continued after that.
        broke_ms: When its first process ended, or the node of one was deleted.
        gone_ms: When its last process had ended. None while one runs.
        saving_ms: For how long saves stopped the training.
        saves: Number of periodic saves.
        saves_ms: For how long periodic saves stopped the training.
        saved_ms: When the newest step was passed that this life has in a committed checkpoint.
        marks: Steps that it has passed, in their order: the newest at which saves began, or that it reported.
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
        """When it stopped to train, or to prepare for that. None while it does."""
        broke_ms = self.broke_ms
        if broke_ms is not None and self.left_ms is not None and 0 < self.left_ms - broke_ms < _END_MS:
            broke_ms = self.left_ms
        ends = [at for at in (self.left_ms, broke_ms, self.gone_ms) if at is not None]
        if ends and self.stalled_ms is not None and self.left_ms is None:  # it stalled until it ended
            ends.append(self.stalled_ms)
        return min(ends, default=None)

    def spent(self, now_ms: int, blocked: Spans = ()) -> TimeSpent:
        """Returns where the time from ``began_ms`` to its end went, or to now if it has not ended.

        Steps count as kept; see ``lost_ms``.

        Args:
            now_ms: The time.
            blocked: When the gang was blocked.
        """
        end = max(self.began_ms, now_ms if self.gone_ms is None else self.gone_ms)
        stop = end if self.stopped_ms is None else min(end, max(self.began_ms, self.stopped_ms))
        spent: dict[Category, int] = {}
        at = self.began_ms

        def add(category: Category, begin: int, end: int) -> None:
            for part, ms in spent_in(category, begin, end, blocked).items():
                spent[part] = spent.get(part, 0) + ms

        def until(moment: int, category: Category) -> None:
            nonlocal at
            later = min(max(at, moment), stop)
            add(category, at, later)
            at = later

        stages = (
            (self.created_ms, Category.WAITING),
            (self.bound_ms, Category.SCHEDULING),
            (self.started_ms, Category.IMAGE),
            (self.joined_ms, Category.JOIN),
            (self.restored_ms, Category.RESTORE),
            (self.trained_ms, Category.COMPILE),
        )
        last_stage = max((number for number, (moment, _) in enumerate(stages) if moment is not None), default=-1)
        for moment, category in stages[: last_stage + 1]:
            if moment is not None:
                until(moment, category)
        if self.has_trained:
            saving = min(self.saving_ms, stop - at)
            add(Category.SAVING, at, at + saving)
            add(Category.TRAINING, at + saving, stop)
        else:
            add(self._next(last_stage), at, stop)
        add(Category.LEAVING, stop, end)
        return spent

    def unseen_end_ms(self, next_ms: int) -> int:
        """Guesses when it was gone if nobody saw its processes end. ``next_ms``: when the next pods were created.

        If it is known when they stopped to train, they have not taken long to end.
        """
        stopped_ms = _newest(self.left_ms, self.broke_ms)
        if stopped_ms is None or stopped_ms >= next_ms:
            return next_ms
        return stopped_ms + min((next_ms - stopped_ms) // 2, _LEAVES_MS)

    def at_most_until_ms(self, step: int) -> int | None:
        """Returns until when it trained at most, if ``step`` was the newest that it saved. None if that is not known.

        If it had trained for longer, it would have saved a later step: half as long again as between two saves.
        """
        if self.trained_ms is None or self.save_interval_ms is None or step <= self.first_step:
            return None
        trained_ms = self._trained_until_ms(step, None)
        return self.trained_ms + trained_ms + self.saving_ms + round(self.save_interval_ms * _INTERVALS)

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

    @property
    def save_interval_ms(self) -> float | None:
        """For how long it trains between two periodic saves. None while that is not known."""
        return self.marks[-1].trained_ms / self.saves if self.marks and self.saves >= _FEW_SAVES else None

    def lost_ms(self, step: int, now_ms: int, after: Life | None = None) -> int:
        """Returns for how long it trained after it had passed ``step``: what is lost if that step is restored.

        Between two steps whose times are known, each step counts alike. If this life did not report when it passed any
        step, a step takes as long as in ``after``. Lives differ in that, so it is also bounded: by what a life trains
        at most after a save until it has saved once more.

        Args:
            step: The step.
            now_ms: The time.
            after: The next life.
        """
        trained = self.spent(now_ms).get(Category.TRAINING, 0)
        lost_ms = trained - self._trained_until_ms(step, None if after is None else after.pace_ms)
        if self.pace_ms is None and after is not None and after.save_interval_ms is not None and step > self.first_step:
            lost_ms = min(lost_ms, round(after.save_interval_ms * _INTERVALS))
        return lost_ms if lost_ms > _LEAST_MS else 0

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

    def has_passed_stall(self, mark: StepMark, saving_ms: int) -> bool:
        """Returns whether a reported step was passed after the stall that is known.

        Args:
            mark: The step.
            saving_ms: For how long saves have stopped the training so far.
        """
        if self.stalled_ms is None or self.trained_ms is None:
            return False
        return self.trained_ms + mark.trained_ms + saving_ms > self.stalled_ms + _END_MS

    def with_marks(self, marks: Iterable[StepMark]) -> tuple[StepMark, ...]:
        """Returns its marks and ``marks``; of two for one step the first that was known."""
        by_step = {mark.step: mark for mark in (*marks, *self.marks)}
        return tuple(sorted(by_step.values()))[-MARKS:]

    def _next(self, last_stage: int) -> Category:
        """What comes after the last stage that is known."""
        next_categories = (Category.SCHEDULING, Category.IMAGE, Category.UNKNOWN, Category.RESTORE, Category.COMPILE)
        return Category.WAITING if last_stage < 0 else next_categories[last_stage]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """When something happened.

    Attributes:
        stamp_ms: As the API server or the kubelet wrote it, in whole seconds.
        at_ms: The best guess.
    """

    stamp_ms: int
    at_ms: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodsObservation:
    """What the operator sees of the pods of one life. None: not yet.

    Attributes:
        attempt: Number of the workload's restarts when the pods were made.
        created: When the first pod was created.
        bound: When the last pod was bound, if all are.
        pods: How many pods there are.
        started: When the last container was started, if all are.
        broke_ms: When the first process ended.
        gone_ms: When the last process had ended, if all have.
        is_overlapped: Whether a process of the life before still ran when this one was seen.
    """

    attempt: int
    created: Moment
    bound: Moment | None = None
    pods: int = 0
    started: Moment | None = None
    broke_ms: int | None = None
    gone_ms: int | None = None
    is_overlapped: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StallTimes:
    """What a process says when its training stalls. Any process of a life may say it.

    Attributes:
        attempt: Number of the workload's restarts when its pod was made.
        created_ms: When its pod was created.
        stalled_ms: When the newest step was passed.
    """

    attempt: int
    created_ms: int
    stalled_ms: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedTimes:
    """That a gang is blocked, or was.

    Attributes:
        since_ms: Since when.
        until_ms: Until when. None: it still is.
    """

    since_ms: int
    until_ms: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessTimes:
    """What the primary process of a life says. None: not yet.

    Attributes:
        session: Its session.
        attempt: Number of the workload's restarts when its pod was made.
        created_ms: When its pod was created.
        attached_ms: When it began to join the others.
        started_ms: When the last of the processes was started.
        joined_ms: As in ``Life``. So are the fields that are not described here.
        of_former: True if a later start reports it. ``attempt`` and ``created_ms`` are those of that start then, and
            only the session says of which life it is.
    """

    session: str
    attempt: int
    created_ms: int
    attached_ms: int
    joined_ms: int
    started_ms: int | None = None
    restored_ms: int | None = None
    first_step: int = 0
    trained_ms: int | None = None
    left_ms: int | None = None
    saving_ms: int = 0
    saves: int = 0
    saves_ms: int = 0
    saved_ms: int | None = None
    marks: tuple[StepMark, ...] = ()
    of_former: bool = False


def joined(life: Life, times: ProcessTimes) -> Life:
    """Returns the life with what its process says. What is known already stays, except for sums such as ``saves``.

    Messages take different times to arrive. So all times of a process are placed by the message that took least time.
    """
    before = times.attached_ms if life.attached_ms is None else life.attached_ms
    attached_ms = min(before, times.attached_ms)
    late_ms, early_ms = times.attached_ms - attached_ms, before - attached_ms
    first_step = times.first_step
    if life.restored_ms is not None or life.trained_ms is not None:
        first_step = life.first_step
    stall_is_over = any(life.has_passed_stall(mark, times.saving_ms) for mark in times.marks)
    started_ms = life.started_ms
    if times.started_ms is not None:  # better than the time that kubelets write, in whole seconds
        started_ms = max(life.created_ms, times.started_ms - late_ms)
    elif started_ms is not None and started_ms == life.attached_ms:  # no more was known of it
        started_ms = attached_ms
    return dataclasses.replace(
        life,
        session=times.session,
        attached_ms=attached_ms,
        started_ms=attached_ms if started_ms is None and life.bound_ms is not None else started_ms,
        joined_ms=_placed(life.joined_ms, times.joined_ms, late_ms, early_ms),
        restored_ms=_placed(life.restored_ms, times.restored_ms, late_ms, early_ms),
        first_step=first_step,
        trained_ms=_placed(life.trained_ms, times.trained_ms, late_ms, early_ms),
        left_ms=_placed(life.left_ms, times.left_ms, late_ms, early_ms),
        saving_ms=_saving_ms(life, times),
        saves=max(life.saves, times.saves),
        saves_ms=max(life.saves_ms, times.saves_ms),
        saved_ms=_newest(life.saved_ms, None if times.saved_ms is None else times.saved_ms - late_ms),
        stalled_ms=None if stall_is_over else life.stalled_ms,
        marks=life.with_marks(times.marks),
    )


def _saving_ms(life: Life, times: ProcessTimes) -> int:
    """It grows until training ends. What was reported as a save until then may have been the beginning of a stall."""
    if life.left_ms is not None:
        return life.saving_ms
    return max(life.saving_ms, times.saving_ms) if times.left_ms is None else times.saving_ms


def _placed(known_ms: int | None, reported_ms: int | None, late_ms: int, early_ms: int) -> int | None:
    if known_ms is not None:
        return known_ms - early_ms
    return None if reported_ms is None else reported_ms - late_ms


def _newest(one: int | None, other: int | None) -> int | None:
    return max((moment for moment in (one, other) if moment is not None), default=None)


#: A process that says it runs for longer is not believed: ten years.
_LONGEST_S = 3e8
_MOST_STEPS = 2**53
_MOST_DIGITS = 16
_LONGEST_SESSION = 64


def process_times(spent: Spent, session: str, pod: Pod, now: float, *, of_former: bool = False) -> ProcessTimes | None:
    """Reads what a process says of its time, on the clock of the operator.

    None if the figures contradict each other: a process may say anything.

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
    moments = [0.0, *(offset for offset in offsets if offset is not None), spent.now_s, _LONGEST_S]
    passed = spent.passed or {}
    durations = [spent.saving_s, spent.saves_s, spent.saved_s or 0.0, *passed.values()]
    if len(passed) > MARKS or not all(step.isdecimal() and len(step) <= _MOST_DIGITS for step in passed):
        return False
    started_s = 0.0 if spent.last_started_s is None else spent.last_started_s
    numbers = [spent.first_step, spent.saves, *map(int, passed)]
    return (
        all(math.isfinite(value) for value in (*moments, *durations))
        and abs(started_s) <= _LONGEST_S
        and moments == sorted(moments)
        and all(0 <= duration <= spent.now_s for duration in durations)
        and all(0 <= number < _MOST_STEPS for number in numbers)
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
