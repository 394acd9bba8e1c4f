"""The tree of counters: who is last, what the last one learns, and what can be read of it meanwhile."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gracepoint.multihost import InMemoryStore
from gracepoint.multihost.barriers import PLAIN, Arrivals
from gracepoint.multihost.protocol import Member
from gracepoint.multihost.store import KeyValueStore


class Counting(InMemoryStore):
    """Counts the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0

    def increment(self, key: str, by: int = 1) -> int:
        self.requests += 1
        return super().increment(key, by)


def either(marks: Iterable[int]) -> int:
    """All flags of some marks."""
    flags = 0
    for mark in marks:
        flags |= mark
    return flags


SMALL = Arrivals(3, 2, either)


def arrive(arrivals: Arrivals, store: KeyValueStore, order: Sequence[int], marks: Sequence[int]) -> list[int | None]:
    """All arrive one after the other; returns what each was told."""
    return [arrivals.arrive(store, "a", rank, len(order), marks[rank]) for rank in order]


@given(st.permutations(range(11)), st.lists(st.integers(1, 7), min_size=11, max_size=11))
def test_only_the_last_to_arrive_learns_the_joined_mark_of_all(order: list[int], marks: list[int]) -> None:
    told = arrive(SMALL, InMemoryStore(), order, marks)
    assert told == [None] * 10 + [either(marks)]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9, 16, 17])
def test_every_number_of_processes_has_a_last_one(count: int) -> None:
    told = arrive(SMALL, InMemoryStore(), range(count), [1] * count)
    assert told == [None] * (count - 1) + [1]


@given(st.permutations(range(11)), st.integers(0, 11))
def test_the_marks_of_those_that_have_arrived_can_be_read(order: list[int], arrived: int) -> None:
    store, here = InMemoryStore(), order[:arrived]
    for rank in here:
        SMALL.arrive(store, "a", rank, 11, rank % 7 + 1)
    expected = [rank % 7 + 1 if rank in here else 0 for rank in range(11)]
    assert SMALL.marks(store.list("a"), 11) == expected


def test_threads_that_arrive_together_have_one_last() -> None:
    store = InMemoryStore()
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        told = list(pool.map(lambda rank: SMALL.arrive(store, "a", rank, 200), range(200)))
    assert sorted(told, key=str) == [1] + [None] * 199


@pytest.mark.parametrize(
    ("arrivals", "at_most"), [pytest.param(PLAIN, 1.04, id="barrier"), pytest.param(Member.frozen, 1.17, id="ordinals")]
)
def test_thousands_arrive_with_hardly_more_than_one_request_each(arrivals: Arrivals, at_most: float) -> None:
    store, mark = Counting(), arrivals.most
    told = arrive(arrivals, store, range(4096), [mark] * 4096)  # the largest marks fit into the store's counters, too
    assert told[-1] == mark
    assert store.requests / 4096 <= at_most
