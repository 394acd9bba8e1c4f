"""A process that is stopped is named by the others, in real JAX processes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.multiprocess.launcher import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("stall_process.py")
LIMIT_S = "3"


@pytest.mark.parametrize("stopped", [0, 2])
def test_a_stopped_process_is_named_and_training_goes_on_afterwards(tmp_path: Path, stopped: int) -> None:
    with Processes.start(SCRIPT, 3, arguments=[str(tmp_path), "report", LIMIT_S], devices=1) as processes:
        for index in range(3):
            processes[index].wait_for_line("three steps")
        processes[stopped].signal(signal.SIGSTOP)
        others = [index for index in range(3) if index != stopped]
        teller = processes.wait_for_any_line(others, f"suspects=[{stopped}]", timeout_s=90)
        for index in others:
            processes[index].wait_for_line("no progress part=training stage=", timeout_s=90)
        processes[stopped].signal(signal.SIGCONT)
        processes[teller].wait_for_line("there is progress again part=training")
        processes[stopped].wait_for_line("this process was stopped for a while")


def test_the_others_exit_for_a_restart_if_the_policy_says_so(tmp_path: Path) -> None:
    with Processes.start(SCRIPT, 2, arguments=[str(tmp_path), "restart", LIMIT_S], devices=1) as processes:
        for index in range(2):
            processes[index].wait_for_line("three steps")
        processes[1].signal(signal.SIGSTOP)
        processes[0].wait_for_line("ended by the watchdog code=78", timeout_s=90)
        processes[1].signal(signal.SIGKILL)
        assert processes.wait(60)[0].code == 78
