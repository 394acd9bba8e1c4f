from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.accelerator import DEVICE, figures

ROOT = Path(__file__).parents[3]
LINES: list[dict[str, float | str | None]] = [
    {"name": "a", "value": 1.3, "unit": "", "at_most": 1.2},
    {"name": "b", "value": None, "unit": "", "at_least": 1},
]


@pytest.mark.parametrize(("on_cpu", "met"), [(False, [False, False]), (True, [None, None])])
def test_goals_are_judged_on_accelerators_alone(on_cpu: bool, met: list[bool | None]) -> None:
    assert [figure.met for figure in figures(LINES, on_cpu=on_cpu)] == met


@pytest.mark.integration
@pytest.mark.long
def test_every_figure_with_a_goal_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.accelerator_figures", str(tmp_path), "160"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert told[0].startswith(DEVICE)
    assert sum("at_most" in line or "at_least" in line for line in told) == 6
