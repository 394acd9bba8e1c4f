"""What the processes of ``benchmarks.gang_scale`` go through, and what is measured of it. Plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

#: Mean seconds of a training step.
STEP_S = 0.2
#: How far a process may be ahead of the slowest one, in steps.
RUN_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Epoch:
    """One notice and what follows.

    Attributes:
        name: The notice's origin.
        left_s: Seconds until its deadline.
        drill: True if training goes on afterwards.
        start_in_s: Seconds until the freeze begins. None: at once, with the notice.
        meets: True if a background save is under way, so that the processes meet at the agreed point.
        late: Processes that are late: they publish nothing before ``late_s`` have passed.
        late_s: See ``late``.
        take_back_s: Seconds until the notice is retracted. None: it is not.
    """

    name: str
    left_s: float = 60.0
    drill: bool = True
    start_in_s: float | None = None
    meets: bool = False
    late: Sequence[int] = ()
    late_s: float = 0.0
    take_back_s: float | None = None


@dataclasses.dataclass
class Times:
    """When each stage was reached in one process, in seconds of CLOCK_MONOTONIC, and what that took of the store.

    Attributes:
        stopped_at: The sync point at which it stopped.
        ahead: How many of the requests said that it is far ahead of the process that started the preemption.
    """

    known_s: float = 0.0
    opened_s: float = 0.0
    stopped_s: float = 0.0
    met_s: float = 0.0
    committed_s: float = 0.0
    ended_s: float = 0.0
    stopped_at: int = 0
    requests: int = 0
    bytes: int = 0
    ahead: int = 0
