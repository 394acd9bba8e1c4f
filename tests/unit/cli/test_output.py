"""What commands print fits the terminal, and can be copied from it."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from gracepoint_cli import output
from tests.command_line import command

COLUMNS = ["JOB", "POLICY", "CONNECTED", "LAST PREEMPTION"]
ROWS = [["jobset/transformer", "careful", "2 of 2", "transformer-4d36580f-1 Committed"], ["job/other", "-", "-", ""]]


def printed(monkeypatch: pytest.MonkeyPatch, width: int, *, terminal: bool = True) -> list[str]:
    made = io.StringIO()
    console = Console(file=made, width=width, force_terminal=terminal, color_system=None, highlight=False)
    monkeypatch.setattr(output, "console", lambda: console)
    monkeypatch.setattr(sys, "stdout", made)
    output.put_table(COLUMNS, ROWS)
    return [line.rstrip() for line in made.getvalue().splitlines()]


def test_a_table_that_fits_has_a_line_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 100)
    assert [line.split()[0] for line in lines] == ["JOB", "jobset/transformer", "job/other"]


def test_a_table_that_does_not_fit_has_a_line_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 40)
    assert lines[:4] == [
        "JOB               jobset/transformer",
        "POLICY            careful",
        "CONNECTED         2 of 2",
        "LAST PREEMPTION   transformer-4d36580f-1 Committed",  # whole, although the line is longer
    ]
    assert lines[4:6] == ["", "JOB               job/other"]


def test_only_the_last_column_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = printed(monkeypatch, 70)[1:3]
    assert first.split() == ["jobset/transformer", "careful", "2", "of", "2", "transformer-4d36580f-1"]
    assert second.split() == ["Committed"]


def test_a_table_for_a_program_is_never_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(printed(monkeypatch, 400, terminal=False)) == 3


def test_the_signals_can_be_read_in_sixty_columns() -> None:
    lines = command("signals", columns=60).out.splitlines()
    assert lines[0].split() == ["NAME", "gke-impending-termination"]
    assert {len(line) <= 60 for line in lines} == {True}
