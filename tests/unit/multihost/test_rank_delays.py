"""Whose turn it is: one process acts for thousands, and others if it does not."""

from __future__ import annotations

import pytest

from gracepoint.multihost import barriers


@pytest.mark.parametrize(
    ("rank", "after_s"), [(0, 0.0), (1, 0.1), (7, 0.1), (8, 0.2), (63, 0.2), (64, 0.316), (4095, 1.32375)]
)
def test_first_processes_act_at_once_and_others_one_after_the_other(rank: int, after_s: float) -> None:
    assert barriers.after_s(rank) == pytest.approx(after_s)


@pytest.mark.parametrize(("rank", "looks"), [(0, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (1, [4, 8]), (2, [9]), (3, [])])
def test_later_processes_poll_less_often(rank: int, looks: list[int]) -> None:
    assert [look for look in range(1, 10) if barriers.polls(rank, look)] == looks


def test_thousands_of_processes_poll_less_than_twice_as_often_as_one() -> None:
    polls = sum(barriers.polls(rank, look) for look in range(1, 101) for rank in range(4096))
    assert polls < 200
