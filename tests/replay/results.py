"""What each fault of a replay led to, in ``results.jsonl``: one JSON object a line, one line a fault.

A replay appends to it, so that it goes on where it was cut, and the results of all its parts add up. What was found at
the end of each training job is beside it, in ``ends.jsonl``. Starts no thread.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "build" / "replay"
FILE = FOLDER / "results.jsonl"
ENDS = FOLDER / "ends.jsonl"
#: Of results without a commit: they were not run in a clone, or by a version that did not note it.
UNKNOWN = "unknown"
_GIT_S = 30.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What one fault led to.

    Attributes:
        seed: Of its trace.
        fault: Its number in the trace, from 1.
        kind: Name of its kind.
        announced: Whether the job heard of it before, so that it must lose no step.
        workload: Name of what trained (``workloads``).
        recovered: Whether the job trained again by itself.
        steps_lost: How many completed steps were done again.
        until_training_s: From the fault until the first step after it. Where nothing had to start again: the longest
            time between two steps.
        counted_restarts: How many restarts it made that count towards the workload's limit.
        broken: What must not be, in words. Empty: every promise was kept.
        at: When it began, as ISO 8601.
        commit: What was run: see ``commit_of``.
        stood_s: How long training stood still, from the begin of the fault until the job trained again. None: as
            long as ``until_training_s``.
        alerts: Why the alerts were not judged. Empty: they were.
        unheard: Whether no replica of the operator knows how training ended: see ``kinds.Kind`` and ``kinds.Scene``.
        lacking: How many snapshots in memory, of the steps that it lost, were skipped or had a single copy.
    """

    seed: int
    fault: int
    kind: str
    announced: bool
    workload: str
    recovered: bool
    steps_lost: int
    until_training_s: float
    counted_restarts: int
    broken: tuple[str, ...] = ()
    at: str
    commit: str = UNKNOWN
    stood_s: float | None = None
    alerts: str = "an earlier version judged none"
    unheard: bool = False
    lacking: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """What was found at the end of one training job.

    Attributes:
        seed: Of its trace.
        workload: Name of what trained.
        faults: The numbers of the faults that came to it.
        steps: How many steps it trained.
        account: Each category of its time with its seconds by the trainers' records and by the operator's account.
        broken: What must not be, in words: what differs from a run that nobody disturbed, what is left.
        at: When it was found, as ISO 8601.
        commit: What was run: see ``commit_of``.
        start_s: From its first pod until its first step.
        again_s: How long training stood still after the deletion before its end.
        over_s: From its last step until its last process had ended.
    """

    seed: int
    workload: str
    faults: tuple[int, ...]
    steps: int
    account: tuple[tuple[str, float, float], ...]
    broken: tuple[str, ...]
    at: str
    commit: str = UNKNOWN
    start_s: float | None = None
    again_s: float | None = None
    over_s: float | None = None


def append(found: Result | End, path: Path = FILE) -> None:
    """Adds a line. A last line that was cut is taken away before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        whole, end, _ = file.read().rpartition(b"\n")
        file.truncate(len(whole) + len(end))
        file.write(f"{json.dumps(_rounded(dataclasses.asdict(found)))}\n".encode())


def read(path: Path = FILE) -> list[Result]:
    """Returns the results of a file, in the order in which they came. A last line that was cut is left out.

    Raises:
        ValueError: A line is none of a replay.
    """
    if not path.exists():
        return []
    return [_parsed(line, number, path) for number, line in enumerate(path.read_text().split("\n")[:-1], 1)]


def commit_of(folder: Path = Path(__file__).parent) -> str:
    """Returns the commit of a clone, with ``-dirty`` if files differ from it; ``unknown`` outside of one."""
    words = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return UNKNOWN
    return done.stdout.strip() or UNKNOWN


def redone(results: Sequence[Result]) -> list[Result]:
    """Returns those that another one of the same fault came after: a fault may have been replayed."""
    last = {(result.seed, result.fault): number for number, result in enumerate(results)}
    return [result for number, result in enumerate(results) if last[result.seed, result.fault] != number]


def newest(results: Iterable[Result]) -> list[Result]:
    """Returns one result of each fault of each trace, the last one: a fault may have been replayed alone."""
    return list({(result.seed, result.fault): result for result in results}.values())


def counting(ends: Iterable[End], results: Iterable[Result]) -> list[End]:
    """Returns the ends that still count: those of jobs of which no fault was done again since."""
    last = {(result.seed, result.fault): result for result in newest(results)}
    return [
        end
        for end in ends
        if not again_since(end.at, [last[end.seed, fault] for fault in end.faults if (end.seed, fault) in last])
    ]


def again_since(at: str, of: Iterable[Result]) -> bool:
    """Returns whether one of the results began after a time, given as ISO 8601."""
    found_at = datetime.datetime.fromisoformat(at)
    return any(datetime.datetime.fromisoformat(result.at) > found_at for result in of)


def read_ends(path: Path = ENDS) -> list[End]:
    """Returns the ends of a file. A last line that was cut is left out."""
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return [
        End(**{**line, **{name: tuple(map(_hashable, line[name])) for name in ("faults", "account", "broken")}})
        for line in lines
    ]


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _rounded(value: Any) -> Any:
    """A value with its seconds to the millisecond."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return round(value, 3) if isinstance(value, float) else value


def _parsed(line: str, number: int, path: Path) -> Result:
    try:
        fields = json.loads(line)
        return Result(**{**fields, "broken": tuple(fields["broken"])})
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}, line {number}: expected a result with {', '.join(_FIELDS)}, found {line[:200]!r} ({error}); "
            "move the file away"
        ) from error


_FIELDS = [field.name for field in dataclasses.fields(Result)]
