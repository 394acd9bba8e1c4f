"""The file of results: it goes on where a replay was cut, and says which line it cannot read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.replay import results
from tests.replay.results import Result

ONE = Result(
    seed=7,
    fault=1,
    kind="drain",
    announced=True,
    workload="JobSet",
    recovered=True,
    steps_lost=0,
    until_training_s=6.25,
    counted_restarts=0,
    at="2026-01-02T03:04:05+00:00",
)


def test_what_was_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "results" / "results.jsonl"
    other = dataclasses.replace(ONE, fault=2, broken=("lost 3 steps in spite of its notice",))
    assert results.read(path) == []
    for result in (ONE, other):
        results.append(result, path)
    assert results.read(path) == [ONE, other]


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.append(ONE, path)
    path.write_text(path.read_text() + ONE.as_line[:30])
    assert results.read(path) == [ONE]


def test_a_line_of_something_else_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"seed": 7}\n')
    with pytest.raises(ValueError, match=r"results.jsonl, line 1: expected a result with seed, fault, kind"):
        results.read(path)


def test_of_a_fault_that_was_replayed_the_last_result_counts() -> None:
    again = dataclasses.replace(ONE, steps_lost=1)
    assert results.newest([ONE, dataclasses.replace(ONE, fault=2), again]) == [
        again,
        dataclasses.replace(ONE, fault=2),
    ]
