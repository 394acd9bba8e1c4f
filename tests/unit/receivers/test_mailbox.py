"""Which notice counts when several are there."""

from __future__ import annotations

import dataclasses
import math

import pytest

from gracepoint.errors import WireError
from gracepoint.receivers import Disruption, Mailbox


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def disruption(
    preemption: str = "gpt-1", remaining_s: float = 30.0, signal: str = "taint", *, drill: bool = False
) -> Disruption:
    return Disruption(preemption=preemption, cause="Spot", signal=signal, remaining_s=remaining_s, drill=drill)


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


def test_operator_notice_is_reported_though_sigterm_is_more_urgent(mailbox: Mailbox) -> None:
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


class Listening:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, float]] = []
        self.taken_back: list[tuple[str, str]] = []

    def posted(self, disruption: Disruption) -> None:
        self.heard.append((disruption.origin, disruption.remaining_s))

    def retracted(self, origin: str, reason: str) -> None:
        self.taken_back.append((origin, reason))


def test_listener_gets_earlier_notices_with_time_left_and_later_ones(mailbox: Mailbox, clock: Clock) -> None:
    listener = Listening()
    mailbox.post(disruption("gpt-1", 30))
    clock.now_s += 10
    mailbox.listen(listener.posted, listener.retracted)
    mailbox.post(disruption("gpt-2", 30))
    assert listener.heard == [("gpt-1", 20), ("gpt-2", 30)]


def test_a_listener_may_post(mailbox: Mailbox) -> None:
    def answer(notice: Disruption) -> None:
        if notice.preemption == "gpt-1":
            mailbox.post(disruption("gpt-2"))

    mailbox.listen(answer, lambda origin, reason: None)
    mailbox.post(disruption("gpt-1"))
    assert mailbox.find("gpt-2") is not None


def test_repeated_deadline_is_ignored_and_a_drifting_one_is_not(mailbox: Mailbox, clock: Clock) -> None:
    listener = Listening()
    mailbox.listen(listener.posted, listener.retracted)
    mailbox.post(disruption(remaining_s=30))
    clock.now_s += 10
    mailbox.post(disruption(remaining_s=20.1))
    assert listener.heard == [("gpt-1", 30)]
    mailbox.post(disruption(remaining_s=19.8))
    mailbox.post(disruption(remaining_s=19.45))
    assert listener.heard == [("gpt-1", 30), ("gpt-1", 19.45)]
    assert mailbox.remaining_s() == pytest.approx(19.45)


def test_a_repeated_notice_corrects_the_cause(mailbox: Mailbox) -> None:
    notice = of_revision(5000, 30.0)
    mailbox.post(notice)
    mailbox.post(dataclasses.replace(notice, cause="Maintenance"))
    assert mailbox.current is not None
    assert mailbox.current.cause == "Maintenance"


@pytest.mark.parametrize(("moved_s", "heard"), [(0.5, 1), (-0.5, 1), (0.75, 2), (-0.75, 2)])
def test_a_deadline_without_revision_is_the_same_up_to_half_a_second(
    mailbox: Mailbox, moved_s: float, heard: int
) -> None:
    listener = Listening()
    mailbox.listen(listener.posted, listener.retracted)
    mailbox.post(disruption(remaining_s=30))
    mailbox.post(disruption(remaining_s=30 + moved_s))
    assert len(listener.heard) == heard


def of_revision(revision: int | None, remaining_s: float) -> Disruption:
    return dataclasses.replace(disruption(remaining_s=remaining_s), revision=revision)


@pytest.mark.parametrize("later_s", [40.0, 20.0], ids=["delayed on its way", "faster"])
def test_of_one_revision_the_earlier_deadline_is_kept(mailbox: Mailbox, later_s: float) -> None:
    listener = Listening()
    mailbox.listen(listener.posted, listener.retracted)
    for remaining_s in (30.0, later_s):
        mailbox.post(of_revision(3, remaining_s))
    assert mailbox.remaining_s() == min(30.0, later_s)
    assert len(listener.heard) == 1


@pytest.mark.parametrize(
    ("first", "second", "heard"),
    [
        pytest.param(3, 9_000, 2, id="another deadline"),
        pytest.param(None, 9_000, 1, id="a word without a revision came before"),
        pytest.param(3, None, 1, id="a word without a revision came between"),
    ],
)
def test_the_revision_that_was_sent_is_remembered(
    mailbox: Mailbox, first: int | None, second: int | None, heard: int
) -> None:
    listener = Listening()
    mailbox.listen(listener.posted, listener.retracted)
    mailbox.post(of_revision(first, 30.0))
    mailbox.post(of_revision(second, 30.0))
    assert len(listener.heard) == heard
    mailbox.post(of_revision(second or first, 90.0))
    assert len(listener.heard) == heard, "it is the same deadline by its revision, whatever it says"


def test_readers_find_what_is_there_by_origin_and_by_name(mailbox: Mailbox) -> None:
    notice, signal = disruption("gpt-1"), disruption("", signal="SIGTERM")
    for found in (notice, signal):
        mailbox.post(found)
    assert mailbox.named() == [notice]
    assert (mailbox.find("SIGTERM"), mailbox.find("gpt-2")) == (signal, None)
    assert (mailbox.drop("gpt-1"), mailbox.drop("gpt-1")) == (notice, None)


def test_a_notice_is_real_unless_it_is_called_a_drill() -> None:
    assert not Disruption(preemption="gpt-1", cause="Spot", signal="taint", remaining_s=1.0).drill


def test_a_drill_that_becomes_real_is_news(mailbox: Mailbox) -> None:
    listener = Listening()
    mailbox.listen(listener.posted, listener.retracted)
    mailbox.post(disruption(drill=True))
    assert (mailbox.current, mailbox.current_drill is not None) == (None, True)
    mailbox.post(disruption())
    assert len(listener.heard) == 2
    assert mailbox.current is not None


def test_a_retraction_is_asked_of_the_listener_and_does_nothing_by_itself(mailbox: Mailbox) -> None:
    listener = Listening()
    mailbox.listen(listener.posted, listener.retracted)
    mailbox.post(disruption("gpt-1"))
    mailbox.retract("gpt-1", "taint removed")
    assert listener.taken_back == [("gpt-1", "taint removed")]
    assert mailbox.remaining_s() == 30


def test_a_retraction_while_nobody_listens_takes_the_notice_away(mailbox: Mailbox) -> None:
    mailbox.post(disruption("gpt-1"))
    mailbox.retract("gpt-1")
    assert mailbox.current is None


def test_ended_preemption_does_not_return_but_its_signal_may(mailbox: Mailbox) -> None:
    listener = Listening()
    mailbox.listen(listener.posted, listener.retracted)
    for notice in (disruption("gpt-1"), disruption("", signal="maintenance")):
        mailbox.post(notice)
        mailbox.drop(notice.origin)
        mailbox.post(notice)
    assert [origin for origin, _ in listener.heard] == ["gpt-1", "maintenance", "maintenance"]
    assert mailbox.find("gpt-1") is None


def test_the_first_arrival_is_that_of_what_is_still_here(mailbox: Mailbox, clock: Clock) -> None:
    mailbox.post(disruption("gpt-1"))
    clock.now_s += 5
    mailbox.take("3/SIGTERM", disruption("", 10, "SIGTERM"))
    mailbox.drop("gpt-1")
    assert mailbox.first_at_s == 105.0


def test_the_nodes_that_may_go_away_are_those_of_all_notices_or_else_the_own_one(mailbox: Mailbox) -> None:
    assert mailbox.leaving("node-a") == set()
    for name, nodes in (("gpt-1", ("node-b", "node-c")), ("gpt-2", ("node-c",))):
        mailbox.post(dataclasses.replace(disruption(), preemption=name, nodes=nodes))
    assert mailbox.leaving("node-a") == {"node-b", "node-c"}
    mailbox.post(dataclasses.replace(disruption(), preemption="", signal="SIGTERM"))
    assert mailbox.leaving("node-a") == {"node-a", "node-b", "node-c"}
    assert mailbox.leaving(None) == {"node-b", "node-c"}


def test_a_disruption_survives_its_way_through_the_store() -> None:
    found = dataclasses.replace(disruption(), nodes=("node-a", "node-b"))
    assert Disruption.from_json(found.to_json()) == found


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"surprise": 1}'])
def test_what_is_no_disruption_is_refused(text: str) -> None:
    with pytest.raises(WireError, match="expected a disruption"):
        Disruption.from_json(text)
