"""Training loops that break off after a notice, or leave before the others, in real processes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.multiprocess.launcher import Processes
from tests.unit.checkpoint.fakes.engine import engine

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("breaking_off_process.py")
SAVED, UNSAVED = 77, 78
WAIT_S = 60.0


def start(count: int, directory: Path, **options: Any) -> Processes:
    return Processes.start(SCRIPT, count, arguments=[str(directory), json.dumps(options)], devices=1)


def saved_step(directory: Path) -> int:
    """The step that the next start restores; each one adds 1 to the state."""
    found = engine(directory, attempt="job-1-b").restore({"w": jnp.zeros(12)}, timeout_s=30)
    assert found is not None
    np.testing.assert_array_equal(found.state["w"], np.full(12, found.step, np.float32))
    return found.step


@pytest.mark.parametrize("form", [True, False, "exits"], ids=["with", "uncaught error", "exit with code 0"])
def test_signal_to_a_process_group_saves_the_step_before_the_loader_failed(tmp_path: Path, form: bool | str) -> None:
    with start(1, tmp_path, group=[0], **{"with": form}) as (process,):
        result = process.wait(WAIT_S)
    assert result.code == SAVED
    assert "the loader's worker is gone" in result.output, "the user's error is not masked"
    assert "phase=Committed" in result.output
    assert saved_step(tmp_path) == 8


def test_helpers_that_leave_the_process_group_live_until_the_agreed_step(tmp_path: Path) -> None:
    with start(1, tmp_path, group=[0], shielded=True) as (process,):
        result = process.wait(WAIT_S)
    assert result.code == SAVED
    assert "the loader's worker is gone" not in result.output
    assert saved_step(tmp_path) > 8


@pytest.mark.parametrize("waits_after", [5, 8], ids=["behind it", "between it and the next one"])
def test_others_save_the_step_after_which_one_broke_off(tmp_path: Path, waits_after: int) -> None:
    with start(2, tmp_path / "steps", group=[1], waits_after=waits_after) as processes:
        results = processes.wait(WAIT_S)
    assert [result.code for result in results] == [SAVED, SAVED]
    for result in results:
        assert (
            "the training of process 1 broke off after it: RuntimeError: the loader's worker is gone" in result.output
        )
    assert saved_step(tmp_path / "steps") == 8


@pytest.mark.parametrize("group", [[1], [0, 1]], ids=["of one", "of all"])
def test_data_that_just_end_after_a_signal_are_no_end_of_training(tmp_path: Path, group: list[int]) -> None:
    options: dict[str, Any] = {"silent": True} | ({"waits_after": 8} if group == [1] else {"together": True})
    with start(2, tmp_path / "steps", group=group, **options) as processes:
        results = processes.wait(WAIT_S)
    assert [result.code for result in results] == [SAVED, SAVED]
    assert all("close() was called after a SIGTERM" in result.output for result in results)
    assert saved_step(tmp_path / "steps") == 8


def test_all_that_broke_off_after_one_step_save_it_though_a_step_needs_all(tmp_path: Path) -> None:
    with start(2, tmp_path / "steps", group=[0, 1], together=True) as processes:
        results = processes.wait(WAIT_S)
    assert [result.code for result in results] == [SAVED, SAVED]
    assert saved_step(tmp_path / "steps") == 8


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"waits_after": 8, "together": True}, "the state of step 8 is gone: it was donated to the next step"),
        ({"waits_after": 10}, "it was at sync point 10 already, and the state of sync point 8 is gone"),
    ],
    ids=["donated", "too far ahead"],
)
def test_who_has_that_state_no_more_says_so_and_all_leave_before_the_deadline(
    tmp_path: Path, options: dict[str, Any], told: str
) -> None:
    with start(2, tmp_path / "steps", group=[1], **options) as processes:
        processes[1].wait_for_line("at step 8")
        began = time.monotonic()
        results = processes.wait(WAIT_S)
    assert [result.code for result in results] == [UNSAVED, UNSAVED]
    assert all(told in result.output for result in results)
    assert max(result.ended_at for result in results) - began < 15


@pytest.mark.parametrize("handler", ["exit", "hard exit"])
def test_handler_from_before_attach_is_called_after_the_save_and_decides_no_exit_code(
    tmp_path: Path, handler: str
) -> None:
    with start(1, tmp_path, group=[0], handler=handler) as (process,):
        result = process.wait(WAIT_S)
    assert result.code == SAVED
    assert result.output.index("preempted saved=True") < result.output.index("theirs")
    assert saved_step(tmp_path) == 8


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("close", "process 1 left the training after step 20, sync point 20: close() said that it has ended"),
        ("exit", "process 1 left the training after step 20, sync point 20: SystemExit: 0"),
        ("error", "process 1 left the training after step 20, sync point 20: ValueError: the user's own error"),
        ("before restore", "process 1 left the training after step 0, sync point 0: the process ended without close()"),
    ],
)
def test_who_leaves_before_the_others_is_named_within_seconds(tmp_path: Path, how: str, told: str) -> None:
    with start(2, tmp_path, together=True, leaves=[1, how]) as processes:
        processes[1].wait_for_line("leaves")
        left_at = time.monotonic()
        processes[0].wait_for_line(told, timeout_s=30)
        assert time.monotonic() - left_at < 10
