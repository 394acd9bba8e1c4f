"""Periodic saves come when they should, and at the same steps in all processes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from gracepoint.checkpoint.saving.schedule import SaveInterval, SaveSchedule
from gracepoint.errors import BarrierTimeout, SettingsError
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.process_group import ProcessGroup, SingleProcess
from tests.unit.checkpoint.fakes.engine import in_gang


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Impatient(StoreProcessGroup):
    """A process that waits a moment for process 0, and not half an hour."""

    def broadcast(self, key: str, value: str | None, *, timeout_s: float, **options: Any) -> str:
        return super().broadcast(key, value, timeout_s=min(timeout_s, 0.05), **options)


def made(
    gang: ProcessGroup | None = None,
    *,
    every_steps: int = 0,
    every_s: float = 0.0,
    clock: Any = None,
    hastens: bool = False,
) -> SaveInterval:
    return SaveInterval(
        SaveSchedule(every_steps, every_s, hastens),
        gang=gang or SingleProcess(),
        key="cadence",
        clock=clock or Clock(),
    )


def run(due: SaveInterval, clock: Clock, steps: int, step_s: float, *, first: int = 1) -> list[float]:
    """Takes steps and saves when it is time; returns when that was."""
    times = []
    for step in range(first, first + steps):
        clock.now_s += step_s
        if due.is_due(step):
            due.saved()
            times.append(clock.now_s)
    return times


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times)]


def test_by_steps_multiples_are_due() -> None:
    assert [step for step in range(1, 10) if made(every_steps=4).is_due(step)] == [4, 8]


def due_steps(due: SaveInterval, steps: range) -> list[int]:
    return [step for step in steps if due.is_due(step)]


def test_save_is_due_at_the_first_sync_point_from_each_multiple() -> None:
    due = made(every_steps=100)
    due.began_at(0)
    assert due_steps(due, range(7, 420, 7)) == [105, 203, 301, 406]


@pytest.mark.parametrize(
    ("began_at", "first", "expected"),
    [
        pytest.param(0, 100, [100, 200, 300], id="a first step that is a multiple is due"),
        pytest.param(0, 150, [150, 200, 300], id="the first sync point lies beyond the first multiple"),
        pytest.param(695, 702, [702, 802, 902], id="a multiple was passed since the step that was restored"),
        pytest.param(700, 707, [807, 907, 1007], id="the step that was restored is a multiple"),
        pytest.param(None, 702, [802, 902, 1002], id="nobody said where training began"),
        pytest.param(None, 700, [700, 800, 900], id="nobody said where training began and the first is a multiple"),
    ],
)
def test_multiples_are_counted_from_where_training_began(began_at: int | None, first: int, expected: list[int]) -> None:
    due = made(every_steps=100)
    if began_at is not None:
        due.began_at(began_at)
    stride = 50 if first % 50 == 0 else 100
    assert due_steps(due, range(first, first + 301, stride))[:3] == expected


@pytest.mark.parametrize(
    ("schedule", "expected"), [({"every_steps": 100}, [641, 700]), ({"every_s": 1e6}, [641]), ({}, [])]
)
def test_first_step_after_one_that_is_not_stored_is_due_if_any_is(
    schedule: dict[str, Any], expected: list[int]
) -> None:
    due = made(**schedule)
    due.began_at(640, stored=False)
    assert due_steps(due, range(641, 760)) == expected


def test_after_another_restore_multiples_are_counted_from_that_step() -> None:
    due = made(every_steps=100)
    due.began_at(0)
    assert due_steps(due, range(7, 220, 7)) == [105, 203]
    due.began_at(105)
    assert due_steps(due, range(112, 320, 7)) == [203, 301]


@pytest.mark.parametrize("hastens", [False, True])
def test_by_seconds_as_well_and_hastened_every_multiple_is_saved_once(hastens: bool) -> None:
    clock = Clock()
    due = made(every_steps=100, every_s=1000, clock=clock, hastens=hastens)
    due.began_at(0)
    found = []
    for step in range(7, 1000, 7):
        clock.now_s += 7
        if due.is_due(step):
            due.saved()
            found.append(step)
    assert found == [105, 203, 301, 406, 504, 602, 700, 805, 903]


def test_without_an_interval_nothing_is_ever_due() -> None:
    due = made()
    assert not due.periodic
    assert not any(due.is_due(step) for step in range(100))


@pytest.mark.parametrize("interval", [{"every_steps": 1}, {"every_s": 0.5}], ids=str)
def test_an_interval_of_either_kind_is_periodic(interval: dict[str, Any]) -> None:
    clock = Clock()
    due = made(clock=clock, **interval)
    assert due.periodic
    assert run(due, clock, 20, 0.5)


@pytest.mark.parametrize("options", [{}, {"every_steps": 2}, {"hastens": True}], ids=str)
def test_no_process_asks_for_plans_that_it_does_not_need(options: dict[str, Any]) -> None:
    due = made(Impatient(InMemoryStore(), 1, 2), **options)  # process 0 publishes nothing
    assert due_steps(due, range(1, 6)) == ([2, 4] if options.get("every_steps") else [])


@pytest.mark.parametrize("step_s", [0.01, 1.0, 7.0])
def test_timed_save_is_due_at_the_first_step_after_the_interval(step_s: float) -> None:
    clock = Clock(1e6)
    times = run(made(every_s=60, clock=clock), clock, int(1000 / step_s), step_s)
    assert len(times) >= 10
    assert times[0] - 1e6 == pytest.approx(60, abs=4 * step_s + 0.1)
    for gap in gaps(times):
        assert 60 - 0.1 <= gap <= 60 + step_s + 0.1


def test_steps_that_take_longer_than_the_interval_are_all_due() -> None:
    clock = Clock()
    times = run(made(every_s=60, clock=clock), clock, 20, 100.0)
    assert gaps(times) == [100.0] * (len(times) - 1)
    assert len(times) >= 17


#: A block is at most this part of the interval.
BLOCKS = 20


def test_save_is_two_blocks_late_when_training_slows_tenfold() -> None:
    clock = Clock()
    due = made(every_s=60, clock=clock)
    before = run(due, clock, 1000, 0.1)
    after = run(due, clock, 1000, 1.0, first=1001)
    assert max(gaps(before + after)) <= 60 + 10 * 2 * 60 / BLOCKS
    assert gaps(after)[-1] == pytest.approx(60, abs=2)


def test_a_save_for_another_reason_puts_the_next_one_off() -> None:
    clock = Clock()
    due = made(every_s=60, clock=clock)
    run(due, clock, 30, 1.0)
    due.saved()  # at second 30
    times = run(due, clock, 100, 1.0, first=31)
    assert times[0] == pytest.approx(90, abs=2)


def test_steps_and_seconds_together_are_due_for_either_reason() -> None:
    clock = Clock()
    due = made(every_steps=50, every_s=20, clock=clock)
    times = run(due, clock, 100, 1.0)
    assert {50.0, 100.0} <= set(times)
    assert len(times) >= 5
    assert all(gap <= 22 for gap in gaps(times))


def test_asked_again_for_the_same_step_the_answer_is_the_same() -> None:
    clock, twice = Clock(), Clock()
    once, asked = made(every_s=5, clock=clock), made(every_s=5, clock=twice)
    answers = []
    for step in range(100):
        clock.now_s += 1
        twice.now_s += 1
        answers.append((once.is_due(step), asked.is_due(step), asked.is_due(step)))
    assert any(a for a, _, _ in answers)
    assert all(a == b == c for a, b, c in answers)


@pytest.mark.parametrize("seed", range(10))
def test_all_processes_save_at_the_same_steps_whatever_their_clocks_and_paces(seed: int) -> None:
    lengths = random.Random(seed).choices([0.001, 0.1, 1.0, 30.0], k=3)

    def train(gang: ProcessGroup) -> list[int]:
        rng = random.Random(100 * seed + gang.process_index)  # every process has its own pace and time of day
        clock, step_s = Clock(rng.uniform(0, 1e9)), lengths[gang.process_index]
        due, saved = made(gang, every_s=10, clock=clock), []
        for step in range(1500):
            clock.now_s += rng.expovariate(1 / step_s)
            if due.is_due(step):
                due.saved()
                saved.append(step)
        return saved

    first, *others = in_gang(3, train)
    assert all(other == first for other in others)
    assert len(first) >= min(1500, 1500 * lengths[0] / 10) / 4 - 1  # by the pace of process 0


def test_process_0_never_waits_and_others_are_at_most_a_block_ahead() -> None:
    store = InMemoryStore()
    clock = Clock()
    ahead, behind = StoreProcessGroup(store, 1, 2), StoreProcessGroup(store, 0, 2)
    run(made(behind, every_s=10, clock=clock), clock, 100, 1.0)
    assert run(made(ahead, every_s=10), Clock(), 100, 1.0)


def test_process_too_far_ahead_of_process_0_is_reported() -> None:
    due = made(Impatient(InMemoryStore(), 1, 2), every_s=10)
    assert not due.is_due(1)  # the first block has one call, as all know
    with pytest.raises(BarrierTimeout, match="process 0 published nothing"):
        due.is_due(2)


@pytest.mark.parametrize(
    ("every_steps", "every_s"),
    [pytest.param(-1, 0.0, id="steps"), pytest.param(0, -1.0, id="seconds"), pytest.param(0, float("inf"), id="never")],
)
def test_an_interval_out_of_range_is_refused(every_steps: int, every_s: float) -> None:
    with pytest.raises(SettingsError, match="save_every_s"):
        made(every_steps=every_steps, every_s=every_s)


# A save that is asked for early.


@pytest.mark.parametrize("step_s", [0.01, 1.0, 7.0])
@pytest.mark.parametrize("interval", [{"every_s": 3600.0}, {"every_steps": 1_000_000}], ids=["by seconds", "by steps"])
def test_early_save_comes_within_seconds_or_a_few_steps(interval: dict[str, Any], step_s: float) -> None:
    clock = Clock()
    due = made(clock=clock, hastens=True, **interval)
    assert run(due, clock, 400, step_s) == []
    due.hasten()
    asked_s = clock.now_s
    times = run(due, clock, int(100 / step_s), step_s, first=401)
    assert times[0] - asked_s <= max(7.0, 4 * step_s)
    assert len(times) == 1, "once"


def test_the_regular_saves_continue_after_an_early_one() -> None:
    clock = Clock()
    by_steps = made(every_steps=50, clock=clock, hastens=True)
    steps = []
    for step in range(1, 201):
        clock.now_s += 1.0
        if step == 60:
            by_steps.hasten()
        if by_steps.is_due(step):
            by_steps.saved()
            steps.append(step)
    early = [step for step in steps if step % 50]
    assert [step for step in steps if not step % 50] == [50, 100, 150, 200]
    assert len(early) == 1
    by_time = made(every_s=60, clock=clock, hastens=True)
    run(by_time, clock, 70, 1.0)
    by_time.hasten()
    times = run(by_time, clock, 200, 1.0, first=71)
    assert [gap for gap in gaps(times) if gap < 59] == [], "seconds count from the early one"


def test_early_save_is_at_one_step_though_only_process_0_decides() -> None:
    def train(gang: ProcessGroup) -> list[int]:
        chance = random.Random(gang.process_index)
        clock = Clock(chance.uniform(0, 1e6))
        due = made(gang, every_steps=10_000, clock=clock, hastens=True)
        saved = []
        for step in range(1, 601):
            clock.now_s += chance.uniform(0.1, 0.3)
            if step == 300 + 10 * gang.process_index:
                due.hasten()  # each hears of it at another step
            if due.is_due(step):
                due.saved()
                saved.append(step)
        return saved

    found = in_gang(3, train)
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 1


def test_another_interval_holds_from_the_next_block_on() -> None:
    clock = Clock()
    due = made(every_s=600, clock=clock)
    assert gaps(run(due, clock, 2000, 1.0)) == pytest.approx([600, 600], abs=1)
    due.follow(100.0)
    times = run(due, clock, 1000, 1.0, first=2001)
    assert gaps(times)[1:] == pytest.approx([100] * (len(times) - 2), abs=6)
    assert len(times) >= 8


def test_an_interval_that_comes_while_the_one_before_is_taken_is_not_lost() -> None:
    class Told(SaveInterval):
        """Another thread calls ``follow`` right after the first read of what was told."""

        told: Any = None
        tells_next = False

        @property
        def _told_s(self) -> Any:
            seen = self.told
            if self.tells_next:
                self.tells_next = False
                self.follow(100.0)
            return seen

        @_told_s.setter
        def _told_s(self, told_s: Any) -> None:
            self.told = told_s

    clock = Clock()
    due = Told(SaveSchedule(every_s=600), gang=SingleProcess(), key="cadence", clock=clock)
    due.follow(300.0)
    due.tells_next = True
    times = run(due, clock, 1000, 1.0)
    assert gaps(times)[1:] == pytest.approx([100] * (len(times) - 2), abs=6)
    assert len(times) >= 8


@pytest.mark.parametrize("every_s", [0.0, -1.0, float("inf"), float("nan")])
def test_an_interval_that_is_none_is_not_taken(every_s: float) -> None:
    clock = Clock()
    due = made(every_s=100, clock=clock)
    due.follow(every_s)
    assert gaps(run(due, clock, 500, 1.0)) == pytest.approx([100] * 3, abs=6)


def test_without_an_interval_in_seconds_none_is_taken() -> None:
    due = made(every_steps=100)
    due.follow(10.0)
    assert due_steps(due, range(1, 301)) == [100, 200, 300]


@pytest.mark.parametrize("every_s", [0.5, 50.0])
def test_an_interval_may_be_changed_before_training_begins(every_s: float) -> None:
    clock = Clock()
    due = made(every_s=100, clock=clock)
    due.follow(every_s)
    times = run(due, clock, 1000, every_s / 10)
    assert gaps(times)[1:] == pytest.approx([every_s] * (len(times) - 2), rel=0.15)
    assert len(times) >= 80


def test_early_saves_alone_take_no_interval_in_seconds() -> None:
    clock = Clock()
    due = made(every_steps=1_000_000, hastens=True, clock=clock)
    due.follow(10.0)
    assert run(due, clock, 200, 1.0) == []


def test_a_step_is_asked_about_again_after_a_restore() -> None:
    due = made(every_steps=100)
    due.began_at(0)
    assert due.is_due(150)
    due.began_at(150)
    assert not due.is_due(150)


def test_save_that_was_not_made_is_due_again_an_interval_later() -> None:
    clock = Clock()
    due = made(every_s=60, clock=clock)
    times = []
    for step in range(1, 1000):
        clock.now_s += 0.5
        if due.is_due(step):
            times.append(clock.now_s)
    assert set(gaps(times)) == {60.0}
