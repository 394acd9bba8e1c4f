"""What a process says of its time."""

from __future__ import annotations

import pytest

from gracepoint.preemption.time_spent import ProcessStart, TimeSpent


class Clock:
    """Stands until it is moved."""

    def __init__(self) -> None:
        self.at_s = 50.0

    def __call__(self) -> float:
        return self.at_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def training(clock: Clock) -> TimeSpent:
    """Of a process that joined after 10 s, restored step 7 after 20 s, and did a step after 30 s."""
    made = TimeSpent(clock, ProcessStart(40.0))
    clock.at_s = 60.0
    made.restored(7)
    clock.at_s = 70.0
    made.trains()
    return made


def test_it_says_when_it_reached_each_stage(training: TimeSpent) -> None:
    spent = training.spent()
    assert (spent.joined_s, spent.restored_s, spent.trained_s) == (10.0, 20.0, 30.0)
    assert (spent.now_s, spent.first_step, spent.left_s) == (30.0, 7, None)


def test_it_says_what_came_before_attach_and_when_the_programs_were_there(clock: Clock) -> None:
    newest_s: list[float | None] = [None]
    made = TimeSpent(clock, ProcessStart(40.0, age_s=3.5), lambda: newest_s[0])
    assert (made.spent().age_s, made.spent().compiled_s) == (3.5, None)
    newest_s[0], clock.at_s = 62.0, 63.0
    assert made.spent().compiled_s is None, "not all programs of the first step are known to be there"
    made.trains()
    newest_s[0], clock.at_s = 90.0, 91.0
    assert made.spent().compiled_s == 22.0, "later programs are no part of the start"


def test_it_says_when_the_last_of_all_processes_was_started(clock: Clock) -> None:
    alone, later = ProcessStart(40.0, 1000.0, 3.5), ProcessStart(40.0, 1000.0, 3.5, last_unix_s=998.0)
    assert alone.unix_s == 996.5
    assert (TimeSpent(clock, alone).spent().last_started_s, TimeSpent(clock, later).spent().last_started_s) == (
        None,
        -2,
    )


def test_time_of_saves_is_no_training(training: TimeSpent, clock: Clock) -> None:
    clock.at_s = 80.0
    training.stops(17)
    clock.at_s = 81.5
    training.goes_on(periodic=True)
    clock.at_s = 90.0
    training.stops(25)
    clock.at_s = 92.0
    spent = training.spent()
    assert (spent.saving_s, spent.saves, spent.saves_s) == (3.5, 1, 1.5)
    assert spent.passed == {"17": 10.0, "25": 18.5}


def test_a_save_that_is_left_out_stopped_the_training_nevertheless(training: TimeSpent, clock: Clock) -> None:
    training.stops(8)
    clock.at_s += 4.0
    training.goes_on(periodic=False)
    assert (training.spent().saving_s, training.spent().saves) == (4.0, 0)


def test_training_ends_with_the_emergency_save(training: TimeSpent, clock: Clock) -> None:
    training.stops(8)
    clock.at_s += 2.0
    training.left()
    clock.at_s += 5.0
    training.left()
    assert (training.spent().left_s, training.spent().saving_s) == (32.0, 2.0)


def test_training_that_stalled_before_a_preemption_ended_with_its_newest_step(
    training: TimeSpent, clock: Clock
) -> None:
    clock.at_s += 4.0
    training.stops(8)  # a periodic save, at which it waits for a process that was lost
    clock.at_s += 100.0
    training.left(stalled_s=101.0)
    assert (training.spent().left_s, training.spent().saving_s) == (33.0, 0.0)


def test_training_that_stalled_for_longer_than_it_lasted_ended_with_its_first_step(
    training: TimeSpent, clock: Clock
) -> None:
    clock.at_s += 20.0
    training.left(stalled_s=20.5)
    assert training.spent().left_s == training.spent().trained_s


def test_the_newest_steps_are_named(training: TimeSpent) -> None:
    for step in range(20):
        training.stops(step)
        training.goes_on()
    assert list(training.spent().passed or {}) == [str(step) for step in range(12, 20)]


def test_a_loop_that_saves_by_itself_began_before_its_first_step(clock: Clock) -> None:
    own = TimeSpent(clock)
    own.trains(41)
    assert own.spent().first_step == 40
    own.passed(50)
    assert own.spent().passed == {"50": 0.0}


def test_checkpoint_is_as_old_as_its_step(training: TimeSpent, clock: Clock) -> None:
    assert training.spent().saved_s is None
    for step in (10, 20):
        clock.at_s += 10.0
        training.stops(step)
        training.goes_on(periodic=True)
    training.committed(10)
    assert training.spent().saved_s == 40.0
    training.committed(20)
    training.committed(10)  # its save took longer
    training.committed(5)  # of which it is not known when it was passed
    assert training.spent().saved_s == 50.0


def test_step_that_is_passed_again_keeps_its_first_time(training: TimeSpent, clock: Clock) -> None:
    training.stops(10)
    training.goes_on()
    clock.at_s += 10.0
    training.passed(10)
    training.committed(10)
    assert training.spent().saved_s == 30.0
