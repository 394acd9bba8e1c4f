"""What an emergency would take now, in figures that were measured where there are any."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from typing import Protocol

from gracepoint.runahead import LIMIT

#: Assumed until the first save was measured: what a slow network disk gives one process, and the fixed part of a
#: save. A guess, on the safe side; a first periodic save replaces it.
ASSUMED_BYTES_PER_S = 100e6
ASSUMED_FIXED_S = 1.0
_KEPT = 9


class SaveStats(Protocol):
    """The part of the checkpoint engine's figures that is used here."""

    @property
    def bytes(self) -> int:
        """Written by all processes."""

    @property
    def committed_s(self) -> float:
        """From the begin of the save until it was committed."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """Seconds, and the bytes of the state over all processes."""

    state_bytes: int
    step_s: float
    drain_s: float
    save_s: float


class Pace:
    """How long a step takes: the median of the latest, as saves and evaluations in between make outliers."""

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._durations_s: collections.deque[float] = collections.deque(maxlen=_KEPT)

    def passed(self, now_s: float) -> None:
        """A step was passed. The first ones are only dispatched, not waited for: ``known`` skips them."""
        if self._last_s is not None:
            self._durations_s.append(now_s - self._last_s)
        self._last_s = now_s

    @property
    def known(self) -> bool:
        return len(self._durations_s) > 2 * LIMIT

    @property
    def step_s(self) -> float:
        return statistics.median(self._durations_s) if self._durations_s else 0.0


def figures(pace: Pace, state_bytes: int, process_count: int, last_save: SaveStats | None) -> Figures:
    """Predicts an emergency from the pace of training and the last save."""
    if last_save is None or last_save.bytes == 0:
        save_s = ASSUMED_FIXED_S + state_bytes / (ASSUMED_BYTES_PER_S * process_count)
    else:
        save_s = last_save.committed_s * state_bytes / last_save.bytes
    return Figures(state_bytes, pace.step_s, (LIMIT + 1) * pace.step_s, save_s)
