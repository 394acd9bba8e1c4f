"""The plan of a soak: random, and the same for a seed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from tests.soak.kinds import KINDS
from tests.soak.plan import plan


def test_a_seed_makes_one_plan_and_others_make_others() -> None:
    assert plan(7, 30, list(KINDS)) == plan(7, 30, list(KINDS))
    assert len({plan(seed, 30, list(KINDS)) for seed in range(20)}) == 20


def test_every_kind_comes_equally_often() -> None:
    made = plan(1, 3 * len(KINDS), list(KINDS))
    assert Counter(each.kind for each in made.disruptions) == dict.fromkeys(KINDS, 3)
    short = plan(1, len(KINDS), list(KINDS))
    assert {each.kind for each in short.disruptions} == set(KINDS)


def test_disruptions_come_in_order_and_leave_steps_after_them() -> None:
    made = plan(5, 40, list(KINDS), spacing=30)
    distances = [after.at_step - before.at_step for before, after in pairwise(made.disruptions)]
    assert min(distances) >= 10
    assert max(distances) <= 30
    assert len(set(distances)) > 5
    assert made.steps == made.disruptions[-1].at_step + 30
    assert {each.process for each in made.disruptions} == {0, 1}


@pytest.mark.parametrize(("count", "kinds"), [(0, ["taint"]), (3, [])], ids=["no disruption", "no kind"])
def test_a_soak_without_disruptions_is_refused(count: int, kinds: list[str]) -> None:
    with pytest.raises(ValueError, match="at least one disruption and one kind"):
        plan(1, count, kinds)
