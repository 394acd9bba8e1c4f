"""Calls in worker processes, of real JAX processes that meet on JAX's own coordination service."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.multiprocess.launcher import Processes

SCRIPT = Path(__file__).with_name("async_calls_process.py")

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]


@pytest.mark.parametrize("count", [1, 2])
def test_all_processes_finalize_calls_of_their_workers_at_the_same_steps(count: int, tmp_path: Path) -> None:
    with Processes.start(SCRIPT, count, arguments=[str(tmp_path)], devices=1) as processes:
        results = processes.wait(timeout_s=120)
    assert [r.code for r in results] == [0] * count
    lines = [r.output.splitlines() for r in results]
    answers = [ast.literal_eval(own[0].removeprefix("answers ")) for own in lines]
    assert answers == [answers[0]] * count
    assert [call for answer in answers[0] for call in answer] == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 3 * count
    assert [own[1:] for own in lines] == ([["failed in [1]"]] * 2 if count == 2 else [[]])
