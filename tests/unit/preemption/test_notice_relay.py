"""Mailboxes of several processes, which go by one bell."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import cast

import pytest

from gracepoint.multihost import Agreement, StoreUnavailable
from gracepoint.multihost.ledger import Ledger, Noticed, NoticeEntry, Retract, Retracted
from gracepoint.preemption.observer import ENOUGH_S, LEAST_LIFE_S, LifeBound, NoticePublisher, NoticeReader
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.receivers.mailbox import NODE_LOST, SIGTERM

#: What the end of a process takes.
RESERVE_S = 2.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Gang:
    """``count`` mailboxes on one bell, which is read when the test says so."""

    def __init__(self, count: int) -> None:
        self.clock = Clock()
        self.mailboxes = [Mailbox(self.clock) for _ in range(count)]
        self.readers: list[NoticeReader] = []
        self.entries: list[NoticeEntry | Retract] = []
        self.ledger = Ledger()
        self.reachable = True
        self.lives_s: list[Callable[[], float]] = [lambda: math.inf] * count  # how long each may live at most
        self.suspects = [False] * count  # whether each is told that a node is lost
        for index, mailbox in enumerate(self.mailboxes):
            life = LifeBound(
                mailbox,
                self.clock,
                RESERVE_S,
                functools.partial(self.lives_s.__setitem__, index),
                functools.partial(self.suspects.__setitem__, index),
            )
            self.readers.append(NoticeReader(mailbox, index, self.clock, life))
            publisher = NoticePublisher(
                mailbox, cast(Agreement, _End(self, index)), index, self.clock, f"node-{index}", life
            )
            mailbox.listen(publisher.posted, publisher.retracted)

    def read(self) -> None:
        """All processes hear what was written since."""
        entries, self.entries = self.entries, []
        for number, entry in enumerate(entries, start=self.ledger.changed + 1):
            self.ledger, events = self.ledger.hear(number, entry)
            for reader in self.readers:
                for event in events:
                    if isinstance(event, Noticed):
                        reader.received(event.notice)
                    elif isinstance(event, Retracted):
                        reader.removed(event.notice.origin)

    def left_s(self) -> list[float]:
        """How long each process may live without an epoch."""
        return [left_s() for left_s in self.lives_s]

    def remaining_s(self) -> list[float]:
        return [mailbox.remaining_s() for mailbox in self.mailboxes]


@dataclasses.dataclass
class _End:
    """The bell as one process has it."""

    gang: Gang
    by: int

    def tell(
        self,
        origin: str,
        text: str,
        *,
        remaining_s: float,
        drill: bool,
        once: bool,
        revision: int | None,
    ) -> None:
        if not self.gang.reachable:
            raise StoreUnavailable("process 0 is gone")
        self.gang.entries.append(NoticeEntry(self.by, origin, remaining_s, text, drill, once, revision))

    def take_back(self, origin: str, reason: str) -> None:
        if not self.gang.reachable:
            raise StoreUnavailable("process 0 is gone")
        self.gang.entries.append(Retract(self.by, origin, reason))


def notice(
    preemption: str = "gpt-1", remaining_s: float = 30.0, signal: str = "taint", *, revision: int | None = None
) -> Disruption:
    return Disruption(preemption=preemption, cause="Spot", signal=signal, remaining_s=remaining_s, revision=revision)


def sigterm(remaining_s: float = 30.0) -> Disruption:
    return notice("", remaining_s, SIGTERM)


def test_a_notice_to_one_process_is_in_every_mailbox() -> None:
    gang = Gang(3)
    gang.mailboxes[1].post(notice())
    gang.read()
    assert gang.remaining_s() == [30, 30, 30]
    assert [m.current.preemption for m in gang.mailboxes if m.current] == ["gpt-1"] * 3


def test_what_one_process_learns_alone_is_about_its_own_node() -> None:
    gang = Gang(2)
    gang.mailboxes[1].post(notice("", signal="gce preempted"))
    gang.read()
    assert [mailbox.leaving(f"node-{index}") for index, mailbox in enumerate(gang.mailboxes)] == [{"node-1"}] * 2


def test_process_0_speaks_of_the_name_that_any_process_has() -> None:
    gang = Gang(2)
    gang.mailboxes[0].post(sigterm())
    gang.mailboxes[1].post(notice("gpt-1"))
    gang.read()
    assert gang.mailboxes[0].current == notice("gpt-1")


def test_what_all_know_is_not_sent_again() -> None:
    gang = Gang(2)
    gang.mailboxes[0].post(notice(remaining_s=30))
    gang.read()
    gang.clock.now_s += 10
    gang.mailboxes[1].post(notice(remaining_s=20))  # its own stream is a little later
    assert gang.entries == []


def test_notice_read_late_from_the_bell_is_ignored_if_it_came_directly() -> None:
    gang = Gang(3)
    gang.mailboxes[0].post(notice(remaining_s=30, revision=1_000_000))
    gang.clock.now_s += 2
    gang.read()
    assert gang.remaining_s() == [28, 30, 30]  # how long the way was is not known there
    for mailbox in gang.mailboxes:
        mailbox.post(notice(remaining_s=28, revision=1_000_000))  # of the other replica, or on a new stream
    assert gang.entries == []
    assert gang.remaining_s() == [28, 28, 28]


def test_slightly_later_deadline_of_another_replica_is_ignored() -> None:
    gang = Gang(2)
    gang.mailboxes[0].post(notice(remaining_s=30, revision=1_000_000))
    gang.read()
    gang.mailboxes[1].post(notice(remaining_s=30.8, revision=1_000_800))
    assert gang.entries == []
    assert gang.remaining_s() == [30, 30]


@pytest.mark.parametrize("moved_s", [-10, 10], ids=["earlier", "later"])
def test_moved_deadline_is_reported_once_however_late_the_bell_is_read(moved_s: int) -> None:
    gang = Gang(3)
    gang.mailboxes[0].post(notice(remaining_s=30, revision=1_000_000))
    gang.read()
    moved = notice(remaining_s=30 + moved_s, revision=1_000_000 + 1000 * moved_s)
    gang.mailboxes[0].post(moved)
    gang.clock.now_s += 2
    gang.read()
    for mailbox in gang.mailboxes:
        mailbox.post(dataclasses.replace(moved, remaining_s=28 + moved_s))
    assert gang.entries == []
    assert gang.remaining_s() == [28 + moved_s] * 3


def test_simultaneous_notices_do_not_void_an_earlier_start() -> None:
    first, second = (NoticeEntry(by, "gpt-1", 30.0 - by, "{}", False, True, revision=7) for by in (0, 1))
    ledger, events = Ledger().hear(0, first)
    assert [type(event) for event in events] == [Noticed]
    ledger, events = ledger.hear(1, second)
    assert events == ()
    assert ledger.changed == 0
    ledger, events = ledger.hear(2, dataclasses.replace(first, drill=True))  # which is news
    assert [type(event) for event in events] == [Noticed]


def test_reading_time_of_an_entry_does_not_count_twice() -> None:
    gang = Gang(1)
    gang.mailboxes[0].post(notice(remaining_s=30))
    gang.clock.now_s += 10
    gang.read()
    assert gang.remaining_s() == [20]


def test_sigterm_to_another_pod_does_not_postpone_the_deadline() -> None:
    gang = Gang(2)
    gang.mailboxes[0].post(sigterm(30))
    gang.read()
    gang.clock.now_s += 10
    gang.mailboxes[1].post(sigterm(30))
    gang.read()
    assert gang.remaining_s() == [20, 20]


def test_a_later_word_of_another_process_moves_the_deadline_everywhere() -> None:
    gang = Gang(2)
    gang.mailboxes[0].post(notice(remaining_s=30))
    gang.mailboxes[1].post(notice(remaining_s=30))
    gang.mailboxes[1].post(notice(remaining_s=10))
    gang.read()
    assert gang.remaining_s() == [10, 10]


@pytest.mark.parametrize("by", [0, 1], ids=["by the process that was told", "by another"])
def test_a_named_notice_is_taken_back_in_all_mailboxes(by: int) -> None:
    gang = Gang(2)
    gang.mailboxes[0].post(notice())
    gang.read()
    gang.mailboxes[by].retract("gpt-1")
    gang.read()
    assert [m.current for m in gang.mailboxes] == [None, None]


def test_own_signal_of_a_pod_is_retracted_for_that_pod_only() -> None:
    gang = Gang(2)
    for mailbox in gang.mailboxes:
        mailbox.post(notice("", 60, "maintenance"))
    gang.read()
    gang.mailboxes[0].post(notice("", 10, "maintenance"))
    gang.mailboxes[0].retract("maintenance")
    gang.read()
    assert gang.remaining_s() == [60, 60]  # process 1's


def test_a_retraction_that_is_too_late_leaves_the_deadline_where_it_is() -> None:
    gang = Gang(2)
    gang.mailboxes[0].post(notice())
    gang.read()
    gang.mailboxes[0].retract("gpt-1")
    gang.entries.clear()  # void: the freeze had begun
    gang.read()
    assert gang.remaining_s() == [30, 30]


def test_unreachable_bell_is_logged_and_local_notices_still_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gang = Gang(2)
    gang.reachable = False
    gang.mailboxes[0].post(notice())
    gang.mailboxes[0].retract("gpt-1")
    assert "could not notify the other processes of the notice" in caplog.text
    assert "could not notify the other processes of the retraction" in caplog.text
    assert gang.mailboxes[0].remaining_s() == 30


def test_a_notice_bounds_the_life_of_the_process_even_before_the_bell_has_taken_it() -> None:
    gang = Gang(2)
    gang.reachable = False
    gang.mailboxes[1].post(notice(remaining_s=100))
    assert gang.left_s() == [math.inf, 100 - RESERVE_S]
    gang.mailboxes[1].post(notice(remaining_s=60))  # it moves
    gang.clock.now_s += 50
    assert gang.left_s() == [math.inf, 10 - RESERVE_S]


@pytest.mark.parametrize("own_s", [0.0, 5.0], ids=["with it", "later"])
def test_a_notice_of_another_process_bounds_the_life_of_each_that_hears_it_once(own_s: float) -> None:
    gang = Gang(2)
    gang.mailboxes[1].post(lost_node("gpt-1", remaining_s=100.0))
    gang.read()
    assert gang.left_s() == [100 - RESERVE_S] * 2
    assert gang.suspects == [True] * 2
    gang.clock.now_s += own_s
    gang.mailboxes[0].post(lost_node("gpt-1", remaining_s=100.0 - own_s))  # no news any more
    gang.clock.now_s += 94 - own_s
    gang.mailboxes[0].post(lost_node("gpt-1", remaining_s=6.0))
    assert gang.left_s() == [6 - RESERVE_S] * 2


def test_a_retraction_by_another_process_takes_back_the_bound_and_the_suspicion() -> None:
    gang = Gang(2)
    gang.mailboxes[1].post(lost_node("gpt-1"))
    gang.read()
    gang.mailboxes[1].retract("gpt-1")
    gang.read()
    assert gang.left_s() == [math.inf] * 2
    assert gang.suspects == [False] * 2


def test_the_others_learn_what_is_left_when_the_bell_has_taken_a_notice() -> None:
    gang = Gang(2)
    gang.mailboxes[0].post(notice(remaining_s=100))
    gang.clock.now_s += 40  # in which process 0 did not answer
    gang.entries = [dataclasses.replace(e, remaining_s=60) for e in gang.entries if isinstance(e, NoticeEntry)]
    gang.read()
    assert gang.remaining_s() == [60, 60]


def test_a_near_deadline_that_leaves_time_to_answer_ends_the_process_before_it() -> None:
    gang = Gang(1)
    gang.mailboxes[0].post(notice(remaining_s=ENOUGH_S + RESERVE_S))
    assert gang.left_s() == [ENOUGH_S]


def test_a_later_notice_does_not_postpone_the_end_for_an_earlier_one() -> None:
    gang = Gang(1)
    gang.mailboxes[0].post(notice("gpt-1", 100))
    gang.clock.now_s += 95
    gang.mailboxes[0].post(notice("gpt-2", 0))
    assert gang.left_s() == [5 - RESERVE_S]


@pytest.mark.parametrize("remaining_s", [-10.0, 0.0, 5.0, ENOUGH_S])
def test_a_notice_that_comes_late_leaves_time_for_the_others_to_answer(remaining_s: float) -> None:
    gang = Gang(1)
    gang.mailboxes[0].post(notice("gpt-1", 600))
    gang.clock.now_s += 300
    gang.mailboxes[0].post(notice("gpt-2", remaining_s))
    assert gang.left_s() == [LEAST_LIFE_S]


@pytest.mark.parametrize(
    "harmless",
    [dataclasses.replace(notice(remaining_s=0.0), drill=True), notice(remaining_s=math.inf)],
    ids=["a drill", "no deadline"],
)
def test_what_is_no_disruption_or_has_no_deadline_ends_nobody(harmless: Disruption) -> None:
    gang = Gang(1)
    gang.reachable = False
    gang.mailboxes[0].post(harmless)
    gang.clock.now_s += 1e6
    assert gang.left_s() == [math.inf]


@pytest.mark.parametrize("reachable", [True, False])
def test_a_notice_that_is_taken_back_bounds_no_life_though_the_bell_may_be_away(reachable: bool) -> None:
    gang = Gang(1)
    gang.mailboxes[0].post(notice())
    gang.read()
    gang.reachable = reachable
    gang.mailboxes[0].retract("gpt-1")
    gang.read()
    gang.clock.now_s += 1e6
    assert gang.left_s() == [math.inf]
    gang.mailboxes[0].post(notice("gpt-2", 40))
    assert gang.left_s() == [40 - RESERVE_S]


def lost_node(preemption: str, remaining_s: float = 300.0, *, drill: bool = False) -> Disruption:
    return dataclasses.replace(notice(preemption, remaining_s), cause=NODE_LOST, drill=drill)


def test_a_lost_node_is_suspected_until_all_who_say_so_take_it_back() -> None:
    gang = Gang(1)
    gang.reachable = False  # it may be the one with process 0
    gang.mailboxes[0].post(notice())
    gang.mailboxes[0].post(lost_node("gpt-2", drill=True))
    assert gang.suspects == [False]
    gang.mailboxes[0].post(lost_node("gpt-3"))
    gang.mailboxes[0].post(lost_node("gpt-4"))
    assert gang.suspects == [True]
    gang.mailboxes[0].retract("gpt-3")
    assert gang.suspects == [True]
    gang.mailboxes[0].retract("gpt-4")
    assert gang.suspects == [False]
