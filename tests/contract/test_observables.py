"""What users and other programs see changes only where somebody means it."""

from __future__ import annotations

import pytest

from tests.contract import observables


@pytest.mark.parametrize("name", observables.TEXTS)
def test_what_can_be_observed_is_as_its_file_says(name: str) -> None:
    before = (observables.GOLDEN / f"{name}.txt").read_text().splitlines()
    now = observables.text(name).splitlines()
    gone, new = [x for x in before if x not in now], [x for x in now if x not in before]
    assert before == now, f"gone: {gone}, new: {new}. If that is meant: python -m tests.contract.observables"
