"""The plan of a soak: random, and the same for a seed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.soak.kinds import KINDS
from tests.soak.plan import plan


def test_a_seed_makes_one_plan_and_others_make_others() -> None:
    assert plan(7, 30, list(KINDS)) == plan(7, 30, list(KINDS))
    assert len({plan(seed, 30, list(KINDS)) for seed in range(20)}) == 20


def test_every_kind_comes_equally_often() -> None:
    made = plan(1, 3 * len(KINDS), list(KINDS))
    assert Counter(each.kind for each in made) == dict.fromkeys(KINDS, 3)
    short = plan(1, len(KINDS), list(KINDS))
    assert {each.kind for each in short} == set(KINDS)


def test_distances_are_random_within_the_spacing() -> None:
    made = plan(5, 40, list(KINDS), spacing=30)
    assert [each.number for each in made] == list(range(1, 41))
    distances = [each.after_steps for each in made]
    assert min(distances) >= 10
    assert max(distances) <= 30
    assert len(set(distances)) > 5
    assert {each.process for each in made} == {0, 1}


@pytest.mark.parametrize(("count", "kinds"), [(0, ["taint"]), (3, [])], ids=["no disruption", "no kind"])
def test_a_soak_without_disruptions_is_refused(count: int, kinds: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one disruption and one kind"):
        plan(1, count, kinds)
