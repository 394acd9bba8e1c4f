"""What the parts of a process say of themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from gracepoint.preemption.stall_detector import Activities, StallDetector
from gracepoint.process_group import SaveProgress, StorageWait


def activities(saving: SaveProgress | None = None) -> Activities:
    return Activities(lambda: (5, 40, False), lambda: saving, lambda: 0, lambda: None)


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


LIMIT_S, LOOK_S = 900.0, 5.0


class Preempted:
    """A process within a preemption, at its agreed sync point. Its watch looks by a virtual clock."""

    def __init__(self) -> None:
        self.written_bytes = 0
        self.saving: SaveProgress | None = None
        self.waits: StorageWait | None = None
        self.activities = Activities(
            lambda: (5, 40, True), lambda: self.saving, lambda: self.written_bytes, lambda: self.waits
        )
        self._detector = StallDetector(LIMIT_S, LOOK_S)
        self._now_s = 0.0

    def stalls(self, for_s: float, moves: Callable[[], None] = lambda: None) -> list[str]:
        """Returns the stages that are reported within this time. ``moves`` is called before each look."""
        found = []
        until_s = self._now_s + for_s
        while self._now_s < until_s:
            self._now_s += LOOK_S
            moves()
            found += [each.activity.stage for each in self._detector.look(self._now_s, 0.0, self.activities()).stalled]
        return found

    def writes(self) -> None:
        self.written_bytes += 1

    def promotes(self) -> None:
        self.saving = SaveProgress(30, "", 0 if self.saving is None else self.saving.done_bytes + 1, 4000, 77)


def test_an_emergency_save_that_writes_is_no_stall() -> None:
    process = Preempted()
    with process.activities.at("emergency save", saves=True):
        assert process.stalls(10 * LIMIT_S, process.writes) == []
        assert process.stalls(2 * LIMIT_S) == ["emergency save after step 40"]


def test_a_promotion_that_writes_is_no_stall() -> None:
    process = Preempted()
    with process.activities.at("emergency save", saves=True):
        assert process.stalls(10 * LIMIT_S, process.promotes) == []
        assert process.stalls(2 * LIMIT_S) == ["emergency save after step 40", "background save of step 30"]


def test_a_restore_that_tries_to_reach_storage_is_no_stall_and_one_try_without_an_answer_is() -> None:
    process = Preempted()

    def tries() -> None:
        process.waits = StorageWait(0 if process.waits is None else (process.waits.tries or 0) + 1)

    with process.activities.at("restore", computes=True):
        assert process.stalls(10 * LIMIT_S, tries) == []
        assert process.stalls(2 * LIMIT_S) == ["restore after step 40"]


def test_a_restore_that_waits_for_process_0_to_reach_storage_is_no_stall() -> None:
    process = Preempted()
    with process.activities.at("restore", computes=True):
        process.waits = StorageWait(None)
        assert process.stalls(10 * LIMIT_S) == []
        process.waits = None
        assert process.stalls(2 * LIMIT_S) == ["restore after step 40"]


def test_a_background_save_hides_no_stall_before_the_agreed_sync_point() -> None:
    process = Preempted()
    assert process.stalls(2 * LIMIT_S, process.promotes) == ["emergency save after step 40"]
