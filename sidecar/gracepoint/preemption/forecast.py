"""What an emergency would take now, in figures that were measured where there are any."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable
from typing import Protocol

from gracepoint import deadline_plan
from gracepoint.deadline_plan import NewestSnapshot, Situation
from gracepoint.preemption.run_ahead import LIMIT, LONG_STEP_S, limit

_KEPT = 9


class ThroughputSource(Protocol):
    """What saves have been like, over all processes; None where there was none."""

    @property
    def streamed_bytes_per_s(self) -> float | None:
        """Of emergencies."""

    @property
    def snapshot_bytes_per_s(self) -> float | None:
        """Of saves in the background."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """What is known before an emergency, all but the first in seconds.

    Attributes:
        state_bytes: The state, over all processes.
        step_s: From one ``step()`` to the next, typically: that may be many steps of the optimizer.
        wait_s: Until the next one, at worst: the longest there was, as an evaluation without sync points makes it.
        drain_s: For the steps in flight.
        save_s: From drained to committed, by the throughput that was learnt.
    """

    state_bytes: int
    step_s: float
    wait_s: float
    drain_s: float
    save_s: float

    @property
    def needed_s(self) -> float:
        """From the freeze to the commit, if all goes as usual."""
        return self.drain_s + self.save_s

    @property
    def needed_at_worst_s(self) -> float:
        """From the freeze to the commit, if it meets the longest gap between two sync points."""
        return self.wait_s + self.needed_s


class Pace:
    """How long a step takes: the median of the latest, as saves and evaluations in between make outliers.

    ``passed`` is for the training thread; what it tells may be read by any.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._durations_s: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._passed = 0
        self._longest_s = 0.0
        self.run_ahead = LIMIT  # how many steps may be in flight

    def passed(self, now_s: float) -> None:
        """A step was passed. The first ones are only dispatched, not waited for, and one of them is compiled: what
        is told leaves them out.
        """
        last_s, self._last_s = self._last_s, now_s
        if last_s is None:
            return
        took_s = now_s - last_s
        self._passed += 1
        self._durations_s.append(took_s)
        if (took_s >= LONG_STEP_S) is not (
            self.run_ahead == 1
        ):  # the median is sought only if it may have changed sides
            self.run_ahead = limit(self.step_s)
        if took_s > self._longest_s and self._passed > 2 * LIMIT:  # spelt out: this is part of every quiet step
            self._longest_s = took_s

    @property
    def known(self) -> bool:
        return self._passed > 2 * LIMIT

    @property
    def step_s(self) -> float:
        durations_s = list(self._durations_s)  # in one go, as training may add to it meanwhile
        return statistics.median(durations_s) if durations_s else 0.0

    @property
    def longest_s(self) -> float:
        """The longest of all so far."""
        return self._longest_s


def figures(pace: Pace, state_bytes: int, process_count: int, throughput: ThroughputSource) -> Figures:
    """Predicts an emergency from the pace of training and the saves so far."""
    bytes_per_s = throughput.streamed_bytes_per_s or throughput.snapshot_bytes_per_s
    save_s = deadline_plan.writing_s(state_bytes, process_count, bytes_per_s)
    step_s = pace.step_s
    return Figures(state_bytes, step_s, max(step_s, pace.longest_s), (limit(step_s) + 1) * step_s, save_s)


class Forecaster:
    """What is known so far. ``figures`` may be called by any thread, the rest belongs to the training thread.

    Args:
        process_count: Who save together.
        throughput: Of the saves so far, also of earlier starts.
        margin: Factor on predictions.
        clock: Monotonic seconds.
    """

    def __init__(
        self, process_count: int, throughput: ThroughputSource, margin: float, clock: Callable[[], float]
    ) -> None:
        self._process_count = process_count
        self._throughput = throughput
        self.margin = margin
        self._clock = clock
        self._pace = Pace()
        self._state_bytes: int | None = None
        self._last_save: object = None
        self._told = False

    @property
    def prepared(self) -> bool:
        """True once the size of the state is known."""
        return self._state_bytes is not None

    def prepare(self, state_bytes: int) -> None:
        """The state has so many bytes, over all processes."""
        self._state_bytes = state_bytes

    @property
    def run_ahead(self) -> int:
        """How many steps may be in flight, by how long they take. For the training thread."""
        return self._pace.run_ahead

    def passed(self) -> None:
        """A step was passed."""
        self._pace.passed(self._clock())

    def figures(self) -> Figures | None:
        """What an emergency would take now; None while that is not known."""
        if self._state_bytes is None or not self._pace.known:
            return None
        return figures(self._pace, self._state_bytes, self._process_count, self._throughput)

    def situation(self, step: int, left_s: float, snapshot: NewestSnapshot | None) -> Situation:
        """What the deadline plan goes by at the agreed point. What is not known is taken for nothing there.

        Args:
            step: The current one.
            left_s: Until everything must be done.
            snapshot: The newest in host memory.
        """
        known = self.figures()
        return Situation(
            step=step,
            left_s=left_s,
            state_bytes=self._state_bytes,
            process_count=self._process_count,
            drain_s=0.0 if known is None else known.drain_s,
            streamed_bytes_per_s=self._throughput.streamed_bytes_per_s,
            snapshot_bytes_per_s=self._throughput.snapshot_bytes_per_s,
            snapshot=snapshot,
            margin=self.margin,
        )

    def news(self, last_save: object) -> Figures | None:
        """The figures, when they are known first and whenever another save, told by its measures, was committed."""
        if self._told and last_save is self._last_save:
            return None
        self._last_save = last_save
        found = self.figures()
        self._told = found is not None
        return found
