"""Which process holds up the others, by what they say of themselves."""

from __future__ import annotations

import pytest

from gracepoint.multihost import InMemoryStore, StoreGang
from gracepoint.multihost.stalls import StallBoard, StalledAt, suspicion


def place(sync_point: int = 5, stage: str = "training", stack: str = "") -> StalledAt:
    return StalledAt(stage, sync_point, stack)


@pytest.mark.parametrize(
    ("places", "suspects", "why"),
    [
        pytest.param({0: place(), 1: place(), 3: place()}, [2], "process 2 (pod-2) did not say so", id="silent"),
        pytest.param(
            {0: place(), 1: place(4, stack="in f"), 2: place(), 3: place()},
            [1],
            "process 1 (pod-1) passed sync point 4 last, others sync point 5",
            id="behind",
        ),
        pytest.param(
            {0: place(), 1: place(), 2: place(), 3: place(stage="restore", stack="in f")},
            [3],
            "process 3 (pod-3) is in another stage than the others (training): restore",
            id="in another stage",
        ),
        pytest.param(dict.fromkeys(range(4), place()), [0, 1, 2, 3], "all processes", id="all alike"),
    ],
)
def test_the_process_that_differs_is_suspected(places: dict[int, StalledAt], suspects: list[int], why: str) -> None:
    found = suspicion(places, 4, [f"pod-{index}" for index in range(4)])
    assert found.processes == suspects
    assert why in found.why
    assert found.stack == (places[suspects[0]].stack if suspects[0] in places else "")


def boards(count: int) -> list[StallBoard]:
    store = InMemoryStore()
    return [StallBoard(store, StoreGang(store, index, count)) for index in range(count)]


def test_one_process_tells_for_all_that_stall_at_one_point() -> None:
    all_boards = boards(4)
    assert [board.post(place()) for board in all_boards[1:]] == [True, False, False]
    assert all_boards[2].suspicion().processes == [0]


def test_the_same_process_tells_again_of_a_later_stall() -> None:
    first, second = boards(2)
    assert first.post(place())
    first.take_down()
    assert not second.post(place())
    assert first.post(place())
    assert first.suspicion().processes == [0, 1]


def test_who_makes_progress_again_is_silent() -> None:
    first, second, third = boards(3)
    for board in (first, second, third):
        board.post(place())
    second.take_down()
    assert first.suspicion().processes == [1]


def test_only_the_end_of_a_long_stack_is_kept() -> None:
    (alone,) = boards(1)
    alone.post(place(stack="x" * 100_000 + "the end"))
    stack = alone.suspicion().stack
    assert stack.endswith("the end")
    assert len(stack) <= 3000
