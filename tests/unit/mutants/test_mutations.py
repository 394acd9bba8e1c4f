"""The table of judges says the truth: ``make mutants`` tries what it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, judged


@pytest.mark.long
@pytest.mark.parametrize("name", judged())
def test_the_table_of_judges_names_modules_tests_and_mutants_that_are_there(name: str) -> None:
    module = judged()[name]
    assert module.mutants()
    assert [test for test in module.tests if not Path(ROOT, test).exists()] == []
    assert all(module.equivalent.values()), "each has its reason"
    assert module.changed() == [], "bring these names up to date: nobody tries them any more"
