"""What a process says of its time, on the operator's clock."""

from __future__ import annotations

import dataclasses
import math

import pytest

from gracepoint.wire.messages import Spent
from gracepoint_operator.goodput.life import StepMark, process_times
from gracepoint_operator.workloads import read_pod
from tests.unit.operator.fakes import objects

SPENT = Spent(
    now_s=100.0,
    joined_s=2.0,
    restored_s=5.0,
    first_step=40,
    trained_s=9.0,
    saving_s=3.0,
    saves=2,
    saves_s=1.0,
    passed={"60": 50.0, "50": 20.0},
)

POD = read_pod(objects.pod(attempt=2, created_at=900.0))


def test_its_times_count_from_when_the_message_came() -> None:
    told = process_times(SPENT, "a", POD, 1100.0)
    assert told is not None
    assert (told.attached_ms, told.joined_ms, told.restored_ms) == (1_000_000, 1_002_000, 1_005_000)
    assert (told.trained_ms, told.left_ms, told.first_step) == (1_009_000, None, 40)
    assert (told.attempt, told.created_ms) == (2, 900_000)
    assert told.marks == (StepMark(50, 20_000), StepMark(60, 50_000))
    assert (told.saving_ms, told.saves, told.saves_ms) == (3000, 2, 1000)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"now_s": 1.0}, id="joined after now"),
        pytest.param({"trained_s": 4.0}, id="trained before it restored"),
        pytest.param({"now_s": 1e300}, id="too long"),
        pytest.param({"joined_s": -1.0}, id="before it began"),
        pytest.param({"saving_s": math.inf}, id="saves without an end"),
        pytest.param({"last_started_s": -1e300}, id="started too long ago"),
        pytest.param({"last_started_s": math.nan}, id="started at no time"),
        pytest.param({"saves": -1}, id="fewer than no saves"),
        pytest.param({"first_step": 2**60}, id="too many steps"),
        pytest.param({"passed": {"-1": 1.0}}, id="no step"),
        pytest.param({"passed": {"9" * 5000: 1.0}}, id="a step of many digits"),
        pytest.param({"passed": {str(step): 1.0 for step in range(9)}}, id="too many marks"),
    ],
)
def test_impossible_figures_are_not_taken(changes: dict[str, object]) -> None:
    assert process_times(dataclasses.replace(SPENT, **changes), "a", POD, 1100.0) is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("last_s", "started_ms"),
    [
        pytest.param(-3.5, 996_500, id="before process 0 called attach"),
        pytest.param(1.5, 1_001_500, id="after it"),
        pytest.param(2.4, 1_002_000, id="after all have joined, by a clock that is ahead"),
        pytest.param(None, None, id="not known"),
    ],
)
def test_the_last_start_of_a_process_is_known(last_s: float | None, started_ms: int | None) -> None:
    told = process_times(dataclasses.replace(SPENT, last_started_s=last_s), "a", POD, 1100.0)
    assert told is not None
    assert told.started_ms == started_ms


@pytest.mark.parametrize("session", ["", "x" * 65], ids=["none", "long"])
def test_a_session_that_fits_into_no_status_is_not_taken(session: str) -> None:
    assert process_times(SPENT, session, POD, 1100.0) is None
