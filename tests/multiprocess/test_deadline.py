"""The deadline plan followed by real processes, with real bytes, on storage that is slow, stuck or full."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gracepoint.deadline import Choice
from gracepoint.wire.messages import Mode, Phase, Report
from tests import limits
from tests.multiprocess.launcher import Processes
from tests.unit.receivers.fakes.server import OperatorServer, notice

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("deadline_process.py")
DISK_BYTES = 64 << 20
FAST, SLOW = 0.001, 3600.0  # what saves are made to have taken, in seconds


class Scenario(NamedTuple):
    """``learnt_s``: an emergency, a periodic save. ``then``: the storage from the choice on."""

    name: str
    storage: str
    snapshot: str
    learnt_s: tuple[float, float]
    choice: Choice
    phase: Phase
    then: str = "fast"
    words: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012 - never changed
    left_s: float = 30.0
    moves_to_s: float | None = None


SCENARIOS = [
    Scenario("nothing is under way", "fast", "committed", (FAST, FAST), Choice.SAVE_NOW, Phase.COMMITTED),
    Scenario(
        "time for both", "stuck", "writing", (FAST, FAST), Choice.FINISH_IN_FLIGHT, Phase.COMMITTED, then="slow"
    ),
    Scenario(
        "no time for both", "stuck", "writing", (FAST, SLOW), Choice.CANCEL_AND_SAVE, Phase.COMMITTED,
        then="stuck", options={"only_snapshot": True},
    ),
    Scenario(
        "the one under way alone", "stuck", "writing", (SLOW, FAST), Choice.PROMOTE, Phase.PROMOTED,
        then="slow", words="in place of step",
    ),
    Scenario("the one that failed", "fails", "held", (SLOW, FAST), Choice.PROMOTE, Phase.PROMOTED, then="slow"),
    Scenario("nothing", "fast", "committed", (SLOW, SLOW), Choice.IMPOSSIBLE, Phase.COMMITTED),
    Scenario(
        "the one under way after all", "stuck", "writing", (SLOW, SLOW), Choice.IMPOSSIBLE, Phase.COMMITTED, then="slow"
    ),
    Scenario(
        "beside heavy load", "fast", "committed", (FAST, FAST), Choice.SAVE_NOW, Phase.COMMITTED, options={"load": True}
    ),
    Scenario(
        "a file that may not grow", "fast", "committed", (FAST, FAST), Choice.SAVE_NOW, Phase.FAILED,
        then="may not grow in process 1", words="File too large",
    ),
    Scenario(
        "a full disk", "fast", "committed", (FAST, FAST), Choice.SAVE_NOW, Phase.FAILED,
        then="full", words="No space left on device",
    ),
    Scenario(
        "a peer that stalls while the deadline moves to an earlier time", "fast", "committed", (FAST, FAST),
        Choice.SAVE_NOW, Phase.FAILED, then="stuck in process 1", words="process 1", left_s=55.0, moves_to_s=1.0,
    ),
]  # fmt: skip
LAST = Scenario(
    "and leaves", "stuck", "writing", (SLOW, FAST), Choice.PROMOTE, Phase.PROMOTED, then="slow", words="in place of"
)


class Gang:
    """Two processes on one directory, which report to one operator."""

    def __init__(self, operator: OperatorServer, folder: Path) -> None:
        self.operator = operator
        self._folder = folder
        self.directory = folder / "checkpoints"

    def start(self, scenarios: list[Scenario]) -> Processes:
        plain = [
            {"storage": s.storage, "snapshot": s.snapshot, "learnt_s": s.learnt_s, "then": s.then, **s.options}
            for s in scenarios
        ]
        environments = [self.operator.environment(index, 2, self._folder) for index in range(2)]
        return Processes.start(SCRIPT, 2, arguments=[str(self.directory), json.dumps(plain)], environments=environments)

    def restored(self) -> str:
        """The line in which a new start says what it has restored."""
        with self.start([]) as again:
            results = again.wait(timeout_s=60)
        assert [result.code for result in results] == [0, 0], results
        (line,) = {line for r in results for line in r.output.splitlines() if line.startswith("restored ")}
        return line

    def reports(self, name: str) -> list[Report]:
        return [report for report in self.operator.messages(Report) if report.preemption == name]

    def wait_for_end(self, name: str) -> Report:
        self.operator.wait_until(lambda: any(r.phase.ended for r in self.reports(name)))
        return self.reports(name)[-1]

    def wait_for(self, name: str, phase: Phase) -> None:
        self.operator.wait_until(lambda: any(r.phase is phase for r in self.reports(name)))


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    """On a disk of its own, where one can be mounted."""
    with contextlib.ExitStack() as until_over:
        if limits.cannot_mount() is None:
            until_over.enter_context(limits.small_disk(tmp_path / "checkpoints", DISK_BYTES))
        yield Gang(until_over.enter_context(OperatorServer()), tmp_path)


def ready(processes: Processes, number: int) -> int:
    """Waits until a scenario has begun in both processes, and returns the step that they are at."""
    (step,) = {int(processes[i].wait_for_line(f"ready {number} ").split()[2]) for i in range(2)}
    return step


def test_every_choice_is_followed_by_all_and_promotion_is_restored(
    gang: Gang,
) -> None:
    # A disk that is anybody's is not filled; test_full_disk says so where there can be no other.
    scenarios = [s for s in [*SCENARIOS, LAST] if s.then != "full" or gang.directory.is_mount()]
    with gang.start(scenarios) as processes:
        for number, scenario in enumerate(scenarios):
            snapshot = ready(processes, number)
            name, stream = f"gpt-{number + 1}", gang.operator.wait_for_stream(process_index=number % 2)
            mode = Mode.ENFORCE if scenario is LAST else Mode.DRILL
            stream.send_frame(notice(stream, preemption=name, mode=mode, remaining_s=scenario.left_s))
            if scenario.moves_to_s is not None:
                gang.wait_for(name, Phase.DRAINED)
                stream.send_frame(notice(stream, preemption=name, mode=mode, remaining_s=scenario.moves_to_s))
            last = gang.wait_for_end(name)
            context = f"{scenario.name}: {last}\n{processes.output()}"
            assert (last.choice, last.phase) == (scenario.choice, scenario.phase), context
            assert "s are left" in last.choice_reason, context
            assert scenario.words in last.message, context
            if scenario.phase is Phase.PROMOTED:
                assert last.step == snapshot, context
                assert last.steps_lost is not None
                assert last.steps_lost > 0, context
            if scenario.phase is Phase.COMMITTED:
                assert last.steps_lost == 0, context
                assert last.step is not None
                assert last.step > snapshot, context
            if scenario.phase is not Phase.FAILED:
                assert (gang.directory / str(last.step) / "_GRACEPOINT").exists(), context
        results = processes.wait(timeout_s=60)
    assert [result.code for result in results] == [77, 77], results
    assert gang.restored() == f"restored {last.step} {last.step}"


def test_gang_leaves_with_a_save_that_ends_during_a_stuck_step(gang: Gang) -> None:
    stuck = LAST._replace(options={"steps_more": 3})
    with gang.start([stuck]) as processes:
        step = ready(processes, 0)
        stream = gang.operator.wait_for_stream(process_index=0)
        stream.send_frame(notice(stream, preemption="gpt-1", remaining_s=4.0))
        last = gang.wait_for_end("gpt-1")
        results = processes.wait(timeout_s=60)
    assert (last.phase, last.step, last.steps_lost) == (Phase.PROMOTED, step - 3, 3), last
    assert f"step {step - 3} is committed, 3 steps before step {step}, which was not saved" in last.message
    assert [result.code for result in results] == [77, 77], results
    assert gang.restored() == f"restored {step - 3} {step - 3}"
