"""Which fault comes when, from a seed or from a file. Pure but for reading and writing the file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

#: Steps of training before the first fault, and between two, at most.
SPACING = 30
#: What trains (``workloads``). The others than ``JOB`` are JobSets: ``BUCKET`` has its checkpoints in an object store,
#: ``KEPT`` hands its saves to a keeper, and ``QUEUED`` is in Kueue's queue.
JOBSET, JOB, BUCKET = "JobSet", "Job", "JobSet with a bucket"
KEPT, QUEUED = "JobSet with a keeper", "JobSet in a queue"
_JOBSETS, _JOBS = (JOBSET, 16), (JOB, 3)
#: Faults of one training job, by what it is. A Job by itself pauses before it replaces a pod, longer each time. All of
#: them are two rounds of all kinds: if those with 4 faults came more often, they would have most faults of their kinds.
SIZES = (
    *(_JOBSETS, _JOBS, (BUCKET, 4), _JOBSETS, _JOBS, _JOBSETS, _JOBS, (QUEUED, 4)),
    *(_JOBSETS, _JOBS, (KEPT, 4), _JOBSETS, _JOBS, _JOBSETS),
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        seed: Of the trace.
        fault: Its number in the trace, from 1.
        job: The number of the training job that it comes to, from 1.
        workload: Name of what that is (``workloads``).
        kind: Name of its kind.
        after_steps: It comes when the job has trained so many steps since the one before was over.
        process: The process that it is done to, or the one on whose node it is done.
    """

    seed: int
    fault: int
    job: int
    workload: str
    kind: str
    after_steps: int
    process: int


def made(
    seed: int,
    count: int,
    kinds: Mapping[str, Collection[str]],
    *,
    sizes: Sequence[tuple[str, int]] = SIZES,
    processes: int = 2,
    spacing: int = SPACING,
) -> tuple[Fault, ...]:
    """Returns a trace of ``count`` faults, in their order.

    The kinds come in rounds: each kind once in a round, in an order of its own. So a short trace has all kinds of its
    workloads, too.

    Args:
        seed: What it is made from.
        count: How many faults.
        kinds: What each kind can be done to, by its name.
        sizes: The training jobs, again and again: what each is, and its number of faults.
        processes: Of each job.
        spacing: Most steps between two faults.

    Raises:
        ValueError: There is less than one fault, or no kind for a job.
    """
    if count < 1 or not kinds:
        raise ValueError(f"expected at least one fault and one kind, found {count} of {list(kinds)}")
    if missing := {workload for workload, _ in sizes if not any(workload in able for able in kinds.values())}:
        raise ValueError(f"no kind of {', '.join(kinds)} can be done to a {' or a '.join(sorted(missing))}")
    chance = random.Random(seed)
    ahead: list[str] = []
    faults: list[Fault] = []
    for job, (workload, size) in enumerate(itertools.cycle(sizes), 1):
        for _ in range(size):
            if not any(workload in kinds[kind] for kind in ahead):
                ahead += chance.sample(list(kinds), len(kinds))
            kind = next(kind for kind in ahead if workload in kinds[kind])
            ahead.remove(kind)
            # Never at a regular distance: a fault hits saves, compilations and quiet training alike.
            steps = chance.randint(spacing // 3, spacing)
            process = chance.randrange(processes)
            faults.append(Fault(seed, len(faults) + 1, job, workload, kind, steps, process))
            if len(faults) == count:
                return tuple(faults)
    raise AssertionError("a cycle does not end")


def write(trace: Sequence[Fault], path: Path) -> None:
    """Writes a trace, one JSON object a line."""
    path.write_text("".join(f"{json.dumps(dataclasses.asdict(fault))}\n" for fault in trace))


def read(path: Path, kinds: Collection[str]) -> tuple[Fault, ...]:
    """Returns the trace of a file.

    Raises:
        ValueError: A line is no fault, or of a kind or a workload that is not known.
    """
    return tuple(_parsed(path, number, line, kinds) for number, line in enumerate(path.read_text().splitlines(), 1))


def jobs(trace: Sequence[Fault]) -> Iterator[tuple[Fault, ...]]:
    """Yields the faults of each training job."""
    for _, faults in itertools.groupby(trace, key=lambda fault: fault.job):
        yield tuple(faults)


def _parsed(path: Path, number: int, line: str, kinds: Collection[str]) -> Fault:
    try:
        fault = Fault(**json.loads(line))
    except (ValueError, TypeError) as error:
        names = ", ".join(field.name for field in dataclasses.fields(Fault))
        raise ValueError(f"{path}, line {number}: expected a JSON object with {names}, found {line!r}") from error
    if fault.kind not in kinds:
        raise ValueError(f"{path}, line {number}: expected one of the kinds {', '.join(kinds)}, found {fault.kind}")
    if fault.workload not in (known := sorted({workload for workload, _ in SIZES})):
        raise ValueError(f"{path}, line {number}: expected one of {', '.join(known)}, found {fault.workload}")
    return fault
