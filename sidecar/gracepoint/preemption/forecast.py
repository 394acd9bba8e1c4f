"""Predicts what an emergency save would take now, and says how much time is left for it.

``Forecaster`` predicts from measurements where there are any. ``TimeBudget`` counts:

The deadline is the time at which the pod is killed. A **reserve** before it is kept for exiting with the right code. So
every wait is bounded by ``time_left_s``, which is zero two reserves before the deadline: one reserve for the report of
a failure, one for the exit. If the deadline is very near or has passed, the save is still tried, for
``_LEAST_S``: operators round, and clouds are late.

The freeze begins as late as possible: when the time that is left is what drain and save are predicted to take in the
worst case, times the margin; but no later than the head start before the deadline. As long as there are no predictions,
the freeze begins at once.

Any thread may call the methods, but ``begin`` and ``end``, which belong to the agreement's reading thread.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from gracepoint import deadline
from gracepoint.deadline import Deadline, Evacuation, NewestSnapshot, Situation
from gracepoint.receivers import Mailbox
from gracepoint.settings import Settings

if TYPE_CHECKING:
    from gracepoint.checkpoint.saving.schedule import Throughput

#: Number of the latest durations that are kept.
_KEPT = 9
#: Steps in flight at most; see ``session.sync_points``.
LIMIT = 2
#: Training stalls if no step was passed for so long, and for so many times the longest step so far.
_STALLED_S = 10.0
_STALLED_TIMES = 5
#: A step that takes this long is a long one: only one of these is in flight.
LONG_STEP_S = 1.0
#: A preemption's save is tried for so long, however near the deadline is.
_LEAST_S = 3.0
_RESERVE_S = 1.0
_RESERVE_PART = 0.1


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is predicted of an emergency save.

    Attributes:
        state_bytes: Size of the state over all processes.
        step_s: Typical seconds from one ``step()`` to the next, which may be many steps of the optimizer.
        wait_s: Most seconds from one ``step()`` to the next, for example during an evaluation without sync points.
        drain_s: Seconds for the steps in flight.
        save_s: Seconds from drained to committed, by the throughput of earlier saves.
        send_s: Seconds from drained until the step is in snapshot servers. None: there are none.
    """

    state_bytes: int
    step_s: float
    wait_s: float
    drain_s: float
    save_s: float
    send_s: float | None = None

    @property
    def safe_s(self) -> float:
        """Seconds from drained until the step is safe, in storage or in snapshot servers."""
        return self.save_s if self.send_s is None else min(self.save_s, self.send_s)

    @property
    def needed_s(self) -> float:
        """Seconds from the freeze to the commit in the usual case."""
        return self.drain_s + self.save_s

    @property
    def needed_at_worst_s(self) -> float:
        """Seconds from the freeze to the commit if the freeze begins in the longest gap between two sync points."""
        return self.wait_s + self.needed_s


class TrainingPace:
    """How long a step takes: the median of the latest ones, as saves and evaluations in between make outliers.

    The training thread calls ``passed``. Any thread may read the rest.

    Attributes:
        run_ahead: How many steps may be in flight.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._durations_s: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._passed = 0
        self._longest_s = 0.0
        self.run_ahead = LIMIT
        self._together = 1  # how many steps were passed the newest time

    def passed(self, now_s: float, steps: int = 1) -> None:
        """Notes that a step was passed, or several together: the devices were waited for after the last one alone.

        The first steps do not count as the longest: they are dispatched without a wait, and one of them is compiled.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return
        took_s = now_s - last_s
        self._passed += 1
        self._together = steps
        self._durations_s.append(took_s / steps)
        # The median is computed only if it may have changed sides.
        if (took_s / steps >= LONG_STEP_S) is not (self.run_ahead == 1):
            self.run_ahead = limit(self.step_s)
        if took_s > self._longest_s and self._passed > 2 * LIMIT:  # not max(): this is part of every quiet step
            self._longest_s = took_s

    @property
    def known(self) -> bool:
        """True once enough steps were passed."""
        return self._passed > 2 * LIMIT

    @property
    def step_s(self) -> float:
        """Typical seconds of a step. 0 before the second step."""
        durations_s = list(self._durations_s)  # one atomic copy, as the training thread may append meanwhile
        return statistics.median(durations_s) if durations_s else 0.0

    @property
    def in_flight(self) -> int:
        """How many steps may be in flight before they are waited for: two turns, if several pass together."""
        return max(limit(self.step_s) + 1, 2 * self._together)

    @property
    def longest_s(self) -> float:
        """Seconds of the longest step so far."""
        return self._longest_s

    def stalled_s(self, now_s: float) -> float | None:
        """Returns the seconds since the newest step was passed if training stalls. None if it continues, or is new."""
        last_s, step_s = self._last_s, max(self.step_s, self._longest_s)
        if last_s is None or step_s == 0.0:
            return None
        return now_s - last_s if now_s - last_s > max(_STALLED_S, _STALLED_TIMES * step_s) else None


def limit(step_s: float) -> int:
    """Returns how many steps may be in flight if one takes ``step_s``."""
    return 1 if step_s >= LONG_STEP_S else LIMIT


def figures(pace: TrainingPace, state_bytes: int, process_count: int, throughput: Throughput) -> Figures:
    """Predicts an emergency save from the pace of training and from the saves so far."""
    bytes_per_s = throughput.streamed_bytes_per_s or throughput.snapshot_bytes_per_s
    save_s = deadline.writing_s(state_bytes, process_count, bytes_per_s)
    step_s = pace.step_s
    return Figures(state_bytes, step_s, max(step_s, pace.longest_s), pace.in_flight * step_s, save_s)


def own_figures(pace: TrainingPace, save_s: float) -> Figures:
    """Predicts a save by the training loop's own means, of which only the duration is known.

    Args:
        pace: The pace of training.
        save_s: The longest of the latest saves, in seconds. It includes the wait for the devices.
    """
    step_s = pace.step_s
    return Figures(0, step_s, max(step_s, pace.longest_s), 0.0, save_s)


class Forecaster:
    """What is known so far. Any thread may call ``figures`` and ``stalled_s``; the rest belongs to the training thread.

    Args:
        process_count: How many processes save together.
        throughput: How fast the saves so far were, including those of earlier starts.
        margin: Factor on predictions.
        clock: Returns monotonic seconds.
        send_s: Returns the seconds in which this process sends its part to snapshot servers. None: there are none.

    Attributes:
        margin: As given.
    """

    def __init__(
        self,
        process_count: int,
        throughput: Throughput,
        margin: float,
        clock: Callable[[], float],
        send_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._process_count = process_count
        self._throughput = throughput
        self.margin = margin
        self._clock = clock
        self._send_s = send_s
        self._pace = TrainingPace()
        self._state_bytes: int | None = None
        self._own_saves_s: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._last_save: object = None
        self._is_reported = False

    @property
    def prepared(self) -> bool:
        """True once the size of the state is known."""
        return self._state_bytes is not None

    def prepare(self, state_bytes: int) -> None:
        """Notes the size of the state over all processes."""
        self._state_bytes = state_bytes

    def own_save_took(self, duration_s: float) -> Figures | None:
        """Notes how long the training loop took to save by its own means. Returns the figures after that."""
        self._own_saves_s.append(duration_s)
        return self.figures()

    @property
    def run_ahead(self) -> int:
        """How many steps may be in flight, by how long they take."""
        return self._pace.run_ahead

    def passed(self, steps: int = 1) -> None:
        """Notes that a step was passed, or several together."""
        self._pace.passed(self._clock(), steps)

    def stalled_s(self) -> float | None:
        """Returns the seconds since the newest step was passed if training stalls. None if it continues, or is new."""
        return self._pace.stalled_s(self._clock())

    def figures(self) -> Figures | None:
        """Returns what an emergency save would take now. None while that is not known."""
        if not self._pace.known:
            return None
        if self._state_bytes is None:
            longest_s = max(list(self._own_saves_s), default=None)  # a copy, as the training thread may append
            return None if longest_s is None else own_figures(self._pace, longest_s)
        found = figures(self._pace, self._state_bytes, self._process_count, self._throughput)
        return dataclasses.replace(found, send_s=self._send_s())

    def situation(
        self, step: int, left_s: float, snapshot: NewestSnapshot | None, evacuation: Evacuation | None = None
    ) -> Situation:
        """Returns this process's input to the deadline plan. Durations that are not known count as 0.

        Args:
            step: The current step.
            left_s: Seconds until everything must be done.
            snapshot: The newest snapshot in host memory. None if there is none.
            evacuation: What would be sent to snapshot servers. None if there are none.
        """
        forecast = self.figures()
        return Situation(
            step=step,
            left_s=left_s,
            state_bytes=self._state_bytes,
            process_count=self._process_count,
            drain_s=0.0 if forecast is None else forecast.drain_s,
            streamed_bytes_per_s=self._throughput.streamed_bytes_per_s,
            snapshot_bytes_per_s=self._throughput.snapshot_bytes_per_s,
            snapshot=snapshot,
            margin=self.margin,
            evacuation=evacuation,
        )

    def news(self, last_save: object) -> Figures | None:
        """Returns the figures if they are worth a report, None otherwise.

        They are worth one when they are known for the first time, and after each committed save.

        Args:
            last_save: Figures of the last committed save. Each save makes a new object; only its identity is used.
        """
        if self._is_reported and last_save is self._last_save:
            return None
        self._last_save = last_save
        forecast = self.figures()
        self._is_reported = forecast is not None
        return forecast


class TimeBudget:
    """How much time is left until the deadline of a preemption, and whether it is enough.

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
        """Notes that the epoch has ended and training continues."""
        self._floor_s = math.inf

    def until_deadline_s(self) -> float:
        """Returns the seconds until the process must have exited."""
        return max(self._mailbox.remaining_s(), self._floor_s - self._clock())

    def time_left_s(self) -> float:
        """Returns the seconds that are left for work, without the two reserves. Negative when they are in use."""
        return self.until_deadline_s() - 2 * self.reserve_s

    def deadline(self, kept_s: float = 0.0) -> Deadline:
        """Returns the point in time after which work must stop. It moves to an earlier time with the notices.

        Args:
            kept_s: Seconds that are to be left then.
        """
        return Deadline.following(lambda: self.time_left_s() - kept_s, self._clock)

    def doubt(self, *, drained: bool) -> str:
        """Returns why the save will probably not be done in time. Empty if nothing says so.

        Args:
            drained: True if the devices are done with the steps in flight, so that only the save is left.
        """
        figures = self._figures()
        left_s = self.until_deadline_s() - self.reserve_s
        if figures is None:
            return ""
        drain_s = 0.0 if drained else figures.drain_s
        if drain_s + figures.safe_s <= left_s:
            return ""
        subject = "the save is" if drained else f"a step takes {figures.step_s:.1f} s, drain and save are"
        servers = "" if figures.send_s is None else f" (with snapshot servers {drain_s + figures.send_s:.1f} s)"
        return (
            f"the deadline cannot be met by what is known: {subject} predicted to take {drain_s + figures.save_s:.1f} s"
            f"{servers}, and {max(left_s, 0.0):.1f} s are left"
        )
