"""A hint in real JAX processes: a save of the same step in all of them, and training goes on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gracepoint.wire.frames import Hint
from gracepoint.wire.messages import Acknowledgement, Report
from tests.multiprocess.launcher import Processes
from tests.unit.receivers.fakes.server import OperatorServer, Stream, notice
from tests.waiting import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("train.py")
NEVER = 10_000_000


def send_hint(stream: Stream, name: str) -> None:
    stream.send_frame(
        Hint(
            hints=[name],
            pod_uid=stream.who.pod_uid,
            session=stream.who.session,
            workload_uid=stream.who.workload_uid,
            cause="Drain",
            signal="Node spec.unschedulable=true",
            nodes=["node-1"],
        )
    )


def steps_in(folder: Path) -> list[int]:
    """The complete steps."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal()) if folder.exists() else []


def wait_for_a_step(folder: Path) -> int:
    until(lambda: steps_in(folder), "the save that was brought forward")
    return steps_in(folder)[0]


def test_a_hint_brings_a_save_forward_once_and_training_continues(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with OperatorServer() as operator:
        environments = [operator.environment(index, 2, tmp_path) for index in range(2)]
        arguments = [str(folder), json.dumps({"save_every_steps": NEVER})]
        with Processes.start(SCRIPT, 2, arguments=arguments, environments=environments) as processes:
            streams = [operator.wait_for_stream(process_index=index) for index in range(2)]
            assert all(stream.who.takes_hints for stream in streams)
            for index in range(2):
                processes[index].wait_for_line("training 10")
            for stream in streams:
                send_hint(stream, "first")
            saved = wait_for_a_step(folder)
            assert (operator.messages(Acknowledgement), operator.messages(Report)) == ([], [])

            for stream in streams:
                send_hint(stream, "first")  # again, by another replica say
            for index in range(2):
                processes[index].wait_for_line(f"training {saved - saved % 10 + 200}")
            assert steps_in(folder) == [saved]

            streams[0].send_frame(notice(streams[0], remaining_s=20.0))
            results = processes.wait(timeout_s=60)
    assert [result.code for result in results] == [77, 77], processes.output()
    ends = {re.search(r"^preempted True (\d+) ", result.output, re.M) for result in results}
    (end,) = {int(match[1]) for match in ends if match}
    assert steps_in(folder) == [saved, end]
    assert "error" not in results[0].output.lower()
