"""Forecasts: the pace of steps, and how long a save takes."""

from __future__ import annotations

import itertools

import pytest

from gracepoint.checkpoint.saving.schedule import Throughput, Way
from gracepoint.preemption.forecast import LIMIT, Forecaster, TrainingPace, figures


def test_pace_is_the_median_so_that_a_save_does_not_count() -> None:
    pace = TrainingPace()
    for now_s in (0, 1, 2, 12, 13):
        pace.passed(now_s)
        assert not pace.known
    pace.passed(14)
    assert pace.known
    assert pace.step_s == 1


def test_steps_that_pass_together_are_in_flight_together() -> None:
    pace = TrainingPace()
    for turn in range(10):
        pace.passed(0.1 * turn, 20)
    assert pace.step_s == pytest.approx(0.005)
    assert figures(pace, 0, 1, throughput()).drain_s == pytest.approx(2 * 0.1)
    assert pace.longest_s == pytest.approx(0.1), "so long no step may be waited for"


def throughput(streamed: int | None = None, snapshots: int | None = None) -> Throughput:
    """Returns what is known of the saves so far, in bytes per second."""
    saves = Throughput(None, writes=False)
    for way, size_bytes in ((Way.STREAMED, streamed), (Way.SNAPSHOT, snapshots)):
        if size_bytes is not None:
            saves.learn(way, size_bytes, 1.0)
    return saves


def test_longest_step_leaves_out_the_first_ones() -> None:
    pace = TrainingPace()
    for now_s in (0, 60, 61, 62, 63, 64):
        pace.passed(now_s)
    assert pace.longest_s == 1
    for now_s in (84, *range(85, 100)):
        pace.passed(now_s)
    assert (pace.step_s, pace.longest_s) == (1, 20)


def test_training_stalls_if_no_step_is_passed_for_far_too_long() -> None:
    pace = TrainingPace()
    assert pace.stalled_s(100.0) is None, "it has not begun"
    pace.passed(100.0)
    assert pace.stalled_s(200.0) is None, "the first step may be long"
    for step in range(1, 10):
        pace.passed(100.0 + 3 * step)
    assert [pace.stalled_s(127.0 + later) for later in (9, 14, 16)] == [None, None, 16.0]
    pace.passed(150.0)
    assert pace.stalled_s(150.0 + 16) is None, "one step took 23 s"


def test_figures_are_known_after_state_and_pace_and_updated_by_saves() -> None:
    now_s = itertools.count(0.0)
    saves = throughput()
    forecaster = Forecaster(1, saves, 1.2, lambda: next(now_s))
    for _ in range(3):
        forecaster.passed()
    forecaster.prepare(100)
    assert forecaster.news(None) is None
    for _ in range(3):
        forecaster.passed()
    known = forecaster.news(None)
    assert known is not None
    assert known == forecaster.figures()
    assert forecaster.news(None) is None
    saves.learn(Way.SNAPSHOT, 100, 3.0)
    saved = forecaster.news("the measures of a save")
    assert saved is not None
    assert (saved.save_s, saved.needed_s, saved.needed_at_worst_s) == (3.0, 5.0, 6.0)


def test_loop_with_own_saves_has_a_forecast_by_the_longest_one() -> None:
    now_s = itertools.count(0.0)
    forecaster = Forecaster(1, throughput(), 1.2, lambda: next(now_s))
    for _ in range(7):
        forecaster.passed()
    assert forecaster.figures() is None
    forecaster.own_save_took(3.0)
    forecaster.own_save_took(2.0)
    found = forecaster.figures()
    assert found is not None
    assert (found.save_s, found.drain_s, found.needed_at_worst_s) == (3.0, 0.0, 4.0)


@pytest.mark.parametrize(
    ("step_s", "in_flight"), [(0.5, 2), (0.99, 2), (1.0, 1), (60.0, 1)], ids=lambda value: f"{value:g}"
)
def test_one_long_step_is_in_flight_and_the_forecast_says_so(step_s: float, in_flight: int) -> None:
    now_s = itertools.count(0.0, step_s)
    forecaster = Forecaster(1, throughput(None, 20), 1.2, lambda: next(now_s))
    forecaster.prepare(100)
    for _ in range(2 * LIMIT + 2):
        forecaster.passed()
    known = forecaster.figures()
    assert known is not None
    assert forecaster.run_ahead == in_flight
    assert known.drain_s == pytest.approx((in_flight + 1) * step_s)
    assert forecaster.situation(6, 300.0, None).drain_s == known.drain_s


def test_steps_in_flight_change_with_the_pace_and_not_with_one_step() -> None:
    pace, now_s, found = TrainingPace(), 0.0, []
    for took_s in [30.0] + [0.1] * 10 + [30.0] + [0.1] * 10 + [5.0] * 10 + [0.1] * 10:
        now_s += took_s
        pace.passed(now_s)
        found.append(pace.run_ahead)
    assert set(found[4:22]) == {LIMIT}, "an evaluation, or the first step's compilation"
    assert found[31] == 1
    assert found[-1] == LIMIT


def test_forecast_uses_emergency_saves_else_background_saves() -> None:
    assert figures(TrainingPace(), 200, 4, throughput(50, 20)).save_s == 4.0
    assert figures(TrainingPace(), 200, 4, throughput(None, 20)).save_s == 10.0


def test_what_the_plan_goes_by_is_what_is_known_by_now() -> None:
    now_s = itertools.count(0.0)
    forecaster = Forecaster(2, throughput(None, 20), 1.5, lambda: next(now_s))
    known = forecaster.situation(7, 30.0, None)
    assert (known.step, known.left_s, known.state_bytes, known.drain_s) == (7, 30.0, None, 0.0)
    forecaster.prepare(100)
    for _ in range(2 * LIMIT + 2):
        forecaster.passed()
    known = forecaster.situation(8, 30.0, None)
    assert (known.state_bytes, known.drain_s, known.save_s) == (100, 2 * 1.0, 5.0)
    assert (known.process_count, known.margin, known.streamed_bytes_per_s) == (2, 1.5, None)


@pytest.mark.parametrize(("send_s", "safe_s"), [(None, 5.0), (2.0, 2.0), (9.0, 5.0)])
def test_the_current_step_is_safe_by_the_quicker_of_both_ways(send_s: float | None, safe_s: float) -> None:
    now_s = itertools.count(0.0)
    forecaster = Forecaster(2, throughput(None, 20), 1.5, lambda: next(now_s), lambda: send_s)
    forecaster.prepare(100)
    for _ in range(2 * LIMIT + 2):
        forecaster.passed()
    found = forecaster.figures()
    assert found is not None
    assert (found.save_s, found.send_s, found.safe_s) == (5.0, send_s, safe_s)


def test_a_forecast_without_any_save_assumes_a_slow_disk_for_each_process() -> None:
    assert figures(TrainingPace(), 400_000_000, 2, throughput()).save_s == pytest.approx(1.0 + 2.0)
