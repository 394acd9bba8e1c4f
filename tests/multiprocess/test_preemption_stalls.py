"""A process that does not run between the notice and the commit is named in the report to the operator, by its pod.

The report says when training ended, too.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from gracepoint.wire.messages import Phase, Report
from tests.multiprocess.launcher import Processes
from tests.unit.receivers.fakes.server import OperatorServer, notice

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("preemption_stall_process.py")
PATIENCE_S = 120.0
#: Training that passes no step for 10 s has stalled, and the end is reported some seconds before the deadline.
DEADLINE_S = 18.0
#: Which process stops where, and how. If process 0 hangs, the coordination service that it hosts still answers.
STOPS = [
    (0, "freeze", "stops"),
    (1, "freeze", "stops"),
    (1, "drained", "stops"),
    (0, "durable", "stops"),
    (0, "freeze", "hangs"),
    (0, "agreed", "hangs"),
    (0, "drained", "hangs"),
]


def start(operator: OperatorServer, folder: Path, stopped: int, where: str, how: str) -> Processes:
    folder.mkdir()
    environments = [operator.environment(index, 2, folder) for index in range(2)]
    arguments = [str(folder / "checkpoints"), str(stopped), where, how]
    return Processes.start(SCRIPT, 2, arguments=arguments, environments=environments, devices=1)


def wait_for_end(operator: OperatorServer) -> Report:
    def ended() -> list[Report]:
        return [report for report in operator.messages(Report) if report.phase.ended]

    operator.wait_until(lambda: bool(ended()), PATIENCE_S)
    return ended()[0]


def test_the_preemption_names_a_process_that_does_not_run_in_it(tmp_path: Path) -> None:
    with contextlib.ExitStack() as until_over:
        gangs = []
        for number, stop in enumerate(STOPS):
            operator = until_over.enter_context(OperatorServer())
            gangs.append((operator, until_over.enter_context(start(operator, tmp_path / str(number), *stop))))
        for operator, processes in gangs:
            for index in range(2):
                processes[index].wait_for_line("trains", PATIENCE_S)
            for index in range(2):
                stream = operator.wait_for_stream(index)
                stream.send_frame(notice(stream, remaining_s=DEADLINE_S))
        for (operator, processes), (stopped, where, how) in zip(gangs, STOPS, strict=True):
            processes[stopped].wait_for_line(f"{how} in {where}", PATIENCE_S)
            last = wait_for_end(operator)
            context = f"process {stopped} {how} in {where}: {last}\n{processes.output()}"
            assert last.phase is Phase.FAILED, context
            assert f"process {stopped} (gpt-workers-0-{stopped})" in last.message, context
            assert last.pod_uid == f"pod-uid-{1 - stopped}", context
            assert last.spent is not None, context
            assert last.spent.left_s is not None, context
            left_ago_s = last.spent.now_s - last.spent.left_s
            if "drained" in last.stages:  # a save has stopped the training until now
                assert left_ago_s < 5.0, context
            else:
                assert left_ago_s > 10.0, context
            # Only then is the other one killed: if it hosts the coordination service, JAX aborts whoever still runs.
            assert processes[1 - stopped].wait(PATIENCE_S).code == 78, context
            processes[stopped].signal(signal.SIGKILL)
            processes.wait(PATIENCE_S)
