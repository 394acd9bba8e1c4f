"""Kills trainers at random instants of saves that worker processes write, and looks what became of the saves.

    python -m benchmarks.worker_kills [--kills 200] [--processes 4] [--mib 32] [--seed 1] [--store files] [--json FILE]

By turns: as many trainers as ``--processes`` save one step after the other, periodic and emergency saves in turn. After
a random time each gets a SIGKILL, in random order within two seconds (JAX ends the others once process 0 is dead). Then
nobody is left but the workers. When they have ended, the newest committed step must be at least the newest that all
trainers had handed over, pass the verification, and hold the values of its step.

Then it lists what is left: processes of the turn and their shared memory, named sockets, and files or objects that
belong to no step once the job has started again and has deleted what was not finished.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np

from benchmarks import report, worker_kills_process
from benchmarks.report import Figure
from gracepoint.checkpoint import latest_step, restore, verify
from tests import leftovers
from tests.multiprocess.launcher import Processes
from tests.object_stores.servers import Server, open_gcs, open_s3

_SCRIPT = Path(worker_kills_process.__file__)
_PATIENCE_S = 120.0
_SAVES_FOR_S = 2.0
_APART_S = 0.5
#: A variable that the processes of a turn have in their environment.
_TURN = "WORKER_KILLS_TURN"


@dataclasses.dataclass
class Found:
    """What was found in all turns."""

    kills: int = 0
    staged: int = 0
    lost: int = 0
    torn: int = 0
    processes_left: int = 0
    memory_left: int = 0
    sockets_left: int = 0
    files_left: int = 0
    ends_s: list[float] = dataclasses.field(default_factory=list)


def main() -> int:
    """Kills and tells; returns 1 if a goal is missed."""
    parser = report.parser(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs in all (%(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="trainers of a turn (%(default)s)")
    parser.add_argument("--mib", type=int, default=32, help="size of the state (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the instants (%(default)s)")
    parser.add_argument("--store", choices=["files", "gs", "s3"], default="files", help="where steps go (%(default)s)")
    flags = parser.parse_args()
    random_, found = random.Random(flags.seed), Found()
    with opened(flags.store) as server:
        while found.kills < flags.kills:
            with tempfile.TemporaryDirectory() as folder:
                where = f"{server.bucket().uri}/run" if server else f"{folder}/root"
                turn(where, Path(folder), flags.processes, flags.mib, random_, found)
            print(f"{found}", file=sys.stderr, flush=True)
    figures = [
        Figure("SIGKILLs", found.kills, ""),
        Figure("newest saves that all had handed over", found.staged, ""),
        Figure("of them lost", found.lost, "", 0),
        Figure("newest steps that were torn", found.torn, "", 0),
        Figure("processes left behind", found.processes_left, "", 0),
        Figure("processes with shared memory of the saves, left behind", found.memory_left, "", 0),
        Figure("named sockets left behind", found.sockets_left, "", 0),
        Figure("files or objects of no step after the next start", found.files_left, "", 0),
        Figure("a worker ends after its trainer, at most", max(found.ends_s), "s"),
    ]
    report.publish(figures, flags.json, load_average=os.getloadavg()[0])
    return 1 if any(figure.met is False for figure in figures) else 0


@contextlib.contextmanager
def opened(store: str) -> Iterator[Server | None]:
    """Starts the server of an object store, and has this process and those that it starts reach it."""
    if store == "files":
        yield None
        return
    with tempfile.TemporaryDirectory() as folder, (open_gcs if store == "gs" else open_s3)(Path(folder)) as server:
        os.environ.update(server.environment())
        yield server


def turn(root: str, folder: Path, count: int, mib: int, random_: random.Random, found: Found) -> None:
    """Starts trainers, kills them, and looks at what is left."""
    notes = folder / "notes"
    notes.mkdir()
    arguments = [root, "job-0-a", str(notes), str(mib)]
    environment = {_TURN: str(notes)}
    with Processes.start(_SCRIPT, count, arguments=arguments, devices=1, environment=environment) as processes:
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
    while leftovers.processes_with(_TURN, str(notes)) and time.monotonic() < dead_s + _PATIENCE_S:
        time.sleep(0.05)
    found.ends_s.append(time.monotonic() - dead_s)
    left = leftovers.processes_with(_TURN, str(notes))
    found.processes_left += len(left)
    found.memory_left += len(leftovers.shared_memory(left))  # it has no name, so nobody else can hold it
    found.sockets_left += len(leftovers.sockets_below(folder))
    staged = min(int((notes / f"staged.{index}").read_text() or 0) for index in range(count))
    newest = latest_step(root)
    found.staged += 1
    if newest is None or newest < staged:
        found.lost += 1
        print(f"step {staged} was handed over by all, and {newest} is the newest", file=sys.stderr)
    if newest is not None:
        found.torn += not _is_whole(root, newest, mib)
        leftovers.start_again(root, _like(mib))
        beside = leftovers.beside_the_steps(root)
        found.files_left += len(beside)
        if beside:
            print(f"left beside the steps: {beside[:20]}", file=sys.stderr)


def _is_whole(root: str, step: int, mib: int) -> bool:
    if not verify(f"{root}/{step}").ok:
        return False
    wanted = worker_kills_process.state_of(step, mib)
    found = restore(f"{root}/{step}/default", _like(mib))
    return all(np.array_equal(found[name], values) for name, values in wanted.items())


def _like(mib: int) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.zeros_like(values) for name, values in worker_kills_process.state_of(0, mib).items()}


if __name__ == "__main__":
    sys.exit(main())
