"""Where the time between a commit and the next training went, from the traces that the trainers wrote. Pure reading."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_US = 1_000_000


@dataclasses.dataclass(frozen=True)
class Life:
    """What one process did in one attempt.

    Attributes:
        process: Its number.
        attempt: The workload's number of restarts when its pod was created.
        ended_unix_s: When each event ended, by its name, in seconds since the epoch. The first of each name.
        began_unix_s: When each event began.
        compiled: Number of programs that it compiled until its first step. None if it did none.
    """

    process: int
    attempt: int
    ended_unix_s: dict[str, float]
    began_unix_s: dict[str, float]
    compiled: int | None


#: Two of the parts in words.
ENDED = "commit -> all processes have ended"
PODS_ARE_BACK = "-> the new processes have started"
#: What ends each part, and the part in words. Every process has to get there before the next part counts.
PARTS = (
    ("the process ends with code 77", ENDED),
    ("start", PODS_ARE_BACK),
    ("before attach: Python, imports", "-> modules imported, attach called"),
    ("meeting of the processes", "-> joined"),
    ("opening of the session", "-> attached"),
    ("restore", "-> restored"),
    ("trains", "-> first step done"),
)


def read(folder: Path) -> list[Life]:
    """Returns the lives whose traces are in a folder, in the order of attempts and processes."""
    lives = [_life(json.loads(path.read_text())) for path in folder.glob("*.trace.json")]
    return sorted(lives, key=lambda life: (life.attempt, life.process))


def _life(trace: dict[str, Any]) -> Life:
    told = trace["otherData"]
    began: dict[str, float] = {}
    ended: dict[str, float] = {}
    events = [event for event in trace["traceEvents"] if event["ph"] in "Xi"]
    for event in events:
        began.setdefault(event["name"], event["ts"] / _US)
        ended.setdefault(event["name"], (event["ts"] + event.get("dur", 0)) / _US)
    if "before attach: Python, imports" in began:
        ended["start"] = began["before attach: Python, imports"]
    return Life(
        process=int(events[0]["pid"]),
        attempt=int(told["restart_attempt"]),
        ended_unix_s=ended,
        began_unix_s=began,
        compiled=told.get("programs_compiled"),
    )


def parts(before: Iterable[Life], after: Sequence[Life], committed_unix_s: float) -> dict[str, float | None]:
    """Returns how long each part took, by its words. None for a part whose end is not in the traces.

    A part lasts from the end of the part before, in the last process, to its own end in the last process. So the parts
    together are the time from the commit to the first step.

    Args:
        before: The processes that saved.
        after: The processes that restored.
        committed_unix_s: When the checkpoint was committed.
    """
    found: dict[str, float | None] = {}
    until = committed_unix_s
    for index, (event, words) in enumerate(PARTS):
        ends = [life.ended_unix_s.get(event) for life in (before if index == 0 else after)]
        known = [end for end in ends if end is not None]
        if not known or len(known) != len(ends):
            found[words] = None
            continue
        end = max(until, *known)
        found[words] = end - until
        until = end
    return found
