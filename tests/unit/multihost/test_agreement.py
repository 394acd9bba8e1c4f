"""The agreement with its real threads, processes played by threads on one in-memory store."""

from __future__ import annotations

import collections
import functools
import logging
import math
import threading
import time
import timeit
import types
from collections.abc import Callable, Iterator, Sequence

import pytest

from gracepoint.deadline import Deadline
from gracepoint.errors import AgreementError, BarrierFailed
from gracepoint.multihost import Agreement, InMemoryStore, KeyValueStore, StoreProcessGroup
from gracepoint.multihost import agreement as agreement_module
from gracepoint.multihost.agreement import Handed, Timekeeper
from gracepoint.multihost.ledger import (
    Agreed,
    Broken,
    Closed,
    Entry,
    Event,
    Gone,
    Moot,
    Noticed,
    NoticeEntry,
    Opened,
    Retract,
    Retracted,
    Settled,
    StartEntry,
    from_json,
)
from gracepoint.multihost.store import StoreUnavailable
from tests.unit.multihost.fakes.gangs import gangs, together
from tests.waiting import until

# Threads that wait for real seconds.
pytestmark = pytest.mark.integration

LATER_S = 1e6


class Watcher:
    """An observer that notes what it is told; when to start and how long there is are the test's to set."""

    def __init__(self, left_s: float = 30.0) -> None:
        self.events: list[Event] = []
        self.until_s = time.monotonic() + left_s
        self.start_at_s = 0.0
        self.looks = 0
        self.step = 0
        self.asks = True
        self.fails_at: type[Event] | None = None
        self.changed = threading.Condition()

    def heard(self, event: Event) -> None:
        if self.fails_at is type(event):
            raise ZeroDivisionError("the observer is broken")
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        return self.start_at_s - time.monotonic()

    def time_left_s(self) -> float:
        return self.until_s - time.monotonic()

    def position(self) -> tuple[int, bool]:
        return self.step, self.asks

    def looked(self) -> None:
        with self.changed:
            self.looks += 1
            self.changed.notify_all()

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def wait_for(self, kind: type[Event], number: int = 1) -> Event:
        self.wait_until(lambda: len(self.of(kind)) >= number)
        return self.of(kind)[number - 1]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 20), self.events


class Gang:
    """``count`` agreements on one store."""

    def __init__(
        self,
        count: int,
        *,
        left_s: float = 30.0,
        start_in_s: float = 0.0,
        heard_s: float = 5.0,
        named_after_s: float = 2.0,
    ) -> None:
        self.store: KeyValueStore = InMemoryStore()
        self.watchers = [Watcher(left_s) for _ in range(count)]
        for watcher in self.watchers:
            watcher.start_at_s = time.monotonic() + start_in_s
        self.agreements = [
            Agreement(self.store, g, w, heard_s=heard_s, named_after_s=named_after_s)
            for g, w in zip(gangs(count, self.store), self.watchers, strict=True)
        ]

    def start_now(self, *processes: int) -> None:
        """These processes find that it is time, at their next look."""
        for process in processes:
            self.watchers[process].start_at_s = 0.0

    def opened(self) -> int:
        """The number of the epoch that process 0 has opened last."""
        opened = self.watchers[0].of(Opened)[-1]
        assert isinstance(opened, Opened)
        return opened.epoch.number

    def close(self) -> None:
        together(*(a.close for a in self.agreements))


@pytest.fixture
def make() -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def make_gang(count: int, **options: float) -> Gang:
        made.append(Gang(count, **options))
        return made[-1]

    yield make_gang
    for gang in made:
        gang.close()


def tell(agreement: Agreement, origin: str = "spot", *, drill: bool = False, remaining_s: float = 30.0) -> None:
    agreement.tell(origin, f"about {origin}", remaining_s=remaining_s, drill=drill, once=True)


def train(agreement: Agreement, pace_s: float, epochs: int = 1, steps: int = 10_000) -> list[int]:
    """Passes sync points until the last epoch's agreed one; returns the ordinals at which it stopped."""
    stopped: list[int] = []
    for _ in range(steps):
        if agreement.arrive():
            stopped.append(agreement.seat.ordinal)
            agreement.confirm(agreement.seat.ordinal * 10, deadline=Deadline.after(20, time.monotonic))
            if len(stopped) == epochs:
                return stopped
            agreement.end_epoch()
        time.sleep(pace_s)
    raise AssertionError("never stopped")


def test_a_notice_to_one_process_stops_all_at_the_same_sync_point(make: Callable[..., Gang]) -> None:
    gang = make(3)
    timer = threading.Timer(0.05, tell, (gang.agreements[2],))
    timer.start()
    results = together(
        *(functools.partial(train, a, pace) for a, pace in zip(gang.agreements, (1e-3, 2e-3, 4e-3), strict=True))
    )
    timer.join()
    assert isinstance(results[0], list)
    assert results == [results[0]] * 3
    for watcher in gang.watchers:
        (noticed, opened, settled) = watcher.events
        assert isinstance(noticed, Noticed)
        assert (noticed.notice.by, noticed.notice.text) == (2, "about spot")
        assert isinstance(opened, Opened)
        assert isinstance(settled, Settled)
        assert settled.epoch.agreed == results[0][0]


def test_all_know_of_a_notice_long_before_it_is_acted_upon(make: Callable[..., Gang]) -> None:
    gang = make(3, start_in_s=LATER_S)
    tell(gang.agreements[1])
    for watcher in gang.watchers:
        watcher.wait_for(Noticed)
    for agreement in gang.agreements:
        assert agreement.noticed
        assert not any(agreement.arrive() for _ in range(100))
        assert not agreement.in_epoch


def test_the_first_process_that_finds_it_is_time_starts_all(make: Callable[..., Gang]) -> None:
    gang = make(3, start_in_s=LATER_S)
    gang.start_now(1)
    tell(gang.agreements[0])
    results = together(*(functools.partial(train, a, 1e-3) for a in gang.agreements))
    assert isinstance(results[0], list)
    assert results == [results[0]] * 3


def test_a_deadline_that_moves_is_announced_and_moves_the_start(make: Callable[..., Gang]) -> None:
    gang = make(2, start_in_s=LATER_S)
    tell(gang.agreements[0], remaining_s=100)
    gang.watchers[1].wait_for(Noticed)
    gang.start_now(0, 1)  # what an observer finds from the new deadline
    tell(gang.agreements[0], remaining_s=5)
    moved = gang.watchers[1].wait_for(Noticed, 2)
    assert isinstance(moved, Noticed)
    assert moved.notice.remaining_s == 5
    gang.watchers[1].wait_for(Settled)


def test_a_notice_that_is_taken_back_before_the_start_ends_quietly_everywhere(make: Callable[..., Gang]) -> None:
    gang = make(2, start_in_s=LATER_S)
    tell(gang.agreements[0])
    gang.agreements[1].take_back("spot", "the taint is gone")
    for watcher, agreement in zip(gang.watchers, gang.agreements, strict=True):
        retracted = watcher.wait_for(Retracted)
        assert isinstance(retracted, Retracted)
        assert (retracted.notice.origin, retracted.reason) == ("spot", "the taint is gone")
        assert not agreement.noticed
        assert not agreement.arrive()


def test_a_notice_that_is_taken_back_after_the_start_goes_through(make: Callable[..., Gang]) -> None:
    gang = make(2)
    tell(gang.agreements[0])
    gang.watchers[1].wait_for(Opened)
    gang.agreements[1].take_back("spot", "the taint is gone")
    results = together(*(functools.partial(train, a, 1e-3) for a in gang.agreements))
    assert isinstance(results[0], list)
    assert results == [results[0]] * 2
    assert gang.watchers[0].of(Retracted) == []


def test_notices_to_several_processes_at_once_are_one_epoch(make: Callable[..., Gang]) -> None:
    gang = make(3)
    results = together(
        *(functools.partial(tell, a, f"notice {i}") for i, a in enumerate(gang.agreements)),
        *(functools.partial(train, a, 1e-3) for a in gang.agreements),
    )
    assert len({tuple(r) for r in results[3:] if isinstance(r, list)}) == 1
    assert [len(w.of(Opened)) for w in gang.watchers] == [1, 1, 1]


def test_it_can_fire_again_after_a_drill(make: Callable[..., Gang]) -> None:
    gang = make(2)

    def notices() -> None:
        tell(gang.agreements[0], "first", drill=True)
        gang.watchers[1].wait_for(Closed)
        tell(gang.agreements[1], "second")

    results = together(notices, *(functools.partial(train, a, 1e-3, epochs=2) for a in gang.agreements))
    assert isinstance(results[1], list)
    assert results[1] == results[2]
    assert len(results[1]) == 2
    drills = [opened.epoch.drill for opened in gang.watchers[0].of(Opened) if isinstance(opened, Opened)]
    assert drills == [True, False]


def test_a_drill_whose_name_comes_again_is_not_rehearsed_again(make: Callable[..., Gang]) -> None:
    gang = make(1)
    (agreement,), (watcher,) = gang.agreements, gang.watchers
    tell(agreement, drill=True)
    assert train(agreement, 1e-3)
    agreement.end_epoch()
    watcher.wait_for(Closed)
    tell(agreement, drill=True)
    tell(agreement, "another", drill=True)
    watcher.wait_for(Opened, 2)
    assert len(watcher.of(Noticed)) == 2


def test_a_real_notice_in_a_drill_is_acted_upon_after_it(make: Callable[..., Gang]) -> None:
    gang = make(2)
    tell(gang.agreements[0], "drill", drill=True)
    gang.watchers[0].wait_for(Settled)
    tell(gang.agreements[1], "spot")
    results = together(*(functools.partial(train, a, 1e-3, epochs=2) for a in gang.agreements))
    assert results[0] == results[1]
    (first, second) = gang.watchers[0].of(Opened)
    assert isinstance(first, Opened)
    assert isinstance(second, Opened)
    assert (first.epoch.drill, second.epoch.drill) == (True, False)


def test_different_steps_at_the_agreed_point_are_named(make: Callable[..., Gang]) -> None:
    gang = make(2)
    tell(gang.agreements[0])

    def run(agreement: Agreement, step: int) -> None:
        while not agreement.arrive():
            pass
        agreement.confirm(step, deadline=Deadline.after(20, time.monotonic))

    results = together(*(functools.partial(run, a, s) for a, s in zip(gang.agreements, (7, 9), strict=True)))
    for result in results:
        assert isinstance(result, AgreementError)
        assert "process 0 is at step 7 and process 1 at step 9" in str(result)


def test_at_the_agreed_point_each_learns_what_the_others_say(make: Callable[..., Gang]) -> None:
    gang = make(2)
    tell(gang.agreements[0])
    together(*(functools.partial(_until_stopped, a) for a in gang.agreements))
    results = together(
        *(
            functools.partial(a.confirm, 7, w, "|".join, deadline=Deadline.after(20, time.monotonic))
            for a, w in zip(gang.agreements, ("a b c", ""), strict=True)
        )
    )
    assert results == ["a b c|"] * 2


def _where_all_stop(gang: Gang, *, asks: Sequence[bool] = (False, False), steps: Sequence[int] = (0, 0)) -> None:
    """Brings processes to the agreed point that are at these steps when the freeze begins."""
    for watcher, asked, step in zip(gang.watchers, asks, steps, strict=True):
        watcher.asks, watcher.step = asked, step
    tell(gang.agreements[0])
    for watcher in gang.watchers:
        watcher.wait_for(Settled)
    together(*(functools.partial(_until_stopped, a) for a in gang.agreements))


def test_processes_at_one_step_that_have_nothing_to_choose_need_not_meet(make: Callable[..., Gang]) -> None:
    gang = make(2)
    _where_all_stop(gang)
    for agreement in gang.agreements:  # one after the other
        assert agreement.confirm(7, "a word", "|".join, deadline=Deadline.after(20, time.monotonic)) is None


@pytest.mark.parametrize(
    ("asks", "steps"),
    [
        pytest.param((False, True), (0, 0), id="one has a snapshot"),
        pytest.param((False, False), (0, 1), id="one is a step ahead at the same sync point"),
    ],
)
def test_processes_meet_if_one_of_them_has_a_reason(
    make: Callable[..., Gang], asks: Sequence[bool], steps: Sequence[int]
) -> None:
    gang = make(2)
    _where_all_stop(gang, asks=asks, steps=steps)
    first = functools.partial(gang.agreements[0].confirm, 7, "a", "|".join)
    second = functools.partial(gang.agreements[1].confirm, 7, "b", "|".join)
    deadline = Deadline.after(20, time.monotonic)
    assert together(*(functools.partial(call, deadline=deadline) for call in (first, second))) == ["a|b", "a|b"]


def test_what_cannot_be_merged_is_an_error_of_all(make: Callable[..., Gang]) -> None:
    gang = make(2)
    _where_all_stop(gang, asks=(True, True))

    def merge(words: list[str]) -> str:
        raise AgreementError(f"they do not fit: {words}")

    deadline = Deadline.after(20, time.monotonic)
    results = together(*(functools.partial(a.confirm, 7, "w", merge, deadline=deadline) for a in gang.agreements))
    assert [(type(result), str(result)) for result in results] == [
        (AgreementError, "they do not fit: ['w', 'w']"),
    ] * 2


@pytest.mark.parametrize(
    ("before_s", "written"),
    [(0.0, [NoticeEntry, Agreed]), (0.05, [NoticeEntry, StartEntry, Agreed])],
    ids=["at once", "once all have heard it"],
)
def test_a_freeze_that_begins_at_once_begins_with_the_notice(
    make: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch, before_s: float, written: list[type[Entry]]
) -> None:
    monkeypatch.setattr(Watcher, "start_in_s", lambda watcher, *_: 0.0 if watcher.of(Noticed) else before_s)
    gang = make(2)
    tell(gang.agreements[0])
    for watcher in gang.watchers:
        watcher.wait_for(Settled)
    assert [type(entry) for entry in entries(gang, object)] == written


def test_only_the_first_processes_look_after_a_late_one() -> None:
    late, looking = threading.Event(), threading.local()
    listed_at: list[list[int]] = [[] for _ in range(4)]  # by process, the looks at which it asked the store

    class Looking(Watcher):
        def __init__(self, index: int) -> None:
            super().__init__()
            self._index = index

        def heard(self, event: Event) -> None:
            if self._index == 3 and isinstance(event, Opened):
                late.wait(20)
            super().heard(event)

        def looked(self) -> None:
            super().looked()
            looking.at = self._index, self.looks

    class Listed(InMemoryStore):
        def list(self, folder: str) -> dict[str, str]:
            if hasattr(looking, "at"):
                index, look = looking.at
                listed_at[index].append(look)
            return super().list(folder)

    store, watchers = Listed(), [Looking(index) for index in range(4)]
    agreements = [Agreement(store, g, w) for g, w in zip(gangs(4, store), watchers, strict=True)]
    try:
        tell(agreements[1])
        for watcher in watchers[:3]:
            watcher.wait_until(lambda watcher=watcher: watcher.looks > 5)  # type: ignore[misc]
        late.set()
        for watcher in watchers:
            watcher.wait_for(Settled)
    finally:
        for agreement in agreements:
            agreement.close()
    assert [[look for look in looks if look <= 5] for looks in listed_at] == [[1, 2, 3, 4, 5], [4], [], []]


def test_what_failed_in_a_drill_fails_no_later_epoch(make: Callable[..., Gang]) -> None:
    gang = make(1)
    (agreement,), (watcher,) = gang.agreements, gang.watchers
    watcher.fails_at = Settled
    tell(agreement, "first", drill=True)
    watcher.wait_for(Broken)
    with pytest.raises(AgreementError, match="the observer is broken"):
        agreement.arrive()
    watcher.fails_at = None
    agreement.end_epoch()
    watcher.wait_for(Closed)
    tell(agreement, "second")
    assert train(agreement, 1e-3)


def test_training_that_ends_in_an_open_epoch_ends_it_in_all_processes(
    make: Callable[..., Gang], caplog: pytest.LogCaptureFixture
) -> None:
    gang = make(2)
    tell(gang.agreements[0])
    for watcher in gang.watchers:
        watcher.wait_for(Opened)
    assert together(*(a.finish for a in gang.agreements)) == [True, True]
    assert caplog.records == []


def test_a_notice_that_stands_when_training_ends_is_moot(make: Callable[..., Gang]) -> None:
    gang = make(2, start_in_s=LATER_S)
    tell(gang.agreements[0])
    assert not gang.agreements[1].finish()
    for watcher in gang.watchers:
        moot = watcher.wait_for(Moot)
        assert isinstance(moot, Moot)
        assert (moot.by, [n.origin for n in moot.notices]) == (1, ["spot"])
    assert not gang.agreements[0].finish()


def test_notice_after_close_is_moot_at_once(make: Callable[..., Gang]) -> None:
    gang = make(2)
    assert not gang.agreements[0].finish()
    gang.agreements[0].close()
    tell(gang.agreements[1])
    moot = gang.watchers[1].wait_for(Moot)
    assert isinstance(moot, Moot)
    assert moot.by == 1  # who is there to say so
    assert not gang.agreements[1].arrive()
    assert not gang.agreements[1].finish()


@pytest.mark.parametrize("pass_on", [Agreement.arrive, Agreement.finish], ids=["next", "last sync point"])
def test_failing_process_fails_the_epoch_at_once_with_its_reason(
    make: Callable[..., Gang], pass_on: Callable[[Agreement], bool]
) -> None:
    gang = make(2)
    gang.agreements[1].abandon("ValueError: loss is NaN")
    tell(gang.agreements[0])
    gang.watchers[0].wait_for(Broken)
    with pytest.raises(AgreementError, match="process 1 broke off: ValueError: loss is NaN"):
        pass_on(gang.agreements[0])


def test_failing_process_releases_others_in_an_open_epoch(make: Callable[..., Gang]) -> None:
    gang = make(3)
    gang.agreements[2].close()  # does not publish
    tell(gang.agreements[0])
    gang.watchers[0].wait_for(Opened)
    gang.agreements[1].abandon("ValueError: loss is NaN")
    with pytest.raises(AgreementError, match="process 1 broke off: ValueError: loss is NaN"):
        gang.agreements[0].arrive()


def test_failing_process_releases_those_at_the_agreed_point(
    make: Callable[..., Gang],
) -> None:
    gang = make(2)
    tell(gang.agreements[0])
    together(*(functools.partial(_until_stopped, a) for a in gang.agreements))
    staying, leaving = gang.agreements
    waits = functools.partial(staying.confirm, 7, deadline=Deadline.after(20, time.monotonic))
    results = together(waits, functools.partial(leaving.abandon, "ValueError: loss is NaN"))
    assert isinstance(results[0], BarrierFailed)
    assert "ValueError: loss is NaN" in str(results[0])


def test_vanished_process_is_named_to_all_at_the_timeout(make: Callable[..., Gang]) -> None:
    gang = make(4, left_s=LATER_S)
    for agreement in gang.agreements[2:]:
        agreement.close()  # their threads end without a word, as a killed process's do
    tell(gang.agreements[0])
    for watcher in gang.watchers[:2]:
        watcher.wait_for(Opened)
    arrivals = f"epoch/{gang.opened()}/frozen/0/0"
    both = (0b0011_0011, 0b0101_0011, 0b0011_0101)
    until(lambda: int(gang.store.try_get(arrivals) or 0) in both, "both to say where they are")
    for watcher in gang.watchers[:2]:
        watcher.until_s = time.monotonic()
    for watcher, agreement in zip(gang.watchers[:2], gang.agreements, strict=False):
        with pytest.raises(AgreementError, match="time was over"):
            agreement.arrive()
        broken = watcher.wait_for(Broken)
        assert isinstance(broken, Broken)
        assert "processes 2, 3 of 4" in broken.reason


def test_an_earlier_deadline_after_the_start_shortens_the_wait(make: Callable[..., Gang]) -> None:
    gang = make(2, left_s=LATER_S)
    gang.agreements[1].close()
    tell(gang.agreements[0])
    gang.watchers[0].wait_for(Opened)
    timer = threading.Timer(0.2, lambda: setattr(gang.watchers[0], "until_s", time.monotonic()))
    timer.start()
    with pytest.raises(AgreementError, match="time was over"):
        gang.agreements[0].arrive()
    timer.join()


def test_a_drill_that_comes_to_nothing_lets_all_train_on(make: Callable[..., Gang]) -> None:
    gang = make(3, left_s=0.7)
    gang.agreements[2].close()
    tell(gang.agreements[0], drill=True)
    for watcher in gang.watchers[:2]:
        watcher.wait_for(Opened)
    assert together(*(a.arrive for a in gang.agreements[:2])) == [False, False]
    for watcher, agreement in zip(gang.watchers[:2], gang.agreements, strict=False):
        broken = watcher.wait_for(Broken)
        assert isinstance(broken, Broken)
        assert broken.epoch.drill
        assert not agreement.in_epoch
        assert not agreement.noticed


def test_the_last_to_publish_may_die_before_it_hands_the_numbers_on() -> None:
    store = _LosingRelease()
    # All that process 0 left behind for the epoch of bell entry 0: it was 4 sync points ahead of the other.
    store.increment("epoch/0/frozen/0/0", 5 << 1)
    _, gang = gangs(2, store)
    watcher = Watcher()
    alive = Agreement(store, gang, watcher)
    try:
        tell(alive)
        watcher.wait_for(Opened)  # it says that it is at sync point 0; training may go on meanwhile, and must be held
        assert together(functools.partial(_until_stopped, alive)) == [5]
    finally:
        alive.close()


class _LosingRelease(InMemoryStore):
    """Here the counter never tells anybody to be the last."""

    def increment(self, key: str, by: int = 1) -> int:
        super().increment(key, by)
        return by


def _until_stopped(agreement: Agreement) -> int:
    while not agreement.arrive():
        time.sleep(1e-3)
    return agreement.seat.ordinal


def test_the_observer_is_asked_to_look_while_an_epoch_is_open(make: Callable[..., Gang]) -> None:
    gang = make(1)
    tell(gang.agreements[0])
    gang.watchers[0].wait_until(lambda: gang.watchers[0].looks >= 2)


def test_a_change_has_the_time_of_the_next_look_computed_again(
    make: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, looked = threading.Semaphore(0), list[Timekeeper]()

    def sleep_s(timekeeper: Timekeeper) -> float:
        computed.release()
        return 60.0

    def look(timekeeper: Timekeeper) -> None:
        looked.append(timekeeper)

    monkeypatch.setattr(Timekeeper, "sleep_s", sleep_s)
    monkeypatch.setattr(Timekeeper, "look", look)
    gang = make(1)
    assert computed.acquire(timeout=30)
    tell(gang.agreements[0])
    assert computed.acquire(timeout=30)
    assert looked == []


def test_an_observer_that_fails_is_an_error_of_the_training_thread(make: Callable[..., Gang]) -> None:
    gang = make(1)
    gang.watchers[0].fails_at = Opened
    tell(gang.agreements[0])
    until(lambda: gang.agreements[0].in_epoch, "the epoch")
    with pytest.raises(AgreementError, match="the observer is broken") as caught:
        gang.agreements[0].arrive()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_closing_ends_the_threads_at_once_and_may_be_repeated(
    make: Callable[..., Gang], caplog: pytest.LogCaptureFixture
) -> None:
    gang = make(3)
    gang.close()
    gang.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("gracepoint-agreement")]
    assert caplog.records == []


def test_whoever_breaks_off_has_no_threads_left_and_says_so_once(make: Callable[..., Gang]) -> None:
    gang = make(1)
    for _ in range(2):
        gang.agreements[0].abandon("ValueError: loss is NaN")
    assert not [t for t in threading.enumerate() if t.name.startswith("gracepoint-agreement")]
    assert len(entries(gang, Gone)) == 1


def test_a_notice_still_reaches_those_that_continue_after_another_has_closed(make: Callable[..., Gang]) -> None:
    gang = make(3, start_in_s=LATER_S)
    gang.agreements[0].close()
    tell(gang.agreements[1])
    gang.watchers[2].wait_for(Noticed)


class _Unreachable(InMemoryStore):
    """Cannot be written to the next few times."""

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0

    def set(self, key: str, value: str) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreUnavailable("told by the test")
        super().set(key, value)


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the agreement has slept, without doing so."""
    made: list[float] = []
    clock = types.SimpleNamespace(sleep=made.append, monotonic=lambda: math.fsum(made))
    monkeypatch.setattr(agreement_module, "time", clock)
    return made


def test_a_notice_that_no_other_process_has_is_passed_on_until_a_store_that_was_away_takes_it(
    slept: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    store, watcher = _Unreachable(), Watcher()
    agreement = Agreement(store, gangs(1, store)[0], watcher)
    try:
        store.failures = 20
        agreement.tell("SIGTERM", "", remaining_s=30)
        noticed = watcher.wait_for(Noticed)
        assert len(slept) == 20
        assert all(0 < pause_s <= 0.7 for pause_s in slept)
        assert isinstance(noticed, Noticed)
        assert noticed.notice.remaining_s == pytest.approx(30 - sum(slept)), "the others learn what is left by then"
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING and "trying again" in r.message]) == 1
    finally:
        agreement.close()


@pytest.mark.parametrize(
    ("remaining_s", "once", "tried_s"),
    [
        pytest.param(30.0, True, 1.0, id="one of which the others are told"),
        pytest.param(30.0, False, 30.0, id="one of which only this process can tell"),
        pytest.param(-5.0, False, 1.0, id="one that comes late"),
        pytest.param(math.inf, False, 600.0, id="one without a deadline"),
    ],
)
def test_a_notice_that_cannot_be_passed_on_in_time_is_an_error(
    slept: list[float], remaining_s: float, once: bool, tried_s: float
) -> None:
    store = _Unreachable()
    agreement = Agreement(store, gangs(1, store)[0], Watcher())
    try:
        store.failures = 1_000_000
        with pytest.raises(StoreUnavailable):
            agreement.tell("notice", "", remaining_s=remaining_s, once=once)
        assert tried_s <= sum(slept) <= tried_s + 0.7
    finally:
        store.failures = 0
        agreement.close()


def test_a_store_that_hangs_at_each_attempt_is_told_no_longer_than_until_the_deadline(slept: list[float]) -> None:
    class Hanging(_Unreachable):
        def set(self, key: str, value: str) -> None:
            slept.append(10.0)
            super().set(key, value)

    store = Hanging()
    agreement = Agreement(store, gangs(1, store)[0], Watcher())
    try:
        store.failures = 1_000_000
        with pytest.raises(StoreUnavailable):
            agreement.tell("SIGTERM", "", remaining_s=30.0)
        assert sum(slept) < 30.0 + 2 * 10.7
    finally:
        store.failures = 0
        agreement.close()


def entries(gang: Gang, kind: type[object]) -> list[Entry]:
    """What was written on the bell."""
    found = sorted(gang.store.list("bell").items(), key=lambda item: int(item[0]))
    return [entry for entry in (from_json(text) for _, text in found) if isinstance(entry, kind)]


@pytest.mark.parametrize(
    ("second", "written"),
    [
        pytest.param(NoticeEntry(1, "spot", 30.0, "about spot", drill=False, once=True), 1, id="the same"),
        pytest.param(NoticeEntry(1, "spot", 30.5, "about spot", drill=False, once=True), 1, id="half a second later"),
        pytest.param(NoticeEntry(1, "spot", 29.5, "about spot", drill=False, once=True), 1, id="half a second earlier"),
        pytest.param(NoticeEntry(1, "spot", 31.0, "about spot", drill=False, once=True), 2, id="a deadline that moved"),
        pytest.param(NoticeEntry(1, "spot", 30.0, "about spot", drill=True, once=True), 2, id="a drill"),
        pytest.param(NoticeEntry(1, "other", 30.0, "about other", drill=False, once=True), 2, id="of another origin"),
    ],
)
def test_a_notice_that_two_processes_get_alike_is_written_once(
    make: Callable[..., Gang], second: NoticeEntry, written: int
) -> None:
    gang = make(2, start_in_s=LATER_S)
    gang.agreements[1].close()  # it reads nothing any more
    tell(gang.agreements[0])
    tell(gang.agreements[1], second.origin, drill=second.drill, remaining_s=second.remaining_s)
    assert len(entries(gang, NoticeEntry)) == written


@pytest.mark.parametrize(("origin", "written"), [("spot", 1), ("other", 2)])
def test_what_two_processes_take_back_is_written_once(make: Callable[..., Gang], origin: str, written: int) -> None:
    gang = make(2, start_in_s=LATER_S)
    gang.agreements[1].close()  # it reads nothing any more
    gang.agreements[0].take_back("spot", "the taint is gone")
    gang.agreements[1].take_back(origin, "the taint is gone")
    assert len(entries(gang, Retract)) == written


def test_a_notice_and_its_end_are_both_written_though_another_wrote_one(make: Callable[..., Gang]) -> None:
    gang = make(2, start_in_s=LATER_S)
    first, second = gang.agreements
    second.close()  # it reads nothing any more
    first.take_back("other", "the taint is gone")
    tell(second)
    second.take_back("spot", "the taint is gone")
    written = [entry for entry in entries(gang, object) if isinstance(entry, NoticeEntry | Retract)]
    assert [type(entry) for entry in written] == [Retract, NoticeEntry, Retract]


def test_its_threads_keep_no_process_from_ending(make: Callable[..., Gang]) -> None:
    make(1)
    found = [thread for thread in threading.enumerate() if thread.name.startswith("gracepoint-agreement")]
    assert [thread.daemon for thread in found] == [True, True]


def test_a_quiet_sync_point_costs_less_than_a_microsecond(make: Callable[..., Gang]) -> None:
    agreement = make(1).agreements[0]
    best_s = min(timeit.repeat(agreement.arrive, number=20_000, repeat=10)) / 20_000
    assert best_s < 1e-6


def test_keys_of_each_epoch_are_removed_once_when_it_is_over(
    make: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    retired: list[str] = []
    real = StoreProcessGroup.retire

    def retire(gang: StoreProcessGroup, folder: str) -> None:
        retired.append(folder)
        real(gang, folder)

    monkeypatch.setattr(StoreProcessGroup, "retire", retire)
    gang = make(1)
    for number, origin in enumerate(("first", "second"), 1):
        tell(gang.agreements[0], origin, drill=True)
        train(gang.agreements[0], 1e-3)
        gang.agreements[0].end_epoch()
        gang.watchers[0].wait_for(Closed, number)
        assert gang.store.list("epoch") == {}
    assert len(retired) == len(set(retired)) == 2


def test_a_process_gives_up_by_itself_if_the_store_cannot_be_read() -> None:
    class Unreadable(InMemoryStore):
        def list(self, folder: str) -> dict[str, str]:
            raise StoreUnavailable("told by the test")

    class Asked(Watcher):
        """Notes how often each thread asks."""

        def __init__(self, left_s: float) -> None:
            super().__init__(left_s)
            self.asked: collections.Counter[str] = collections.Counter()

        def time_left_s(self) -> float:
            self.asked[threading.current_thread().name] += 1
            return super().time_left_s()

        def start_in_s(self, remaining_s: float = math.inf) -> float:
            self.asked[threading.current_thread().name] += 1
            return super().start_in_s(remaining_s)

    store, watcher = Unreadable(), Asked(left_s=0.3)
    watcher.start_at_s = time.monotonic() + 0.5
    agreement = Agreement(store, gangs(2, store)[0], watcher)
    try:
        tell(agreement)
        watcher.wait_for(Opened)
        with pytest.raises(AgreementError, match="held at sync point 1 until the time was over"):
            agreement.arrive()
    finally:
        agreement.close()
    # Each thread sleeps until it has something to do: it asks a few times a second.
    assert {name: count for name, count in watcher.asked.items() if count > 100} == {}


class Kept(Handed):
    """What a process has kept, as far as it says."""

    def __init__(self, lost: str = "", linger_s: float = 0.0) -> None:
        self._lost = lost
        self._linger_s = linger_s
        self.held = threading.Event()

    def hold(self) -> None:
        self.held.set()

    def lost(self, point: int) -> str:
        return self._lost

    def linger_s(self) -> float:
        return self._linger_s


def two_that_keep(make: Callable[..., Gang], *kept: Handed) -> Gang:
    """Two agreements whose freeze begins when the first is told; neither has begun a sync point."""
    gang = make(2)
    together(*(a.close for a in gang.agreements))
    gang.store = InMemoryStore()
    pairs = zip(gangs(2, gang.store), gang.watchers, kept, strict=True)
    gang.agreements = [Agreement(gang.store, g, w, (), k) for g, w, k in pairs]
    return gang


def test_all_save_at_the_sync_point_after_which_one_broke_off(make: Callable[..., Gang]) -> None:
    held = Kept(linger_s=20.0)
    first, second = two_that_keep(make, Kept(), held).agreements
    for agreement in (first, second):
        assert not agreement.arrive()
    tell(first)
    assert held.held.wait(20), "what was handed is held when the notice comes"
    first.stop("RuntimeError: no batch")
    assert (first.point, first.sync_point) == (1, 1)
    assert second.arrive(), "it comes to the next sync point, and is to save what it handed at that one"
    assert (second.point, second.sync_point) == (1, 2)
    assert second.is_beyond
    assert second.stopped == "the training of process 0 broke off after it: RuntimeError: no batch"


def test_process_that_has_not_come_there_continues_to_where_one_broke_off(make: Callable[..., Gang]) -> None:
    first, second = two_that_keep(make, Kept(), Kept(linger_s=20.0)).agreements
    for _ in range(3):
        assert not first.arrive()
    tell(first)
    first.stop("RuntimeError: no batch")
    until(lambda: second.seat.stopped, "the word of it in the other process")
    assert [second.arrive() for _ in range(3)] == [False, False, True]
    assert not second.is_beyond


def test_who_has_lost_that_state_ends_the_wait_of_all(make: Callable[..., Gang]) -> None:
    gang = two_that_keep(make, Kept(), Kept("the state is gone"))
    first, second = gang.agreements
    for agreement in (first, second):
        assert not agreement.arrive()
    tell(first)
    first.stop("RuntimeError: no batch")
    gang.watchers[0].wait_for(Broken)
    with pytest.raises(AgreementError, match="process 1: the state is gone"):
        first.arrive()


def test_who_breaks_off_without_a_notice_learns_that_nobody_saves(make: Callable[..., Gang]) -> None:
    first = make(1, heard_s=0.1).agreements[0]
    assert not first.arrive()
    assert not first.wait_noticed(0.0)
    with pytest.raises(AgreementError, match="did not agree to save where this one broke off"):
        first.stop("RuntimeError: no batch")


@pytest.mark.parametrize("how", ["close", "error"])
def test_who_leaves_before_the_others_is_named_once_they_come_there(
    make: Callable[..., Gang], how: str, caplog: pytest.LogCaptureFixture
) -> None:
    gang = make(2, named_after_s=0.05)
    first, second = gang.agreements
    gang.watchers[1].step = 2
    for _ in range(2):
        second.arrive()
    if how == "close":
        second.finish()
    else:
        second.tell_gone("ValueError: NaN")
    first.arrive()
    time.sleep(0.2)  # it is behind, so nothing is wrong yet
    assert "left the training" not in caplog.text
    first.arrive()
    told = "process 1 left the training after step 2, sync point 2: "
    until(lambda: told in caplog.text, "the other's name")
    assert ("ValueError: NaN" if how == "error" else "close() said that it has ended") in caplog.text


def test_who_leaves_at_the_end_of_the_training_is_not_named(
    make: Callable[..., Gang], caplog: pytest.LogCaptureFixture
) -> None:
    gang = make(2, named_after_s=0.5)
    for agreement in gang.agreements:
        agreement.arrive()
    together(*(a.finish for a in gang.agreements))
    time.sleep(0.7)
    assert "left the training" not in caplog.text
