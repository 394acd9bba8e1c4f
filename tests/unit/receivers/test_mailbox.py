"""Which notice counts when several are there."""

from __future__ import annotations

import math

import pytest

from gracepoint.errors import WireError
from gracepoint.receivers import Disruption, Mailbox


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def disruption(preemption: str = "gpt-1", remaining_s: float = 30.0, signal: str = "taint") -> Disruption:
    return Disruption(preemption=preemption, cause="Spot", signal=signal, remaining_s=remaining_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def mailbox(clock: Clock) -> Mailbox:
    return Mailbox(clock)


def test_an_empty_mailbox_has_all_the_time(mailbox: Mailbox) -> None:
    assert mailbox.current is None
    assert mailbox.first_at_s is None
    assert mailbox.remaining_s() == math.inf


def test_the_time_runs_down_from_the_moment_of_posting(mailbox: Mailbox, clock: Clock) -> None:
    mailbox.post(disruption(remaining_s=30))
    clock.now_s += 10
    assert mailbox.remaining_s() == 20


def test_of_several_origins_the_earliest_deadline_wins(mailbox: Mailbox) -> None:
    mailbox.post(disruption("gpt-1", 120))
    mailbox.post(disruption("", 30, "SIGTERM"))
    mailbox.post(disruption("gpt-2", 60))
    assert mailbox.remaining_s() == 30


@pytest.mark.parametrize("moved_s", [10.0, 300.0], ids=["earlier", "later"])
def test_of_one_origin_the_newest_word_counts(mailbox: Mailbox, moved_s: float) -> None:
    mailbox.post(disruption("gpt-1", 120))
    mailbox.post(disruption("gpt-1", moved_s))
    assert mailbox.remaining_s() == moved_s


def test_the_operators_notice_is_what_is_spoken_of_though_sigterm_is_more_urgent(mailbox: Mailbox) -> None:
    mailbox.post(disruption("", 30, "SIGTERM"))
    mailbox.post(disruption("gpt-1", 120))
    current = mailbox.current
    assert current is not None
    assert current.preemption == "gpt-1"


def test_the_first_arrival_is_remembered(mailbox: Mailbox, clock: Clock) -> None:
    mailbox.post(disruption("gpt-1"))
    clock.now_s += 5
    mailbox.post(disruption("gpt-2"))
    assert mailbox.first_at_s == 100.0


def test_a_listener_is_told_of_what_came_before_it_and_after(mailbox: Mailbox) -> None:
    heard: list[str] = []
    mailbox.post(disruption("gpt-1"))
    mailbox.listen(lambda d: heard.append(d.preemption))
    mailbox.post(disruption("gpt-2"))
    assert heard == ["gpt-1", "gpt-2"]


def test_a_listener_may_post(mailbox: Mailbox) -> None:
    mailbox.listen(lambda d: mailbox.post(disruption("gpt-2")) if d.preemption == "gpt-1" else None)
    mailbox.post(disruption("gpt-1"))
    assert mailbox.remaining_s() == 30


def test_a_disruption_survives_its_way_through_the_store() -> None:
    assert Disruption.from_json(disruption().to_json()) == disruption()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"surprise": 1}'])
def test_what_is_no_disruption_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="expected a disruption"):
        Disruption.from_json(text)
