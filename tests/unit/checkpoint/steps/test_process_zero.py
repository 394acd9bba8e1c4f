"""What process 0 does for all: its answer and its errors reach every process."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from gracepoint.checkpoint.steps.commit import by_process_zero
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierTimeout, CheckpointError, CheckpointNotFound, CheckpointTooNew
from gracepoint.process_group import ProcessGroup
from tests.unit.multihost.fakes.gangs import gangs, together


def ask(gang: ProcessGroup, act: Callable[[], str], timeout_s: float = 20.0) -> str:
    return by_process_zero(act, gang=gang, key="what", deadline=Deadline.after(timeout_s, time.monotonic))


def failing_with(error: Exception) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


def told(gang: ProcessGroup, act: Callable[[], str]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the test looks at it
        ask(gang, act)
    return caught.value


def test_process_zero_acts_once_and_all_get_its_text() -> None:
    calls: list[int] = []

    def act(process: int) -> str:
        calls.append(process)
        return f"found by {process}"

    found = together(*(lambda g=g: ask(g, lambda: act(g.process_index)) for g in gangs(3)))
    assert (found, calls) == (["found by 0"] * 3, [0])


@pytest.mark.parametrize("error", [CheckpointNotFound("no step 4"), CheckpointTooNew("a newer one")], ids=repr)
def test_errors_of_checkpoints_are_the_same_in_all_processes(error: Exception) -> None:
    found = together(*(lambda g=g: told(g, failing_with(error)) for g in gangs(3)))
    assert [(type(each), str(each)) for each in found] == [(type(error), str(error))] * 3


@pytest.mark.parametrize("error", [FileNotFoundError("gone"), ZeroDivisionError("a mistake")], ids=repr)
def test_other_errors_name_process_zero_to_the_others(error: Exception) -> None:
    mine, *others = together(*(lambda g=g: told(g, failing_with(error)) for g in gangs(3)))
    assert mine is error
    for other in others:
        assert type(other) is CheckpointError
        assert str(other) == f"process 0: {type(error).__name__}: {error}"


def test_others_wait_for_process_zero_no_longer_than_the_deadline() -> None:
    _, other = gangs(2)
    with pytest.raises(BarrierTimeout):
        ask(other, lambda: "", timeout_s=0.05)
