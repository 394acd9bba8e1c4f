"""Which process holds up the others, by what they say of themselves."""

from __future__ import annotations

import pytest

from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.multihost.stalls import StallBoard, StalledAt, suspicion


def place(sync_point: int = 5, stage: str = "training", stack: str = "") -> StalledAt:
    return StalledAt(stage, (sync_point,), f"sync point {sync_point}", stack)


def saving(reached: str, stack: str = "") -> StalledAt:
    return StalledAt("background save of step 7", (7, int(reached == "durable")), f"step 7, {reached}", stack)


@pytest.mark.parametrize(
    ("places", "suspects", "why"),
    [
        pytest.param({0: place(), 1: place(), 3: place()}, [2], "process 2 (pod-2) did not say so", id="silent"),
        pytest.param(
            {0: place(), 1: place(4, stack="in f"), 2: place(), 3: place()},
            [1],
            "process 1 (pod-1) is at sync point 4, others at sync point 5",
            id="behind",
        ),
        pytest.param(
            {0: place(), 1: place(), 2: place(), 3: place(stage="restore", stack="in f")},
            [3],
            "process 3 (pod-3) is in another stage than the others (training): restore",
            id="in another stage",
        ),
        pytest.param(
            {0: saving("durable"), 1: saving("durable"), 2: saving("written", "in fsync"), 3: saving("durable")},
            [2],
            "process 2 (pod-2) is at step 7, written, others at step 7, durable",
            id="its part of a save is behind",
        ),
        pytest.param(dict.fromkeys(range(4), place()), [0, 1, 2, 3], "all processes", id="all alike"),
        pytest.param({}, [], "no process says any more", id="over meanwhile"),
    ],
)
def test_the_process_that_differs_is_suspected(places: dict[int, StalledAt], suspects: list[int], why: str) -> None:
    found = suspicion(places, 4, [f"pod-{index}" for index in range(4)])
    assert found.processes == suspects
    assert why in found.why
    assert found.stack == (places[suspects[0]].stack if suspects and suspects[0] in places else "")


def boards(count: int) -> list[StallBoard]:
    store = InMemoryStore()
    return [StallBoard(store, StoreProcessGroup(store, index, count)) for index in range(count)]


def test_one_process_reports_for_all_that_stall_at_one_point() -> None:
    all_boards = boards(4)
    assert [board.post("training", place()) for board in all_boards[1:]] == [True, False, False]
    assert all_boards[2].suspicion("training").processes == [0]


def test_the_same_process_reports_a_later_stall_too() -> None:
    first, second = boards(2)
    assert first.post("training", place())
    first.take_down("training")
    assert not second.post("training", place())
    assert first.post("training", place())
    assert first.suspicion("training").processes == [0, 1]


def test_who_makes_progress_again_is_silent() -> None:
    first, second, third = boards(3)
    for board in (first, second, third):
        board.post("training", place())
    second.take_down("training")
    assert first.suspicion("training").processes == [1]


def test_only_the_end_of_a_long_stack_is_kept() -> None:
    (alone,) = boards(1)
    alone.post("training", place(stack="x" * 100_000 + "the end"))
    stack = alone.suspicion("training").stack
    assert stack.endswith("the end")
    assert len(stack) <= 3000


def test_a_part_that_continues_does_not_hide_another() -> None:
    first, second = boards(2)
    for board in (first, second):
        board.post("background save", saving("durable"))
        board.post("training", place())
    second.take_down("training")
    assert first.suspicion("background save").processes == [0, 1]
    assert first.suspicion("training").processes == [1]


def test_parts_are_published_and_compared_apart() -> None:
    """Training went on in the process whose save hangs, so that sync points would name the other one."""
    first, second = boards(2)
    assert first.post("training", place(7))
    assert second.post("background save", saving("written", "in fsync"))
    assert not first.post("background save", saving("durable"))
    assert second.post("training", place(9))
    found = second.suspicion("background save")
    assert (found.processes, found.stack) == ([1], "in fsync")
