"""A mutant is tried in a copy of the tree: the tests pass there without it, and what they say of it is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT
from tests.mutants.mutations import mutants
from tests.mutants.trials import Outcome, trials

FILE = Path("operator/gracepoint_operator/decisions/answers.py")
TESTS = ["tests/unit/operator/decisions/test_retention.py"]


@pytest.mark.long
def test_a_changed_decision_is_detected_in_a_copy_of_the_tree() -> None:
    source, told = (ROOT / FILE).read_text(), list[Outcome]()
    returns = (mutant for mutant in mutants(source) if mutant.before.startswith("return"))
    broken = next(mutant for mutant in returns if mutant.place == "_stays_ended")
    with trials(ROOT, jobs=1) as work:
        outcomes = work.of(FILE, TESTS, [broken], told.append)
    assert [outcome.detected for outcome in outcomes] == [True]
    assert told == outcomes
    assert (ROOT / FILE).read_text() == source
