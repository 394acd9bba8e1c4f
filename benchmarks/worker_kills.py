"""Kills trainers at random instants of saves that worker processes write, and looks what became of the saves.

    python -m benchmarks.worker_kills [--kills 200] [--processes 4] [--mib 32] [--seed 1] [--json FILE]

By turns: as many trainers as ``--processes`` save one step after the other, periodic and emergency saves in turn. After
a random time each gets a SIGKILL, in random order within two seconds (JAX ends the others once process 0 is dead). Then
nobody is left but the workers. When they have ended, the newest committed step must be at least the newest that all
trainers had handed over, pass the verification, and hold the values of its step. No worker may be left.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from benchmarks import report, worker_kills_process
from benchmarks.report import Figure
from gracepoint.checkpoint import latest_step, restore, verify
from tests.multiprocess.launcher import Processes

_SCRIPT = Path(worker_kills_process.__file__)
_PATIENCE_S = 120.0
_SAVES_FOR_S = 2.0
_APART_S = 0.5


@dataclasses.dataclass
class Found:
    """What was found in all turns."""

    kills: int = 0
    staged: int = 0
    lost: int = 0
    torn: int = 0
    processes_left: int = 0
    ends_s: list[float] = dataclasses.field(default_factory=list)


def main() -> int:
    """Kills and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (%(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="trainers of a turn (%(default)s)")
    parser.add_argument("--mib", type=int, default=32, help="size of the state (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the instants (%(default)s)")
    flags = parser.parse_args()
    random_, found = random.Random(flags.seed), Found()
    while found.kills < flags.kills:
        with tempfile.TemporaryDirectory() as folder:
            turn(Path(folder), flags.processes, flags.mib, random_, found)
        print(f"{found}", file=sys.stderr, flush=True)
    figures = [
        Figure("SIGKILLs", found.kills, ""),
        Figure("newest saves that all had handed over", found.staged, ""),
        Figure("of them lost", found.lost, "", 0),
        Figure("newest steps that were torn", found.torn, "", 0),
        Figure("processes left behind", found.processes_left, "", 0),
        Figure("a worker ends after its trainer, at most", max(found.ends_s), "s"),
    ]
    report.publish(figures, flags.json, load_average=os.getloadavg()[0])
    return 1 if any(figure.met is False for figure in figures) else 0


def turn(folder: Path, count: int, mib: int, random_: random.Random, found: Found) -> None:
    """Starts trainers, kills them, and looks at what is left."""
    root, notes = folder / "root", folder / "notes"
    notes.mkdir()
    arguments = [str(root), "job-0-a", str(notes), str(mib)]
    with Processes.start(_SCRIPT, count, arguments=arguments, devices=1) as processes:
        for process in processes:
            process.wait_for_line("step 1", timeout_s=_PATIENCE_S)
        time.sleep(random_.uniform(0, _SAVES_FOR_S))
        for index in random_.sample(range(count), count):
            if processes[index].running:
                processes[index].signal(signal.SIGKILL)
            found.kills += 1
            time.sleep(random_.choice([0.0, random_.uniform(0, _APART_S)]))
        dead_s = time.monotonic()
        processes.wait(_PATIENCE_S)
    workers = [int(path.read_text()) for path in notes.glob("worker.*")]
    while any(map(_alive, workers)) and time.monotonic() < dead_s + _PATIENCE_S:
        time.sleep(0.01)
    found.ends_s.append(time.monotonic() - dead_s)
    found.processes_left += sum(map(_alive, workers))
    staged = min(int((notes / f"staged.{index}").read_text() or 0) for index in range(count))
    newest = latest_step(root)
    found.staged += 1
    if newest is None or newest < staged:
        found.lost += 1
        print(f"step {staged} was handed over by all, and {newest} is the newest", file=sys.stderr)
    if newest is not None:
        found.torn += not _is_whole(root, newest, mib)


def _is_whole(root: Path, step: int, mib: int) -> bool:
    if not verify(root / str(step)).ok:
        return False
    wanted = worker_kills_process.state_of(step, mib)
    found = restore(root / str(step) / "default", {name: np.zeros_like(values) for name, values in wanted.items()})
    return all(np.array_equal(found[name], values) for name, values in wanted.items())


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
