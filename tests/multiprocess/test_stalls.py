"""A process that is stopped in any stage is named by the others, in real JAX processes."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
from pathlib import Path

import pytest

from gracepoint.wire.messages import Stall
from tests.multiprocess.launcher import Processes
from tests.unit.receivers.fakes.server import OperatorServer

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("stall_process.py")
LIMIT_S = 3
PATIENCE_S = 120.0
STOPPED = "it is stopped by a signal (state T)"
#: Which process stops where, and what the other one does then.
STOPS = [(0, "step", "training"), (1, "step", "training"), (1, "periodic save", "training"), (1, "restore", "restore")]


def start(folder: Path, action: str, stopped: int, where: str) -> Processes:
    return Processes.start(SCRIPT, 2, arguments=[str(folder), action, str(LIMIT_S), str(stopped), where], devices=1)


def test_a_process_that_stops_anywhere_is_named_until_it_continues(tmp_path: Path) -> None:
    with start(tmp_path / "first", "report", 1, "attach") as processes:
        processes[1].wait_for_line("stops in attach", PATIENCE_S)
        line = processes[0].wait_for_line("no progress part=attach", PATIENCE_S)
        assert "stage=meeting of the processes" in line
        assert "suspects=[1]" in line
        processes[1].signal(signal.SIGCONT)
        assert [result.code for result in processes.wait(PATIENCE_S)] == [0, 0]
    with contextlib.ExitStack() as stack:
        gangs = []
        for number, (stopped, where, _) in enumerate(STOPS):
            folder = tmp_path / str(number)
            shutil.copytree(tmp_path / "first", folder)
            gangs.append(stack.enter_context(start(folder, "report", stopped, where)))
        for gang, (stopped, where, stage) in zip(gangs, STOPS, strict=True):
            other = 1 - stopped
            gang[stopped].wait_for_line(f"stops in {where}", PATIENCE_S)
            assert f"stage={stage}" in gang[other].wait_for_line("no progress part=training", PATIENCE_S)
            gang[other].wait_for_line(f"suspects=[{stopped}]", PATIENCE_S)
        for gang, (stopped, _, _) in zip(gangs, STOPS, strict=True):
            gang[stopped].signal(signal.SIGCONT)
            gang[1 - stopped].wait_for_line("there is progress again part=training", PATIENCE_S)
            gang[stopped].wait_for_line("this process was stopped for a while", PATIENCE_S)


def test_a_process_that_stops_in_an_emergency_save_is_named(tmp_path: Path) -> None:
    with start(tmp_path, "report", 1, "emergency save") as processes:
        processes[1].wait_for_line("stops in emergency save", PATIENCE_S)
        line = processes[0].wait_for_line("no progress part=training", PATIENCE_S)
        assert "stage=emergency save after step" in line
        processes[0].wait_for_line("suspects=[1]", PATIENCE_S)


def test_a_process_0_that_hangs_with_the_interpreter_lock_is_named(tmp_path: Path) -> None:
    with start(tmp_path, "report", 0, "C code") as processes:
        processes[0].wait_for_line("stops in C code", PATIENCE_S)
        assert "stage=training" in processes[1].wait_for_line("no progress part=training", PATIENCE_S)
        line = processes[1].wait_for_line("suspects=[0]", PATIENCE_S)
        assert "did not say so as well" in line  # the store, which needs no Python, answers


def test_a_worker_that_stops_in_a_save_is_named_by_its_process(tmp_path: Path) -> None:
    with start(tmp_path, "report", 1, "worker") as processes:
        worker = int(processes[1].wait_for_line("stops in worker", PATIENCE_S).split()[-1])
        # On a busy machine, the save of step 5 may have been named before.
        processes[1].wait_for_line("no progress part=background save stage=background save of step 10", PATIENCE_S)
        processes.wait_for_any_line([0, 1], "suspects=[1]", PATIENCE_S)
        os.kill(worker, signal.SIGCONT)
        processes[1].wait_for_line("there is progress again part=background save", PATIENCE_S)


def test_a_lone_process_that_stops_is_named_by_its_worker(tmp_path: Path) -> None:
    with OperatorServer() as operator:
        environments = [operator.environment(0, 1, tmp_path)]
        arguments = [str(tmp_path / "checkpoints"), "report", str(LIMIT_S), "0", "beside its worker"]
        with Processes.start(SCRIPT, 1, arguments=arguments, environments=environments, devices=1) as processes:
            processes[0].wait_for_line("stops in beside its worker", PATIENCE_S)
            (told,) = operator.wait_for(Stall)
            assert told.message == "process 0 (gpt-workers-0-0) does not run: as its worker process sees, " + STOPPED
            assert told.stage.startswith("training after step ")
            assert "stop" in told.stack
            assert (told.suspects, told.beside, told.over) == ([0], True, False)
            assert "no progress part=process stage=training" in processes[0].output
            processes[0].signal(signal.SIGCONT)
            # What it was doing may be reported before: nothing went on while it was stopped.
            later = (operator.wait_for(Stall, number)[-1] for number in itertools.count(2))
            assert next(stall for stall in later if stall.beside).over


def test_the_others_exit_for_a_restart_if_the_policy_says_so(tmp_path: Path) -> None:
    with start(tmp_path, "restart", 1, "step") as processes:
        processes[0].wait_for_line("ended by the watchdog code=1", PATIENCE_S)
        processes[1].signal(signal.SIGKILL)
        assert processes.wait(60)[0].code == 1
