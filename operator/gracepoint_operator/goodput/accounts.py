"""The account of one workload: lives that are settled, lives that may still change, and what happened to them. Pure.

The ledger changes by observations of the pods and by what a process says. To take one a
second time changes nothing, and a late one is taken as long as its life is not settled. So it does not matter which
replica of the operator learns of something, or whether both do.

A life is settled when its successor has restored a step, and thereby shown which steps of it were lost, and has trained
and ended itself. A life that has never trained has nothing to lose, and is settled as soon as the next one begins. So
at most two lives are open.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math

from gracepoint_operator.goodput.life import (
    BLOCKABLE,
    RUNNING,
    BlockedTimes,
    Category,
    Life,
    Moment,
    PodsObservation,
    ProcessTimes,
    Spans,
    StallTimes,
    StepMark,
    TimeSpent,
    added,
    joined,
    spent_in,
    total_ms,
    with_span,
)
from gracepoint_operator.resources import (
    BlockedSpan,
    GangLife,
    PassedStep,
    SaveSuggestion,
    SecondsByCategory,
    WorkloadGoodput,
)
from gracepoint_operator.workloads import WorkloadIdentity

#: At most this number of times at which a gang was blocked is kept.
_SPANS = 16
#: The clock of the API server, which dates pods, may differ by this much from the one by which starts are reported.
_CLOCKS_MS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoodputLedger:
    """The account of one workload. Changes by observations of the pods and by what a process says.

    Attributes:
        since_ms: When the account begins.
        settled: The time of the lives that are settled, from ``since_ms`` on.
        lives: The open lives, oldest first. The last one is the current one.
        finished_ms: When the workload had finished. None while it runs.
        disruptions: How often a life ended and the workload continued.
        losses: How many of the settled disruptions lost steps.
        saves: Number of periodic saves in the settled lives.
        saves_ms: For how long they stopped the training.
        blocked: When the gang was blocked in the lives that are open, or before the first.
        blocked_since_ms: Since when it is blocked now. None: it is not.
    """

    since_ms: int
    settled: TimeSpent = dataclasses.field(default_factory=dict)
    lives: tuple[Life, ...] = ()
    finished_ms: int | None = None
    disruptions: int = 0
    losses: int = 0
    saves: int = 0
    saves_ms: int = 0
    blocked: Spans = ()
    blocked_since_ms: int | None = None

    @property
    def current(self) -> Life | None:
        """The newest life. None before the first pod was created."""
        return self.lives[-1] if self.lives else None

    @property
    def trained_before(self) -> Life | None:
        """The life right before the current one, if that one trained. None if it did not, or is settled."""
        if len(self.lives) < 2:
            return None
        before, life = self.lives
        return before if before.has_trained and before.gone_ms == life.began_ms else None

    def spent(self, now_ms: int) -> TimeSpent:
        """Returns where the time went, from ``since_ms`` until now, or until the workload had finished."""
        now_ms = max(self.since_ms, now_ms if self.finished_ms is None else self.finished_ms)
        if self.current is None:
            return spent_in(Category.WAITING, self.since_ms, now_ms, self._blocked(now_ms))
        spent = self.settled
        for number, life in enumerate(self.lives):
            spent = added(spent, self._spent_by(number, life, now_ms))
        gone_ms = self.current.gone_ms
        if gone_ms is None or gone_ms >= now_ms:
            return spent
        return added(spent, spent_in(Category.WAITING, gone_ms, now_ms, self._blocked(now_ms)))

    def state(self) -> Category | None:
        """Returns what the time goes into now. None if the workload has finished."""
        if self.finished_ms is not None:
            return None
        state = Category.WAITING if self.current is None else self.current.state()
        return Category.BLOCKED if self.blocked_since_ms is not None and state in BLOCKABLE else state

    @property
    def all_losses(self) -> int:
        """How many disruptions lost steps, as far as that is known."""
        return self.losses + (len(self.lives) == 2 and self._lost_ms(self.lives[0], self.lives[1]) > 0)

    @property
    def all_saves(self) -> tuple[int, int]:
        """Number of all periodic saves, and for how many milliseconds they stopped the training."""
        return (
            self.saves + sum(life.saves for life in self.lives),
            self.saves_ms + sum(life.saves_ms for life in self.lives),
        )

    def running_ms(self, now_ms: int) -> int:
        """Returns for how long processes ran."""
        return total_ms(self.spent(now_ms), RUNNING)

    def session_before(self, session: str, by_ms: int) -> str:
        """Returns the session of the start right before that of a session.

        Empty if it is not known, or if the pods of that start were made after ``by_ms``.
        """
        for before, life in itertools.pairwise(self.lives):
            if life.session == session and before.gone_ms == life.began_ms and before.created_ms <= by_ms:
                return before.session
        return ""

    # Changes.

    def with_observation(self, observed: PodsObservation | ProcessTimes | StallTimes | BlockedTimes) -> GoodputLedger:
        """Returns the ledger after what was observed, whatever kind that is."""
        match observed:
            case PodsObservation():
                return self.with_pods(observed)
            case ProcessTimes():
                return self.with_process_times(observed)
            case StallTimes():
                return self.with_stall(observed)
            case BlockedTimes():
                return self.with_block(observed)

    def with_pods(self, observation: PodsObservation) -> GoodputLedger:
        """Returns the ledger after an observation of the pods."""
        if self.finished_ms is not None:
            return self
        life = self.current
        if life is None or _is_next(life, observation):
            ledger = self._beginning(observation.attempt, observation.created, is_overlapped=observation.is_overlapped)
            return ledger._observed(observation)  # noqa: SLF001 - another one of this class
        return self._observed(observation) if observation.created.stamp_ms >= _second(life.created_ms) else self

    def with_process_times(self, times: ProcessTimes) -> GoodputLedger:
        """Returns the ledger after what a process says of its times."""
        number = self._number_of(times)
        if number is None:
            return self
        life = self.lives[number]
        if self.finished_ms is not None and life.session != times.session:
            return self
        if life.session and life.session != times.session:
            if number != len(self.lives) - 1 or life.stopped_ms is not None or times.attached_ms <= life.created_ms:
                return self  # of a process before
            # The containers were started again, in the same pods.
            again = Moment(stamp_ms=times.attached_ms, at_ms=times.attached_ms)
            ledger = self._beginning(life.attempt, again)
            return ledger._with(len(ledger.lives) - 1, joined(ledger.lives[-1], times))  # noqa: SLF001
        ledger = self._without_guess()
        return ledger._with(number, joined(ledger.lives[number], times))._guessed()  # noqa: SLF001

    def with_stall(self, times: StallTimes) -> GoodputLedger:
        """Returns the ledger after a process has said that training stalls."""
        life = self.current
        if life is None or self.finished_ms is not None or not life.has_trained or life.gone_ms is not None:
            return self
        if life.attempt != times.attempt or _second(life.created_ms) > times.created_ms:
            return self  # of a life before
        earliest_ms = times.stalled_ms if life.stalled_ms is None else life.stalled_ms
        stalled = dataclasses.replace(life, stalled_ms=min(earliest_ms, times.stalled_ms))
        # How long the saves before a mark took is not known.
        if any(stalled.has_passed_stall(mark, 0) for mark in life.marks):
            return self  # of a stall that is over
        return self._with(len(self.lives) - 1, stalled)

    def with_block(self, times: BlockedTimes) -> GoodputLedger:
        """Returns the ledger after the gang was seen to be blocked, or to be blocked no more."""
        if self.finished_ms is not None:
            return self
        since_ms = max(self.since_ms, times.since_ms)
        if times.until_ms is None:
            if any(begin <= since_ms < end for begin, end in self.blocked):
                return self  # another replica has seen its end
            before_ms = since_ms if self.blocked_since_ms is None else self.blocked_since_ms
            return dataclasses.replace(self, blocked_since_ms=min(since_ms, before_ms))
        spans = with_span(self.blocked, since_ms, times.until_ms)[-_SPANS:]
        still = self.blocked_since_ms is not None and self.blocked_since_ms >= times.until_ms
        return dataclasses.replace(self, blocked=spans, blocked_since_ms=self.blocked_since_ms if still else None)

    def _blocked(self, until_ms: int) -> Spans:
        """When the gang was blocked, up to that time."""
        since_ms = self.blocked_since_ms
        return self.blocked if since_ms is None else with_span(self.blocked, since_ms, until_ms)

    def with_end(self, now_ms: int) -> GoodputLedger:
        """Returns the ledger of a workload that has finished by itself."""
        if self.finished_ms is not None:
            return self
        life = self.current
        return dataclasses.replace(self, finished_ms=now_ms if life is None or life.gone_ms is None else life.gone_ms)

    def _beginning(self, attempt: int, created: Moment, *, is_overlapped: bool = False) -> GoodputLedger:
        """Returns the ledger with a new life, of which nothing else is known."""
        before = self.current
        if before is None:
            life = Life(began_ms=self.since_ms, attempt=attempt, created_ms=max(self.since_ms, created.at_ms))
            return dataclasses.replace(self, lives=(life,))
        # The pods of the life before may still end. From now on, the time is the new life's.
        end_ms = before.gone_ms
        if end_ms is None:
            end_ms = created.at_ms if is_overlapped else before.unseen_end_ms(created.at_ms)
        gone_ms = max(before.began_ms, min(created.at_ms, end_ms))
        previous_life = dataclasses.replace(before, gone_ms=gone_ms)
        life = Life(began_ms=gone_ms, attempt=attempt, created_ms=max(gone_ms, created.at_ms))
        ledger = dataclasses.replace(self, lives=(*self.lives[:-1], previous_life), disruptions=self.disruptions + 1)
        settled_ledger = ledger._settle()  # noqa: SLF001 - another one of this class
        return dataclasses.replace(settled_ledger, lives=(*settled_ledger.lives, life))

    def _guessed(self) -> GoodputLedger:
        """Returns the ledger with what the current life shows of one before it whose end nobody saw."""
        if len(self.lives) < 2 or self.lives[0].broke_ms is not None:
            return self
        before, life = self.lives
        before = dataclasses.replace(before, broke_ms=self._guess())
        gone_ms = before.unseen_end_ms(life.created_ms)
        lives = (dataclasses.replace(before, gone_ms=gone_ms), dataclasses.replace(life, began_ms=gone_ms))
        return dataclasses.replace(self, lives=lives)

    def _without_guess(self) -> GoodputLedger:
        """Returns the ledger without what ``_guessed`` added. What a process reports may change the guess."""
        if len(self.lives) < 2 or self.lives[0].broke_ms != self._guess():
            return self
        return self._with(0, dataclasses.replace(self.lives[0], broke_ms=None))

    def _guess(self) -> int | None:
        """Until when the life before the current one trained at most. None if it said so, or if that is not known."""
        before, life = self.lives
        if before.left_ms is not None or life.restored_ms is None:
            return None
        return before.at_most_until_ms(life.first_step)

    def _settle(self) -> GoodputLedger:
        """Settles all that the current life, which has ended, leaves no doubt about."""
        *earlier, newest = self.lives
        if not newest.has_trained:  # what it lost of an earlier life, the next one will show
            return self._settled(newest, lost_ms=None, lives=tuple(earlier))
        ledger = self
        for life in earlier:
            ledger = ledger._settled(life, lost_ms=self._lost_ms(life, newest), lives=(newest,))
        return ledger

    def _settled(self, life: Life, *, lost_ms: int | None, lives: tuple[Life, ...]) -> GoodputLedger:
        end_ms = life.began_ms if life.gone_ms is None else life.gone_ms
        spent = life.spent(life.began_ms, self._blocked(end_ms))
        return dataclasses.replace(
            self,
            settled=added(self.settled, _moved(spent, lost_ms or 0)),
            lives=lives,
            losses=self.losses + bool(lost_ms),
            saves=self.saves + life.saves,
            saves_ms=self.saves_ms + life.saves_ms,
        )

    def _spent_by(self, number: int, life: Life, now_ms: int) -> TimeSpent:
        spent = life.spent(now_ms, self._blocked(now_ms))
        if number + 1 == len(self.lives):
            return spent
        return _moved(spent, self._lost_ms(life, self.lives[number + 1]))

    @staticmethod
    def _lost_ms(life: Life, after: Life) -> int:
        """For how long a life computed what the next one computes again. 0 while that is not known."""
        if not life.has_trained or (after.restored_ms is None and not after.has_trained):
            return 0
        return life.lost_ms(after.first_step, life.began_ms, after)

    def _number_of(self, times: ProcessTimes) -> int | None:
        """The place of the life that a process speaks of. None if it is settled, or not known yet."""
        for number in reversed(range(len(self.lives))):
            if self.lives[number].session == times.session:
                return number
        if times.of_former:  # nothing was ever heard of that life here: its times cannot be placed
            return None
        for number in reversed(range(len(self.lives))):
            life = self.lives[number]
            if life.attempt == times.attempt and _second(life.created_ms) <= times.created_ms:
                return number
        return None

    def _with(self, number: int, life: Life) -> GoodputLedger:
        if life == self.lives[number]:
            return self
        return dataclasses.replace(self, lives=(*self.lives[:number], life, *self.lives[number + 1 :]))

    def _observed(self, observation: PodsObservation) -> GoodputLedger:
        life = self.lives[-1]
        gone_ms = life.gone_ms
        if gone_ms is None and observation.gone_ms is not None:  # a process that said it left had not ended
            gone_ms = max(life.created_ms, observation.gone_ms, life.left_ms or 0)
        bound_ms, bound_pods, started_ms = life.bound_ms, life.bound_pods, life.started_ms
        if life.joined_ms is None:  # later, a pod that is made again does not delay their start any more
            started_ms = _last(started_ms, observation.started)
            bound_ms = _last(bound_ms, observation.bound, more=observation.pods > bound_pods)
            bound_pods = bound_pods if observation.bound is None else max(bound_pods, observation.pods)
        changed_life = dataclasses.replace(
            life,
            attempt=max(life.attempt, observation.attempt),
            bound_ms=bound_ms,
            bound_pods=bound_pods,
            started_ms=started_ms,
            broke_ms=observation.broke_ms if life.broke_ms is None else life.broke_ms,
            gone_ms=gone_ms,
        )
        return self._with(len(self.lives) - 1, changed_life)


def stages(ledger: GoodputLedger) -> tuple[object, ...]:
    """What is known of a workload apart from figures: its lives, and which stages each has reached. Times are figures.

    Messages take different times to arrive, so the times of stages that are known still move a little. What a workload
    that has finished has spent in all is no moving figure any more.
    """
    lives = tuple(
        (
            *(life.attempt, life.session, life.bound_pods, life.first_step),
            *(
                moment is not None
                for moment in (
                    *(life.bound_ms, life.started_ms, life.attached_ms, life.joined_ms, life.restored_ms),
                    *(life.trained_ms, life.left_ms, life.stalled_ms, life.broke_ms, life.gone_ms),
                )
            ),
        )
        for life in ledger.lives
    )
    spent = None if ledger.finished_ms is None else (ledger.all_saves, sum(life.saving_ms for life in ledger.lives))
    return ledger.disruptions, ledger.all_losses, spent, lives, ledger.blocked_since_ms is None


def is_later(life: Life, created_ms: int) -> bool:
    """True if a pod of the same attempt, which was created in that second, is of a later life.

    All pods of a life are created before the last of its containers is started, and before one of them ends.
    """
    if created_ms <= life.created_ms:
        return False
    ended_ms = min((at for at in (life.broke_ms, life.gone_ms) if at is not None), default=None)
    if ended_ms is not None and created_ms >= _second(ended_ms):
        return True
    return life.started_ms is not None and created_ms > life.started_ms + _CLOCKS_MS


def _is_next(life: Life, observation: PodsObservation) -> bool:
    """True if the pods are of a later life."""
    return observation.attempt > life.attempt or (
        observation.attempt == life.attempt and is_later(life, observation.created.stamp_ms)
    )


def _moved(spent: TimeSpent, lost_ms: int) -> TimeSpent:
    """Moves what was lost from the training to the recomputation."""
    lost_ms = min(lost_ms, spent.get(Category.TRAINING, 0))
    return added(spent, {Category.TRAINING: -lost_ms, Category.RECOMPUTATION: lost_ms}) if lost_ms > 0 else spent


def _last(before_ms: int | None, moment: Moment | None, *, more: bool = False) -> int | None:
    """The later of two moments, as it was guessed first. ``more``: what was seen is about more pods."""
    if moment is None or before_ms is None:
        return before_ms if moment is None else moment.at_ms
    return max(before_ms, moment.at_ms) if more or moment.stamp_ms > before_ms else before_ms


def _second(moment_ms: int) -> int:
    """The beginning of its second: as the API server writes it."""
    return moment_ms // 1000 * 1000


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """How often to save, and what that follows from: what a save costs, and how often work is lost.

    Let ``d`` be the time for which a save stops the training, and ``M`` the mean time between two losses. J. W. Young
    (A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974) finds the interval
    ``sqrt(2 d M)``. J. T. Daly (A higher order estimate of the optimum checkpoint interval for restart dumps, Future
    Generation Computer Systems 22(3), 2006) refines it for losses that are so frequent that ``d`` is not small compared
    to ``M``::

        sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d      if d < 2M
        M                                                          otherwise

    Both assume that a disruption loses all steps since the last save. A preemption that is announced early enough loses
    none, however rarely the job saves. So a disruption counts by the probability that it loses steps. With ``k`` of
    ``n`` disruptions so far that did, it is ``(k + 1) / (n + 2)`` (Laplace's rule of succession): it is never 0, as the
    next one may come without a notice.

    Attributes:
        cost_s: Seconds for which a periodic save stops the training.
        between_disruptions_s: Mean seconds for which processes run between two disruptions.
        between_losses_s: The same between two disruptions that lose steps.
        interval_s: Seconds from the end of a periodic save to the next one.
    """

    cost_s: float
    between_disruptions_s: float
    between_losses_s: float
    interval_s: float


def daly_s(cost_s: float, between_losses_s: float) -> float:
    """Returns the seconds from the end of a save to the next save. Both arguments are in seconds, above 0."""
    if cost_s >= 2 * between_losses_s:
        return between_losses_s
    part = cost_s / (2 * between_losses_s)
    return math.sqrt(2 * cost_s * between_losses_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def suggested(ledger: GoodputLedger, now_ms: int, *, at_least_s: float = 0.0) -> Suggestion | None:
    """Returns what follows from the account so far. None before the first disruption, and before the first save.

    Args:
        ledger: The account.
        now_ms: The time.
        at_least_s: Seconds that a save takes until it is committed. A save waits for the one before.
    """
    saves, saves_ms = ledger.all_saves
    running_s = ledger.running_ms(now_ms) / 1000
    if not (saves and saves_ms and ledger.disruptions and running_s):
        return None
    cost_s = saves_ms / saves / 1000
    between_s = running_s / ledger.disruptions
    losing = (ledger.all_losses + 1) / (ledger.disruptions + 2)
    return Suggestion(cost_s, between_s, between_s / losing, max(at_least_s, daly_s(cost_s, between_s / losing)))


_EPOCH = datetime.datetime.fromtimestamp(0, datetime.UTC)
_MS = datetime.timedelta(milliseconds=1)


def written(ledger: GoodputLedger, workload: WorkloadIdentity, now_ms: int, *, save_s: float = 0.0) -> WorkloadGoodput:
    """Returns the ledger of a workload as the status of its policy keeps it.

    Args:
        ledger: Its account.
        workload: The workload.
        now_ms: The time.
        save_s: Seconds that a save takes until it is committed. 0: not known.
    """
    state = ledger.state()
    return WorkloadGoodput(
        name=workload.name,
        uid=workload.uid,
        workload_kind=WorkloadGoodput.named(workload.kind),
        since=_time(ledger.since_ms),
        until=_time(max(ledger.since_ms, now_ms)),
        state=None if state is None else str(state),
        seconds=_seconds(ledger.spent(now_ms)),
        disruptions=ledger.disruptions,
        losses=ledger.all_losses,
        suggestion=_suggestion(suggested(ledger, now_ms, at_least_s=save_s)),
        settled_seconds=_seconds(ledger.settled) if ledger.settled else None,
        settled_losses=ledger.losses,
        settled_saves=ledger.saves,
        settled_save_seconds=ledger.saves_ms / 1000,
        finished=_optional(ledger.finished_ms),
        lives=[_life(life) for life in ledger.lives],
        blocked=[BlockedSpan(began=_time(begin), ended=_time(end)) for begin, end in ledger.blocked] or None,
        blocked_since=_optional(ledger.blocked_since_ms),
    )


def read(entry: WorkloadGoodput) -> GoodputLedger:
    """Returns the account that an entry keeps."""
    return GoodputLedger(
        since_ms=_ms(entry.since),
        settled={} if entry.settled_seconds is None else spent_of(entry.settled_seconds),
        lives=tuple(_read_life(life) for life in entry.lives),
        finished_ms=_optional_ms(entry.finished),
        disruptions=entry.disruptions,
        losses=entry.settled_losses,
        saves=entry.settled_saves,
        saves_ms=round(entry.settled_save_seconds * 1000),
        blocked=tuple((_ms(span.began), _ms(span.ended)) for span in entry.blocked or ()),
        blocked_since_ms=_optional_ms(entry.blocked_since),
    )


def spent_of(seconds: SecondsByCategory) -> TimeSpent:
    """Returns milliseconds by category."""
    values = {category: getattr(seconds, category.value) for category in Category}
    return {category: round(value * 1000) for category, value in values.items() if value}


def _seconds(spent: TimeSpent) -> SecondsByCategory:
    return SecondsByCategory(**{category.value: ms / 1000 for category, ms in spent.items() if ms})


def _suggestion(suggestion: Suggestion | None) -> SaveSuggestion | None:
    if suggestion is None:
        return None
    return SaveSuggestion(
        save_seconds=round(suggestion.cost_s, 3),
        seconds_between_disruptions=round(suggestion.between_disruptions_s, 1),
        seconds_between_losses=round(suggestion.between_losses_s, 1),
        every_seconds=round(suggestion.interval_s, 1),
    )


def _life(life: Life) -> GangLife:
    return GangLife(
        began=_time(life.began_ms),
        attempt=life.attempt,
        created=_time(life.created_ms),
        bound=_optional(life.bound_ms),
        bound_pods=life.bound_pods or None,
        started=_optional(life.started_ms),
        session=life.session or None,
        attached=_optional(life.attached_ms),
        joined=_optional(life.joined_ms),
        restored=_optional(life.restored_ms),
        first_step=life.first_step or None,
        trained=_optional(life.trained_ms),
        left=_optional(life.left_ms),
        stalled=_optional(life.stalled_ms),
        broke=_optional(life.broke_ms),
        gone=_optional(life.gone_ms),
        saving_seconds=life.saving_ms / 1000 or None,
        periodic_saves=life.saves or None,
        periodic_save_seconds=life.saves_ms / 1000 or None,
        saved=_optional(life.saved_ms),
        passed=[PassedStep(step=mark.step, trained_seconds=mark.trained_ms / 1000) for mark in life.marks] or None,
    )


def _read_life(life: GangLife) -> Life:
    return Life(
        began_ms=_ms(life.began),
        attempt=life.attempt,
        created_ms=_ms(life.created),
        bound_ms=_optional_ms(life.bound),
        bound_pods=life.bound_pods or 0,
        started_ms=_optional_ms(life.started),
        session=life.session or "",
        attached_ms=_optional_ms(life.attached),
        joined_ms=_optional_ms(life.joined),
        restored_ms=_optional_ms(life.restored),
        first_step=life.first_step or 0,
        trained_ms=_optional_ms(life.trained),
        left_ms=_optional_ms(life.left),
        stalled_ms=_optional_ms(life.stalled),
        broke_ms=_optional_ms(life.broke),
        gone_ms=_optional_ms(life.gone),
        saving_ms=round((life.saving_seconds or 0.0) * 1000),
        saves=life.periodic_saves or 0,
        saves_ms=round((life.periodic_save_seconds or 0.0) * 1000),
        saved_ms=_optional_ms(life.saved),
        marks=tuple(StepMark(item.step, round(item.trained_seconds * 1000)) for item in life.passed or ()),
    )


def _time(ms: int) -> datetime.datetime:
    return _EPOCH + ms * _MS


def _ms(time: datetime.datetime) -> int:
    return round((time - _EPOCH) / _MS)


def _optional(ms: int | None) -> datetime.datetime | None:
    return None if ms is None else _time(ms)


def _optional_ms(time: datetime.datetime | None) -> int | None:
    return None if time is None else _ms(time)
