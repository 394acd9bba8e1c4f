"""The report of a soak: what was promised and broken."""

from __future__ import annotations

import pytest

from tests.soak.report import Found, Outcome, broken_promises, rendered, unlike


@pytest.mark.parametrize(
    ("notice", "lost", "counted", "words"),
    [
        pytest.param(True, 0, 0, [], id="all is well"),
        pytest.param(True, 2, 0, ["lost 2 steps"], id="steps lost"),
        pytest.param(True, 0, 1, ["1 restarts count"], id="a restart counts"),
        pytest.param(False, 9, 1, [], id="without a notice nothing was promised"),
    ],
)
def test_only_a_notice_promises(notice: bool, lost: int, counted: int, words: list[str]) -> None:
    found = broken_promises([Outcome("taint", notice, lost, 12.0, counted)])
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


def test_accounts_may_differ_by_one_percent_of_the_whole() -> None:
    assert unlike([("training", 600.0, 591.0), ("join", 400.0, 409.0)]) == []
    (line,) = unlike([("training", 600.0, 589.0), ("join", 400.0, 400.0)])
    assert "1.1% of the whole time" in line


def test_a_report_has_a_line_for_each_kind() -> None:
    outcomes = (
        Outcome("taint", True, 0, 12.0, 0),
        Outcome("node-killed", False, 7, 80.0, 1),
        Outcome("taint", True, 0, 14.0, 0),
    )
    text = rendered(Found(3, outcomes, (("training", 90.0, 90.5), ("join", 10.0, 9.5)), ("a problem",)))
    lines = {line.split("  ")[0]: line.split() for line in text.splitlines() if line}
    assert lines["taint"] == ["taint", "2", "0", "13.0", "14.0", "0"]
    assert lines["node-killed (no notice)"][-5:] == ["1", "7", "80.0", "80.0", "1"]
    assert lines["training"][-2:] == ["+0.5", "+0.5%"]
    assert text.endswith("a problem")
