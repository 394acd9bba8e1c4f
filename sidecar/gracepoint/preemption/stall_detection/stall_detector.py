"""Decides when a part of this process makes no progress. Pure: the times are given to it.

A part, such as the training thread, shows ``marks`` that change with every progress. If they have not changed for the
limit, the part is stalled. Two things are no stall: a stage that computes by itself, such as a restore or a
compilation, as long as the process uses processor time; and a time in which the whole process was stopped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

#: A process that computes uses at least this share of one core.
_COMPUTES = 0.05
#: A look that comes this much later than it should, in seconds, shows that the process did not run.
_LATE_S = 5.0


@dataclasses.dataclass(frozen=True)
class Activity:
    """What one part of the process does now.

    Attributes:
        part: The part's name.
        stage: What it does, in words.
        marks: Values that change with every progress.
        order: How far the part is, as numbers that can be compared with those of other processes: less is further back.
        reached: The same in words.
        thread_id: The thread that does it. None if it is not known.
        computes: True if the stage uses processor time as long as it makes progress.
    """

    part: str
    stage: str
    marks: tuple[object, ...]
    order: tuple[int, ...] = ()
    reached: str = ""
    thread_id: int | None = None
    computes: bool = False


@dataclasses.dataclass(frozen=True)
class Stalled:
    """A part that makes no progress, and for how many seconds."""

    activity: Activity
    for_s: float


@dataclasses.dataclass(frozen=True)
class Changes:
    """What a look has shown.

    Attributes:
        stalled: Parts that have reached the limit since the look before.
        over: Parts that were stalled, and make progress again or have ended.
        paused_s: Seconds for which the whole process did not run. 0 if it ran.
    """

    stalled: list[Stalled] = dataclasses.field(default_factory=list)
    over: list[str] = dataclasses.field(default_factory=list)
    paused_s: float = 0.0


@dataclasses.dataclass
class _Part:
    marks: tuple[object, ...]
    since_s: float
    told: bool = False


class StallDetector:
    """See the module.

    Args:
        limit_s: Seconds without progress after which a part is stalled.
        look_every_s: Seconds between two looks.
    """

    def __init__(self, limit_s: float, look_every_s: float) -> None:
        self._limit_s = limit_s
        self._look_every_s = look_every_s
        self._parts: dict[str, _Part] = {}
        self._looked_s: float | None = None
        self._cpu_s = 0.0

    def look(self, now_s: float, cpu_s: float, activities: Sequence[Activity]) -> Changes:
        """Compares what the parts do now with what they did before.

        Args:
            now_s: Monotonic seconds.
            cpu_s: Processor seconds that the process has used.
            activities: What the parts do. A part that does nothing is left out.
        """
        passed_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        computing = cpu_s - self._cpu_s >= _COMPUTES * passed_s
        paused = passed_s > 2 * self._look_every_s + _LATE_S
        self._looked_s, self._cpu_s = now_s, cpu_s
        changes = Changes(paused_s=passed_s - self._look_every_s if paused else 0.0)
        for name in self._parts.keys() - {activity.part for activity in activities}:
            if self._parts.pop(name).told:
                changes.over.append(name)
        for activity in activities:
            part = self._parts.get(activity.part)
            moves = part is None or part.marks != activity.marks or paused or (activity.computes and computing)
            if part is None or moves:
                if part is not None and part.told:
                    changes.over.append(activity.part)
                self._parts[activity.part] = _Part(activity.marks, now_s)
            elif not part.told and now_s - part.since_s >= self._limit_s:
                part.told = True
                changes.stalled.append(Stalled(activity, now_s - part.since_s))
        return changes
