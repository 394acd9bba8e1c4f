"""The suggested interval between two saves."""

from __future__ import annotations

import math

import pytest

from gracepoint_operator.goodput.accounts import GoodputLedger, daly_s, suggested
from gracepoint_operator.goodput.life import Category, Life


@pytest.mark.parametrize(
    ("between_min", "interval_min"),
    [pytest.param(24 * 60, 117, id="24 h"), pytest.param(6 * 60, 57, id="6 h"), pytest.param(15, 9.1, id="15 min")],
)
def test_the_formula_gives_the_values_that_daly_printed(between_min: float, interval_min: float) -> None:
    # The captions of figures 3 to 5 of the paper, for a save of five minutes.
    assert daly_s(5 * 60, between_min * 60) / 60 == pytest.approx(interval_min, rel=0.01)


def test_a_cheap_save_gives_the_interval_of_young() -> None:
    assert daly_s(0.01, 86_400) == pytest.approx(math.sqrt(2 * 0.01 * 86_400), rel=0.001)


def test_a_save_longer_than_the_time_between_losses_gives_that_time() -> None:
    assert daly_s(300, 100) == 100


def account(disruptions: int, losses: int, *, saves: int = 100) -> GoodputLedger:
    """An hour of training, with saves of half a second."""
    return GoodputLedger(
        since_ms=0,
        settled={Category.TRAINING: 3_600_000, Category.WAITING: 1_000_000},
        lives=(Life(began_ms=0, attempt=0, created_ms=0, gone_ms=0),),
        disruptions=disruptions,
        losses=losses,
        saves=saves,
        saves_ms=500 * saves,
    )


def seconds(ledger: GoodputLedger, at_least_s: float = 0.0) -> float:
    found = suggested(ledger, 0, at_least_s=at_least_s)
    assert found is not None
    return found.interval_s


def test_the_more_disruptions_lose_steps_the_shorter_is_the_interval() -> None:
    assert seconds(account(10, 0)) > seconds(account(10, 5)) > seconds(account(10, 10))


def test_it_follows_from_cost_rate_and_share_of_losses() -> None:
    found = suggested(account(10, 3), 0)
    assert found is not None
    assert found.cost_s == 0.5
    assert found.between_disruptions_s == 360
    assert found.between_losses_s == 360 * 12 / 4
    assert found.interval_s == daly_s(0.5, 1080)


def test_a_save_is_not_due_before_the_one_before_is_committed() -> None:
    assert seconds(account(10, 10), at_least_s=1000.0) == 1000.0


@pytest.mark.parametrize(
    "ledger",
    [pytest.param(account(0, 0), id="no disruption"), pytest.param(account(3, 1, saves=0), id="no periodic save")],
)
def test_nothing_is_suggested_without_measurements(ledger: GoodputLedger) -> None:
    assert suggested(ledger, 0) is None
