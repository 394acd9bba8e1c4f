"""When each stage of a preemption ended, in this process and over all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable

from gracepoint.wire.messages import StageTiming

#: In the order in which they come.
STAGES = ("frozen", "agreed", "drained", "written", "durable", "committed")


class Stages:
    """Seconds after the notice at which stages ended. ``mark`` may be called from any thread.

    Args:
        since_s: When the notice came, on the clock.
        clock: Monotonic seconds.
    """

    def __init__(self, since_s: float, clock: Callable[[], float]) -> None:
        self._since_s = since_s
        self._clock = clock
        self._ended_s: dict[str, float] = {}

    def mark(self, stage: str) -> None:
        """The stage ends now."""
        if stage not in STAGES:
            raise ValueError(f"stage: expected one of {STAGES}, found {stage!r}")
        self._ended_s[stage] = self._clock() - self._since_s

    def has(self, stage: str) -> bool:
        """True if the stage has ended."""
        return stage in self._ended_s

    @property
    def last(self) -> str | None:
        """The stage that was reached last; None before the first."""
        return next((stage for stage in reversed(STAGES) if stage in self._ended_s), None)

    def to_json(self) -> str:
        return json.dumps(self._ended_s)

    def own(self) -> dict[str, StageTiming]:
        """This process's figures in the form of the report."""
        return summary([self.to_json()])


def summary(all_stages: Iterable[str]) -> dict[str, StageTiming]:
    """Median and maximum over processes, from what ``to_json`` of each gave.

    A stage that some process did not mark is left out: a median of some would pass for one of all.
    """
    read = [json.loads(text) for text in all_stages]
    return {
        stage: StageTiming(
            p50_s=round(statistics.median(times), 4),
            max_s=round(max(times), 4),
        )
        for stage in STAGES
        if len(times := [found[stage] for found in read if stage in found]) == len(read)
    }
