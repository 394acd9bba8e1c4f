"""When a part of a process counts as stalled, on a virtual clock."""

from __future__ import annotations

import dataclasses

import pytest

from gracepoint.preemption.stall_detector import Activity, Changes, StallDetector
from gracepoint.settings import Settings

LIMIT_S, LOOK_S = 100.0, 10.0
TRAINING = Activity("training", "training after step 7", (7,), (7,), "sync point 7", 1)


class Looks:
    """A detector and its clock."""

    def __init__(self) -> None:
        self.detector = StallDetector(LIMIT_S, LOOK_S)
        self.now_s = self.cpu_s = 0.0

    def look(self, *activities: Activity, cpu_s: float = 0.0, after_s: float = LOOK_S) -> Changes:
        self.now_s += after_s
        self.cpu_s += cpu_s
        return self.detector.look(self.now_s, self.cpu_s, activities)

    def for_s(self, seconds: float, *activities: Activity, cpu_s: float = 0.0) -> list[Changes]:
        """Looks for so many seconds; returns what was shown, without the looks that showed nothing."""
        shown = [self.look(*activities, cpu_s=cpu_s) for _ in range(int(seconds / LOOK_S))]
        return [changes for changes in shown if changes != Changes()]


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_a_part_without_progress_is_stalled_once_at_its_limit(looks: Looks) -> None:
    looks.look(TRAINING)
    assert looks.for_s(LIMIT_S - LOOK_S, TRAINING) == []
    (stalled,) = looks.look(TRAINING).stalled
    assert (stalled.activity, stalled.for_s) == (TRAINING, LIMIT_S)
    assert looks.for_s(10 * LIMIT_S, TRAINING) == []


def test_progress_begins_the_time_again(looks: Looks) -> None:
    for step in range(5):
        assert looks.for_s(LIMIT_S - LOOK_S, dataclasses.replace(TRAINING, marks=(step,))) == []


@pytest.mark.parametrize("after", [(dataclasses.replace(TRAINING, marks=(8,)),), ()], ids=["progress", "an end"])
def test_a_stall_is_over_with(looks: Looks, after: tuple[Activity, ...]) -> None:
    assert len(looks.for_s(2 * LIMIT_S, TRAINING)) == 1
    assert looks.look(*after).over == ["training"]
    assert looks.look(*after).over == []


def test_what_computes_is_stalled_only_if_it_is_idle(looks: Looks) -> None:
    compiling = dataclasses.replace(TRAINING, stage="compilation", computes=True)
    assert looks.for_s(50 * LIMIT_S, compiling, cpu_s=LOOK_S / 2) == []
    assert len(looks.for_s(2 * LIMIT_S, compiling, cpu_s=LOOK_S / 1000)) == 1


def test_five_minutes_of_evaluation_and_hours_of_compilation_are_no_stall() -> None:
    looks, limit_s = Looks(), Settings().stall_after_s
    looks.detector = StallDetector(limit_s, LOOK_S)
    compiling = dataclasses.replace(TRAINING, stage="compilation after step 7", marks=(7, "compiles"), computes=True)
    assert looks.for_s(7200, compiling, cpu_s=LOOK_S) == []
    assert looks.for_s(300, TRAINING) == []  # neither a sync point nor processor time
    assert looks.for_s(limit_s - LOOK_S, dataclasses.replace(TRAINING, marks=(8,))) == []


def test_training_that_only_spins_is_stalled(looks: Looks) -> None:
    assert len(looks.for_s(2 * LIMIT_S, TRAINING, cpu_s=LOOK_S)) == 1


def test_a_process_that_was_stopped_itself_is_not_stalled(looks: Looks) -> None:
    looks.for_s(LIMIT_S / 2, TRAINING)
    changes = looks.look(TRAINING, after_s=10 * LIMIT_S)
    assert changes.stalled == []
    assert changes.paused_s == 10 * LIMIT_S - LOOK_S
    assert looks.for_s(LIMIT_S - LOOK_S, TRAINING) == []


def test_parts_are_watched_one_by_one(looks: Looks) -> None:
    save = Activity("background save", "background save of step 5", (5, 0))
    shown = [
        looks.look(dataclasses.replace(TRAINING, marks=(step,)), save).stalled
        for step in range(int(LIMIT_S / LOOK_S) + 1)
    ]
    assert [len(stalled) for stalled in shown] == [0] * int(LIMIT_S / LOOK_S) + [1]
    assert shown[-1][0].activity == save
