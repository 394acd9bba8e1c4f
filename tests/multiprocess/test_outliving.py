"""A save that was handed over to worker processes becomes a checkpoint, whoever is killed after that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import leftovers
from tests.leftovers import is_alive
from tests.multiprocess import checkpoint_process, outliving_process, worker_points
from tests.multiprocess.checkpoint_runs import restore_here
from tests.multiprocess.launcher import ROOT, Processes
from tests.waiting import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SCRIPT = Path(outliving_process.__file__)
# How long a survivor waits for the dead. The workers must write, and the test must kill, within this time.
PATIENCE_S = float(os.environ.get("OUTLIVING_PATIENCE_S", "10"))
#: The same where no trainer survives to wait for so long.
ALL_DIE_S = 60.0

#: Processes, kind of save, where the workers are, which trainers are killed, which workers are.
Kill = tuple[int, str, str, str, str]
SOME: list[Kill] = [
    (1, "background", "before any file", "0", ""),
    (1, "background", "in the middle of the files", "0", ""),
    (1, "background", "before the done-record", "0", ""),
    (1, "background", "after the done-record", "0", ""),
    (1, "background", "in the middle of the files", "", "0"),
    (1, "emergency", "in the middle of the files", "0", ""),
    (2, "background", "in the middle of the files", "0", ""),
    (2, "background", "before the done-record", "1", ""),
    (2, "emergency", "in the middle of the files", "01", ""),
    (2, "background", "in the middle of the files", "", "1"),
    (4, "background", "in the middle of the files", "0123", ""),
]


def everything() -> list[Kill]:
    """Returns every point with every kind of save: process 0 is killed, or the last one, all, or a worker."""
    return [
        (count, kind, point, trainers, workers)
        for count in (1, 2, 4)
        for kind in ("background", "emergency")
        for point in worker_points.POINTS
        for trainers, workers in dict.fromkeys(
            [("0", ""), (f"{count - 1}", ""), ("0123"[:count], ""), ("", f"{count - 1}")]
        )
    ]


#: ``make outliving`` tries everything.
KILLS = everything() if os.environ.get("OUTLIVING") == "everything" else SOME


@pytest.mark.parametrize(
    ("count", "kind", "point", "trainers", "workers"),
    KILLS,
    ids=[f"{n} {kind} {point} trainers:{t} workers:{w}" for n, kind, point, t, w in KILLS],
)
def test_a_handed_over_save_becomes_a_checkpoint(
    gang: Callable[..., Processes], tmp_path: Path, count: int, kind: str, point: str, trainers: str, workers: str
) -> None:
    where = tmp_path / "where"
    processes = gang(count, kind, point, patience_s=ALL_DIE_S if len(trainers) == count else PATIENCE_S)
    until(
        lambda: len(list(where.glob("at.*"))) == len(list(where.glob("handed.*"))) == count,
        processes.output,
        timeout_s=90,
    )
    writing = {int(path.name.partition(".")[2]): int(path.read_text()) for path in where.glob("worker.*")}
    for index in trainers:
        processes[int(index)].signal(signal.SIGKILL)
    for index in workers:
        os.kill(writing[int(index)], signal.SIGKILL)
    until(lambda: not any(processes[int(index)].running for index in trainers), processes.output, timeout_s=90)
    (where / "go").touch()
    if not trainers:
        for result in processes.wait(60):
            assert "saved 2" in result.output.splitlines(), result.output
    until(lambda: not any(is_alive(pid) for pid in writing.values()), processes.output, timeout_s=90)
    for process, result in enumerate(processes.wait(PATIENCE_S + 60)):
        if str(process) not in trainers and "saved 2" in result.output:
            assert "left []" in result.output.splitlines(), result.output  # threads and memory of a trainer that lived
    root = tmp_path / "root"
    # By a worker or a survivor, not the next start. A trainer may have been killed while it asked the folder for the
    # time: the hidden file for that is deleted an hour later.
    assert sorted(path.name for path in root.iterdir() if not path.name.startswith(".gracepoint-now.")) == ["1", "2"]
    assert restore_here(root) == 2
    assert leftovers.beside_the_steps(root) == []
    assert leftovers.sockets_below(tmp_path) == []


def test_a_save_that_was_not_staged_everywhere_is_not_a_checkpoint(
    gang: Callable[..., Processes], tmp_path: Path
) -> None:
    where = tmp_path / "where"
    processes = gang(1, "background", "in the middle of the files", patience_s=ALL_DIE_S)
    until(lambda: (where / "at.0").exists() and (where / "handed.0").exists(), processes.output, timeout_s=90)
    processes[0].signal(signal.SIGKILL)
    os.kill(int((where / "worker.0").read_text()), signal.SIGKILL)
    processes.wait(60)
    assert restore_here(tmp_path / "root") == 1
    like = checkpoint_process.with_keys(checkpoint_process.make_state(0), 0)
    assert leftovers.start_again(tmp_path / "root", like) == 1
    assert leftovers.beside_the_steps(tmp_path / "root") == []


@pytest.mark.parametrize("kind", ["background", "emergency"])
def test_a_keeper_finishes_the_save_of_killed_trainers(
    gang: Callable[..., Processes], keeper: subprocess.Popen[bytes], tmp_path: Path, kind: str
) -> None:
    where = tmp_path / "where"
    processes = gang(2, kind, "in the middle of the files", str(where / "keeper.sock"), patience_s=ALL_DIE_S)
    until(
        lambda: len(list(where.glob("at.*"))) == len(list(where.glob("handed.*"))) == 2, processes.output, timeout_s=90
    )
    for process in processes:
        process.signal(signal.SIGKILL)
    until(lambda: not any(process.running for process in processes), processes.output, timeout_s=90)
    keeper.terminate()  # as the kubelet does when the training container has ended
    (where / "go").touch()
    assert keeper.wait(60) == 0
    assert restore_here(tmp_path / "root") == 2
    assert leftovers.beside_the_steps(tmp_path / "root") == []
    assert leftovers.sockets_below(tmp_path) == []


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A keeper whose workers stop in the middle of the files."""
    where = tmp_path / "where"
    where.mkdir()
    environment = {worker_points.POINT: "in the middle of the files", worker_points.WHERE: str(where)}
    command = [sys.executable, "-m", "gracepoint.async_calls.keeper", str(where / "keeper.sock")]
    process = subprocess.Popen(command, env={**os.environ, **environment}, cwd=ROOT)
    yield process
    process.kill()
    process.wait(30)


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    """Starts trainers whose workers stop at a point. At the end of the test, nothing of them is left."""
    where, started = tmp_path / "where", []

    def start(
        count: int, kind: str, point: str, writer: str = "worker", *, patience_s: float = PATIENCE_S
    ) -> Processes:
        where.mkdir(exist_ok=True)
        started.append(
            Processes.start(
                SCRIPT,
                count,
                arguments=[str(tmp_path / "root"), "job-0-a", kind, str(patience_s), writer],
                environment={worker_points.POINT: point, worker_points.WHERE: str(where)},
                devices=4 // count,
            )
        )
        return started[-1]

    yield start
    for processes in started:
        processes.__exit__(None, None, None)
    left = leftovers.processes_with(worker_points.WHERE, str(where))
    memory = leftovers.shared_memory(left)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (left, memory) == ([], [])
