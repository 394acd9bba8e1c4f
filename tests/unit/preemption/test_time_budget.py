"""When a preemption's save must begin, how much time it has, and whether that will do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from gracepoint.preemption.forecast import Figures, TimeBudget
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.settings import Settings


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def notice(remaining_s: float, preemption: str = "gpt-1") -> Disruption:
    return Disruption(preemption=preemption, cause="Spot", signal="taint", remaining_s=remaining_s)


#: A step of 1 s, an evaluation of 10 s, 3 s to drain, 5 s to save: 18 s at worst.
FIGURES = Figures(state_bytes=1, step_s=1.0, wait_s=10.0, drain_s=3.0, save_s=5.0)


class Case:
    def __init__(self, figures: Figures | None = FIGURES, **settings: Any) -> None:
        self.clock = Clock()
        self.mailbox = Mailbox(self.clock)
        self.figures = figures
        self.budget = TimeBudget(self.mailbox, Settings(**settings), lambda: self.figures, self.clock)


def test_start_is_as_late_as_worst_case_and_margin_allow() -> None:
    case = Case(head_start_s=0.0, margin=2.0)
    case.mailbox.post(notice(100.0))
    assert case.budget.start_in_s() == 100 - 2 * 18 - 2
    case.clock.now_s += 62
    assert case.budget.start_in_s() == 0


def test_the_head_start_is_kept_where_less_is_predicted() -> None:
    case = Case()
    case.mailbox.post(notice(100.0))
    assert case.budget.start_in_s() == 40


@pytest.mark.parametrize("remaining_s", [30.0, 15.0, 0.0, -5.0], ids=["spot 30 s", "spot 15 s", "now", "past"])
def test_short_notices_are_acted_upon_at_once(remaining_s: float) -> None:
    case = Case()
    case.mailbox.post(notice(remaining_s))
    assert case.budget.start_in_s() <= 0


def test_what_is_not_known_is_not_waited_for() -> None:
    case = Case(figures=None)
    case.mailbox.post(notice(3600.0))
    assert case.budget.start_in_s() <= 0


@pytest.mark.parametrize("moved_s", [80.0, 3600.0], ids=["earlier", "later"])
def test_a_deadline_that_moves_moves_the_start(moved_s: float) -> None:
    case = Case()
    case.mailbox.post(notice(100.0))
    case.mailbox.post(notice(moved_s))
    assert case.budget.start_in_s() == moved_s - 60


def test_of_several_notices_the_earliest_deadline_counts() -> None:
    case = Case()
    case.mailbox.post(notice(100.0))
    case.mailbox.post(notice(200.0, "gpt-2"))
    assert case.budget.start_in_s() == 40


def test_without_a_notice_nothing_begins() -> None:
    assert Case().budget.start_in_s() == math.inf


@pytest.mark.parametrize("remaining_s", [-60.0, 0.0, 1.0])
def test_past_deadline_is_tried_also_while_training_is_held(
    remaining_s: float,
) -> None:
    case = Case()
    case.mailbox.post(notice(remaining_s))
    assert case.budget.time_left_s() > 0  # the agreement's thread has frozen training, and told nobody yet
    case.budget.begin()
    assert 2 < case.budget.time_left_s() < 3
    case.clock.now_s += 3
    assert case.budget.time_left_s() <= 0


def test_an_earlier_deadline_in_an_epoch_leaves_less_time() -> None:
    case = Case()
    case.mailbox.post(notice(60.0))
    case.budget.begin()
    assert case.budget.time_left_s() == 58
    case.mailbox.post(notice(20.0))
    assert case.budget.time_left_s() == 18


@pytest.mark.parametrize(
    ("remaining_s", "drained", "words"),
    [
        pytest.param(10.0, False, "", id="enough"),
        pytest.param(
            8.0,
            False,
            "a step takes 1.0 s, drain and save are predicted to take 8.0 s, and 7.2 s are left",
            id="too little for drain and save",
        ),
        pytest.param(8.0, True, "", id="enough for the save alone"),
        pytest.param(
            5.0, True, "the save is predicted to take 5.0 s, and 4.5 s are left", id="too little for the save"
        ),
    ],
)
def test_a_deadline_that_cannot_be_met_is_doubted_with_what_is_known(
    remaining_s: float, drained: bool, words: str
) -> None:
    case = Case()
    case.mailbox.post(notice(remaining_s))
    case.budget.begin()
    doubt = case.budget.doubt(drained=drained)
    assert words in doubt
    assert bool(words) == bool(doubt)


@pytest.mark.parametrize(
    ("send_s", "words"),
    [
        pytest.param(1.0, "", id="servers are quick enough"),
        pytest.param(4.0, "take 8.0 s (with snapshot servers 7.0 s), and 6.3 s are left", id="they are not, either"),
    ],
)
def test_a_deadline_is_not_doubted_if_the_step_can_be_sent_to_servers(send_s: float, words: str) -> None:
    case = Case(figures=dataclasses.replace(FIGURES, send_s=send_s))
    case.mailbox.post(notice(7.0))
    case.budget.begin()
    doubt = case.budget.doubt(drained=False)
    assert words in doubt
    assert bool(words) == bool(doubt)


def test_nothing_is_doubted_without_figures() -> None:
    case = Case(figures=None)
    case.mailbox.post(notice(1.0))
    assert case.budget.doubt(drained=False) == ""
