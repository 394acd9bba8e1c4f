from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import Better, Figure, machine, publish, table


@pytest.mark.parametrize(
    ("figure", "met"),
    [
        (Figure("a", 0.25, "s", 0.25), True),
        (Figure("a", 0.26, "s", 0.25), False),
        (Figure("a", 3.0, "s", 0.0, Better.MORE), True),
        (Figure("a", -0.1, "s", 0.0, Better.MORE), False),
        (Figure("a", None, "s", 0.25), False),
        (Figure("a", 9.0, "s"), None),
        (Figure("a", 9.0, "s", 0.25, not_judged="on cpu"), None),
    ],
    ids=["at the goal", "over it", "more is better", "too little", "not measured", "no goal", "not judged"],
)
def test_a_goal_is_met_on_its_own_side(figure: Figure, met: bool | None) -> None:
    assert figure.met is met


def test_the_table_tells_value_goal_and_verdict() -> None:
    lines = table([Figure("taint -> told", 0.0123, "s", 0.25), Figure("other", None, "s", 1)]).splitlines()
    assert lines[1].split() == ["taint", "->", "told", "0.0123", "s", "<=", "0.25", "met"]
    assert lines[2].split() == ["other", "-", "s", "<=", "1", "MISSED"]
    assert table([Figure("a", 9.0, "s", 1, not_judged="on cpu")]).endswith("<= 1  not judged on cpu")


def test_the_file_holds_figures_and_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "folder" / "figures.json"
    publish([Figure("a", 1.5, "s", 2), Figure("b", 3.0, "steps")], path, load_average=0.5)
    data = json.loads(path.read_text())
    assert data["figures"] == [
        {"name": "a", "value": 1.5, "unit": "s", "goal": 2, "met": True},
        {"name": "b", "value": 3.0, "unit": "steps", "goal": None, "met": None},
    ]
    assert data["machine"] == {**machine(), "load_average": 0.5}
    assert "figure" in capsys.readouterr().out
