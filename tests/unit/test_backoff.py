"""The pauses between tries that fail: the one mechanism of the library."""

from __future__ import annotations

import random

from gracepoint.deadline import Backoff


def test_pauses_grow_to_a_limit_and_are_spread() -> None:
    backoff = Backoff(first_s=1.0, most_s=8.0)
    pauses = [backoff.next_s() for _ in range(50)]
    assert all(0.1 <= p <= 8.0 for p in pauses)
    assert pauses[0] <= 1.0
    assert max(pauses[5:]) > 2.0
    assert len(set(pauses)) == 50
    backoff.reset()
    assert backoff.next_s() <= 1.0


def test_pauses_without_jitter_double() -> None:
    backoff = Backoff(first_s=0.5, most_s=3.0, jitter=0.0)
    assert [backoff.next_s() for _ in range(4)] == [0.5, 1.0, 2.0, 3.0]
    assert backoff.next_s(0.25) == 0.25


def test_hundreds_of_failures_in_a_row_have_a_next_pause() -> None:
    backoff = Backoff(first_s=0.1, most_s=15.0)
    assert all(backoff.next_s() <= 15.0 for _ in range(5000))


def test_pauses_of_processes_with_equal_seeds_differ_and_take_nothing_from_the_training_s_randomness() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    first = Backoff(1.0, 8.0).next_s()
    assert random.random() == expected
    random.seed(7)
    assert Backoff(1.0, 8.0).next_s() != first
