"""Whole preemptions in real JAX processes: who is told, where all stop, what is saved, and how they end."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire.frames import Retraction
from gracepoint.wire.messages import Acknowledgement, Forecast, Mode, Phase, Report, Resumption
from tests.multiprocess.launcher import Processes, Result
from tests.unit.receivers.fakes.server import OperatorServer, notice

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("train.py")
SAVED, UNSAVED = 77, 78
STATE_BYTES = 48 * 16 * 4 + 4
Start = Callable[..., Processes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the training script; the processes end with the test."""
    with contextlib.ExitStack() as stack:

        def start_processes(count: int, environments: list[dict[str, str]] | None = None, **options: Any) -> Processes:
            return stack.enter_context(
                Processes.start(
                    SCRIPT,
                    count,
                    arguments=[str(tmp_path / "checkpoints"), json.dumps(options)],
                    environments=environments,
                )
            )

        yield start_processes


@pytest.fixture
def operator() -> Iterator[OperatorServer]:
    with OperatorServer() as server:
        yield server


def preempted(result: Result) -> tuple[bool, int]:
    """What ``Preempted`` said: (saved, step)."""
    found = re.search(r"^preempted (True|False) (\d+) ", result.output, re.MULTILINE)
    assert found, result.output
    return found[1] == "True", int(found[2])


def value(output: str) -> str:
    found = re.search(r"^value .*$", output, re.MULTILINE)
    assert found, output
    return found[0]


def all_training(processes: Processes, count: int, step: int = 10) -> None:
    for index in range(count):
        processes[index].wait_for_line(f"training {step}")


@pytest.mark.parametrize("count", [2, 3])
def test_sigterm_to_one_process_saves_one_step_and_the_next_start_resumes(start: Start, count: int) -> None:
    processes = start(count)
    all_training(processes, count)
    processes[count - 1].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [SAVED] * count, processes.output()
    (end,) = {preempted(r) for r in results}
    saved, step = end
    assert saved

    again = start(count, steps=step + 5)
    assert [r.code for r in again.wait(timeout_s=60)] == [0] * count, again.output()
    for index, result in enumerate(results):
        output = again[index].output
        assert f"restored {step} {{'position': {step}, 'process': {index}}}" in output
        assert value(output) == value(result.output)  # bit for bit: Python prints floats exactly


def test_notice_to_one_process_stops_all_and_reports_every_phase(
    start: Start, operator: OperatorServer, tmp_path: Path
) -> None:
    processes = start(2, [operator.environment(i, 2, tmp_path) for i in range(2)], save_every_steps=5)
    all_training(processes, 2)
    stream = operator.wait_for_stream(process_index=1)
    stream.send_frame(notice(stream, remaining_s=20.0))
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [SAVED, SAVED], processes.output()
    (end,) = {preempted(r) for r in results}

    (receipt,) = operator.messages(Acknowledgement)
    assert (receipt.preemption, receipt.process_index, receipt.pod_uid) == ("gpt-1", 1, "pod-uid-1")
    reports: list[Report] = operator.messages(Report)
    # Agreed is told again where something else than to save now is chosen: a periodic save may be under way.
    assert list(dict.fromkeys(r.phase for r in reports)) == [
        Phase.FROZEN, Phase.AGREED, Phase.DRAINED, Phase.WRITTEN, Phase.DURABLE, Phase.COMMITTED,
    ]  # fmt: skip
    last = reports[-1]
    assert last.choice in {"SaveNow", "FinishInFlight", "CancelAndSave"}
    assert {r.pod_uid for r in reports} == {"pod-uid-0"}  # the primary process speaks for all
    assert (last.preemption, last.cause) == ("gpt-1", "SpotTermination")
    assert (last.step, last.steps_lost, last.process_count, last.participants) == (end[1], 0, 2, [0, 1])
    assert last.ordinal == last.step
    assert last.bytes == STATE_BYTES
    assert last.seconds_to_spare is not None
    assert 10 < last.seconds_to_spare < 20
    assert list(last.stages) == ["frozen", "agreed", "drained", "written", "durable", "committed"]
    times = [t.max_s for t in last.stages.values()]
    assert times == sorted(times)

    resumptions: list[Resumption] = operator.messages(Resumption)
    assert [(r.restored_step, r.training) for r in resumptions] == [(None, False), (None, True)]
    forecasts: list[Forecast] = operator.messages(Forecast)
    assert forecasts[-1].state_bytes == STATE_BYTES
    assert forecasts[-1].save_s > 0

    spent = last.spent
    assert spent is not None
    assert spent.restored_s is not None
    assert spent.trained_s is not None
    assert spent.left_s is not None
    assert 0 < spent.joined_s < spent.restored_s < spent.trained_s < spent.left_s <= spent.now_s
    assert spent.age_s is not None
    assert spent.last_started_s is not None
    assert -spent.age_s - 0.01 <= spent.last_started_s < spent.joined_s, "no earlier than process 0"
    assert spent.saves >= 1
    assert 0 < spent.saves_s < spent.saving_s
    # What is known of the saved step is all that was trained.
    trained_s = spent.left_s - spent.trained_s - spent.saving_s
    assert (spent.passed or {})[str(end[1])] == pytest.approx(trained_s, abs=0.001)


def test_a_notice_for_another_session_or_pod_is_ignored(start: Start, operator: OperatorServer, tmp_path: Path) -> None:
    processes = start(2, [operator.environment(i, 2, tmp_path) for i in range(2)], steps=60)
    all_training(processes, 2)
    stream = operator.wait_for_stream(process_index=0)
    stream.send_frame(notice(stream, session="the session before"))
    stream.send_frame(notice(stream, pod_uid="pod-uid-1"))
    processes[0].wait_for_line("ignored a message for another session")
    assert [r.code for r in processes.wait(timeout_s=60)] == [0, 0], processes.output()
    assert operator.messages(Acknowledgement) == []
    assert operator.messages(Report) == []


def test_training_continues_through_drill_and_retraction_until_near_the_deadline(
    start: Start, operator: OperatorServer, tmp_path: Path
) -> None:
    processes = start(2, [operator.environment(i, 2, tmp_path) for i in range(2)])
    all_training(processes, 2)
    streams = [operator.wait_for_stream(process_index=index) for index in range(2)]

    def reported(preemption: str, phase: Phase) -> None:
        operator.wait_until(lambda: phase in [r.phase for r in of(preemption)])

    def of(preemption: str) -> list[Report]:
        return [m for _, m in operator.received if isinstance(m, Report) and m.preemption == preemption]

    streams[1].send_frame(notice(streams[1], preemption="drill-1", mode=Mode.DRILL))
    reported("drill-1", Phase.COMMITTED)
    step = of("drill-1")[-1].step
    assert step is not None
    assert (tmp_path / "checkpoints" / str(step)).is_dir()
    all_training(processes, 2, step + 20)

    for stream in streams:
        stream.send_frame(notice(stream, preemption="gpt-2", remaining_s=3600.0))
    processes[0].wait_for_line("received a notice preemption=gpt-2")
    for stream in streams:
        who = stream.who
        stream.send_frame(
            Retraction(preemption="gpt-2", pod_uid=who.pod_uid, session=who.session, reason="the taint is gone")
        )
    reported("gpt-2", Phase.RETRACTED)
    assert [(r.phase, r.message) for r in of("gpt-2")] == [(Phase.RETRACTED, "the taint is gone")]

    streams[1].send_frame(notice(streams[1], preemption="gpt-3", remaining_s=3600.0))
    processes[0].wait_for_line("another process has a notice process=1")
    last = [line for line in processes[0].output.splitlines() if line.startswith("training ")][-1]
    all_training(processes, 2, int(last.split()[1]) + 20)
    assert of("gpt-3") == []  # nothing is frozen: training goes on
    streams[1].send_frame(notice(streams[1], preemption="gpt-3", remaining_s=15.0))  # the deadline moves
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [SAVED, SAVED], processes.output()
    assert len({preempted(r) for r in results}) == 1
    assert of("gpt-3")[-1].phase is Phase.COMMITTED


def test_training_ends_well_before_the_deadline_of_a_drill(
    start: Start, operator: OperatorServer, tmp_path: Path
) -> None:
    processes = start(2, [operator.environment(i, 2, tmp_path) for i in range(2)], steps=500)
    all_training(processes, 2)
    stream = operator.wait_for_stream(process_index=1)
    stream.send_frame(notice(stream, preemption="drill-1", mode=Mode.DRILL, remaining_s=50.0))
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [0, 0]
    assert operator.messages(Report)[-1].phase is Phase.COMMITTED


@pytest.mark.parametrize("options", [{"sync_every": 3}, {"evaluate_every": 2}], ids=["every third step", "evaluations"])
def test_sync_points_may_be_sparse_or_lie_in_evaluations(start: Start, options: dict[str, int]) -> None:
    processes = start(2, **options)
    all_training(processes, 2)
    processes[1].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [SAVED, SAVED], processes.output()
    (end,) = {preempted(r) for r in results}
    assert end[0]
    if "sync_every" in options:
        assert end[1] % 3 == 0


def test_loop_saving_with_orbax_stops_at_one_step_in_all_processes(operator: OperatorServer, tmp_path: Path) -> None:
    script = SCRIPT.with_name("train_with_orbax.py")
    environments = [operator.environment(i, 2, tmp_path) for i in range(2)]
    with Processes.start(script, 2, arguments=[str(tmp_path)], environments=environments) as processes:
        all_training(processes, 2)
        processes[1].signal(signal.SIGTERM)
        results = processes.wait(timeout_s=90)
        assert [r.code for r in results] == [SAVED, SAVED], processes.output()
        (end,) = {preempted(r) for r in results}
        assert end[0]
        assert f"orbax has {end[1]}" in results[0].output
    last = operator.messages(Report)[-1]
    assert (last.phase, last.step) == (Phase.COMMITTED, end[1])
    (resumption,) = operator.messages(Resumption)
    assert (resumption.restored_step, resumption.training) == (None, True)
    assert last.spent is not None
    assert last.spent.trained_s is not None
    assert last.spent.first_step == 0
    assert last.spent.left_s is not None


def test_uncaught_error_ends_its_process_though_peers_are_stuck(start: Start) -> None:
    # Without this it waits in JAX's shutdown for process 0, which waits in a step for it.
    processes = start(2, fail=[1, 15], failed_s=2.0)
    processes[1].wait_for_line("RuntimeError: the user's own error")
    processes[1].wait_for_line("ended by the watchdog code=1", timeout_s=30)
    processes[0].signal(signal.SIGKILL)
    assert [r.code for r in processes.wait(timeout_s=30)] == [-signal.SIGKILL, 1], processes.output()


def test_two_notices_at_once_are_one_preemption(start: Start, operator: OperatorServer, tmp_path: Path) -> None:
    processes = start(3, [operator.environment(i, 3, tmp_path) for i in range(3)])
    all_training(processes, 3)
    streams = [operator.wait_for_stream(process_index=index) for index in range(3)]
    processes[0].signal(signal.SIGTERM)
    for stream in streams:
        stream.send_frame(notice(stream))
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [SAVED] * 3, processes.output()
    assert len({preempted(r) for r in results}) == 1
    assert [r.phase for r in operator.messages(Report)].count(Phase.COMMITTED) == 1
    assert operator.messages(Report)[-1].preemption == "gpt-1"


def test_stalled_step_delays_the_save_and_does_not_split_it(start: Start) -> None:
    processes = start(2, stall=[1, 15, 3.0])
    processes[1].wait_for_line("stalled 15")
    processes[0].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [SAVED, SAVED], processes.output()
    assert len({preempted(r) for r in results}) == 1


def test_endless_step_lets_all_leave_at_the_deadline_with_the_unsaved_code(start: Start) -> None:
    processes = start(2, stall=[1, 15, 600.0], grace_period_s=6.0)
    processes[1].wait_for_line("stalled 15")
    began = time.monotonic()
    processes[0].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [UNSAVED, UNSAVED], processes.output()
    assert all(r.ended_at - began < 6.5 for r in results), [r.ended_at - began for r in results]


@pytest.mark.parametrize("how", ["sleep", "raise", "shutdown"])
def test_the_exit_code_is_the_policys_whatever_a_finally_does(start: Start, how: str) -> None:
    processes = start(2, **{"finally": how})
    all_training(processes, 2)
    began = time.monotonic()
    processes[1].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [SAVED, SAVED], processes.output()
    assert all("finally" in r.output for r in results)
    assert all(r.ended_at - began < 12 for r in results)


def test_a_peer_that_is_killed_after_the_commit_delays_nobody_for_long(start: Start) -> None:
    processes = start(2, **{"finally": "sleep"})
    all_training(processes, 2)
    processes[0].signal(signal.SIGTERM)
    processes[1].wait_for_line("preempted True")
    processes[1].signal(signal.SIGKILL)
    began = time.monotonic()
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [SAVED, -signal.SIGKILL], processes.output()
    assert results[0].ended_at - began < 9


def test_peer_killed_during_freeze_ends_others_with_the_unsaved_code(start: Start) -> None:
    processes = start(3, kill_self_in_freeze=2, grace_period_s=6.0)
    all_training(processes, 3)
    began = time.monotonic()
    processes[1].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [UNSAVED, UNSAVED, -signal.SIGKILL], processes.output()
    assert all(r.ended_at - began < 6.5 for r in results)


def test_processes_that_count_steps_differently_save_nothing_and_name_both(start: Start) -> None:
    processes = start(2, step_offset=1)
    all_training(processes, 2)
    processes[0].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [UNSAVED, UNSAVED], processes.output()
    for result in results:
        assert re.search(r"process 0 is at step \d+ and process 1 at step \d+", result.output)


def test_process_that_cannot_save_releases_others_before_the_deadline(start: Start) -> None:
    processes = start(2, fail_state=1, grace_period_s=60.0)
    for process in processes:
        process.wait_for_line("training 10")
    began = time.monotonic()
    processes[0].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=90)
    assert [r.code for r in results] == [UNSAVED, UNSAVED], processes.output()
    assert "process 1 reported CheckpointRefused: state['bad']" in results[0].output
    assert all(r.ended_at - began < 15 for r in results)


def test_process_whose_host_state_fails_saves_the_rest_and_all_say_so(start: Start) -> None:
    processes = start(2, fail_host_state=1, grace_period_s=60.0)
    for process in processes:
        process.wait_for_line("training 10")
    processes[0].signal(signal.SIGTERM)
    results = processes.wait(timeout_s=90)
    assert [r.code for r in results] == [SAVED, SAVED], processes.output()
    lost = "process 1 WITHOUT host_state 'data' (RuntimeError: the iterator cannot tell where it is)"
    assert all(lost in result.output for result in results), processes.output()
    again = start(2)
    for result in again.wait(timeout_s=90):
        assert re.search(r"HostStateLost: .*without host_state 'data' of process 1", result.output), again.output()


def test_user_error_is_not_masked_and_releases_others_before_the_deadline(start: Start) -> None:
    processes = start(2, fail=[1, 15], **{"with": True}, grace_period_s=60.0)
    processes[1].wait_for_line("RuntimeError: the user's own error")
    began = time.monotonic()
    processes[0].signal(signal.SIGTERM)
    # It is stuck in the collective of a step that process 1 never made: only the watchdog can end it.
    processes[0].wait_for_line("process 1 broke off: RuntimeError: the user's own error", timeout_s=5)
    processes[0].wait_for_line("ended by the watchdog code=78")
    assert time.monotonic() - began < 12


def test_notice_after_training_saves_nothing_and_training_succeeds(
    start: Start, operator: OperatorServer, tmp_path: Path
) -> None:
    # Process 1 is stuck in its last step, when process 0 has finished.
    environments = [operator.environment(i, 2, tmp_path) for i in range(2)]
    processes = start(2, environments, steps=15, stall=[1, 15, 3.0])
    processes[1].wait_for_line("stalled 15")
    processes[0].wait_for_line("finally 15")
    stream = operator.wait_for_stream(process_index=1)
    stream.send_frame(notice(stream))
    assert [r.code for r in processes.wait(timeout_s=60)] == [0, 0], processes.output()
    (end,) = operator.messages(Report)  # by who is there to say so: process 0 is not any more
    assert (end.phase, end.preemption, end.pod_uid) == (Phase.RETRACTED, "gpt-1", "pod-uid-1")


def test_the_pod_that_was_not_injected_is_refused_instead_of_training_alone(start: Start) -> None:
    processes = start(1, [{"JOB_COMPLETION_INDEX": "0"}])
    (result,) = processes.wait(timeout_s=60)
    assert result.code == 1
    assert "SettingsError: GRACEPOINT_PROCESS_COUNT: expected the number of training processes" in result.output
