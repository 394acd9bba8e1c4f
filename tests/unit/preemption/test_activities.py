"""What the parts of a process say of themselves."""

from __future__ import annotations

import threading

import pytest

from gracepoint.preemption.activities import Activities
from gracepoint.save_progress import SaveProgress


def activities(saving: SaveProgress | None = None) -> Activities:
    return Activities(lambda: (5, 40, False), lambda: saving)


def test_training_is_ordered_by_its_sync_points() -> None:
    (training,) = activities()()
    assert (training.stage, training.order, training.reached) == ("training after step 40", (5,), "sync point 5")
    assert training.thread_id == threading.get_ident()


@pytest.mark.parametrize(
    ("stage", "order", "reached"),
    [
        ("", (3, 0), "step 3, 1,000 of 4,000 bytes written"),
        ("written", (3, 1), "step 3, all written but not durable"),
        ("durable", (3, 2), "step 3, its part durable"),
        ("committed", (3, 3), "step 3, committed"),
    ],
)
def test_a_save_is_ordered_by_the_stage_of_its_part(stage: str, order: tuple[int, int], reached: str) -> None:
    _, saving = activities(SaveProgress(3, stage, 1000, 4000, 77))()
    assert (saving.part, saving.order, saving.reached, saving.thread_id) == ("background save", order, reached, 77)


def test_a_save_makes_progress_with_each_byte_and_stage() -> None:
    seen = [SaveProgress(3, "", done, 4000, 77) for done in (0, 1000)] + [SaveProgress(3, "written", 1000, 4000, 77)]
    assert len({activities(each)()[1].marks for each in seen}) == len(seen)
