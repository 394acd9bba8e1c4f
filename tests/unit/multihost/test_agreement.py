"""The agreement with its real threads, processes played by threads on one in-memory store."""

from __future__ import annotations

import functools
import threading
import time
import timeit
from collections.abc import Callable, Iterator

import pytest

from gracepoint.errors import AgreementError, BarrierTimeout
from gracepoint.multihost import Agreement, InMemoryStore, KeyValueStore
from tests.unit.multihost.gangs import gangs, together


class Watcher:
    """An observer that notes what it is told; the time left is the test's to set."""

    def __init__(self, left_s: float = 30.0) -> None:
        self.opened: list[tuple[int, int, str]] = []
        self.settled: list[tuple[int, int]] = []
        self.until_s = time.monotonic() + left_s
        self.changed = threading.Condition()

    def epoch_opened(self, epoch: int, by: int, notice: str) -> None:
        with self.changed:
            self.opened.append((epoch, by, notice))
            self.changed.notify_all()

    def epoch_settled(self, epoch: int, agreed: int) -> None:
        with self.changed:
            self.settled.append((epoch, agreed))
            self.changed.notify_all()

    def epoch_failed(self, epoch: int, error: Exception) -> None:
        pass

    def time_left_s(self) -> float:
        return self.until_s - time.monotonic()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 20)


class Gang:
    """``count`` agreements on one store."""

    def __init__(self, count: int, left_s: float = 30.0) -> None:
        self.store: KeyValueStore = InMemoryStore()
        self.watchers = [Watcher(left_s) for _ in range(count)]
        self.agreements = [
            Agreement(self.store, g, w) for g, w in zip(gangs(count, self.store), self.watchers, strict=True)
        ]

    def close(self) -> None:
        together(*(a.close for a in self.agreements))


@pytest.fixture
def make() -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def make_gang(count: int, left_s: float = 30.0) -> Gang:
        made.append(Gang(count, left_s))
        return made[-1]

    yield make_gang
    for gang in made:
        gang.close()


def train(agreement: Agreement, pace_s: float, epochs: int = 1, steps: int = 10_000) -> list[int]:
    """Passes sync points until the last epoch's agreed one; returns the ordinals at which it stopped."""
    stopped: list[int] = []
    for _ in range(steps):
        if agreement.arrive():
            stopped.append(agreement.seat.ordinal)
            agreement.confirm(agreement.seat.ordinal * 10, timeout_s=20)
            if len(stopped) == epochs:
                return stopped
            agreement.end_epoch()
        time.sleep(pace_s)
    raise AssertionError("never stopped")


def test_a_notice_to_one_process_stops_all_at_the_same_sync_point(make: Callable[..., Gang]) -> None:
    gang = make(3)
    timer = threading.Timer(0.05, gang.agreements[2].call, ("spot",))
    timer.start()
    results = together(
        *(functools.partial(train, a, pace) for a, pace in zip(gang.agreements, (1e-4, 1e-3, 1e-2), strict=True))
    )
    timer.join()
    assert isinstance(results[0], list)
    assert results == [results[0]] * 3
    assert [w.opened for w in gang.watchers] == [[(0, 2, "spot")]] * 3
    assert [w.settled for w in gang.watchers] == [[(0, results[0][0])]] * 3


def test_notices_to_several_processes_at_once_are_one_epoch(make: Callable[..., Gang]) -> None:
    gang = make(3)
    results = together(
        *(functools.partial(a.call, f"notice {i}") for i, a in enumerate(gang.agreements)),
        *(functools.partial(train, a, 1e-3) for a in gang.agreements),
    )
    assert len({tuple(r) for r in results[3:] if isinstance(r, list)}) == 1
    assert len({w.opened[0] for w in gang.watchers}) == 1
    assert [len(w.opened) for w in gang.watchers] == [1, 1, 1]


def test_it_can_fire_again_after_an_epoch_has_ended(make: Callable[..., Gang]) -> None:
    gang = make(2)

    def notices() -> None:
        gang.agreements[0].call("first")
        gang.watchers[1].wait_until(lambda: bool(gang.watchers[1].settled))
        while gang.agreements[1].seat.epoch is not None:
            time.sleep(1e-3)
        gang.agreements[1].call("second")

    results = together(notices, *(functools.partial(train, a, 1e-3, epochs=2) for a in gang.agreements))
    assert isinstance(results[1], list)
    assert results[1] == results[2]
    assert len(results[1]) == 2
    assert [e for e, _, _ in gang.watchers[0].opened] == [0, 1]


def test_different_steps_at_the_agreed_point_are_named(make: Callable[..., Gang]) -> None:
    gang = make(2)
    gang.agreements[0].call("spot")

    def run(agreement: Agreement, step: int) -> None:
        while not agreement.arrive():
            pass
        agreement.confirm(step, timeout_s=20)

    results = together(*(functools.partial(run, a, s) for a, s in zip(gang.agreements, (7, 9), strict=True)))
    for result in results:
        assert isinstance(result, AgreementError)
        assert "process 0 is at step 7 and process 1 at step 9" in str(result)


def test_a_process_that_finished_does_not_hold_up_the_others(make: Callable[..., Gang]) -> None:
    gang = make(2)
    done, late = gang.agreements
    for agreement in gang.agreements:
        assert not agreement.arrive()
    assert not done.finish()
    done.close()
    late.call("spot")
    gang.watchers[1].wait_until(lambda: bool(gang.watchers[1].settled))
    assert [agreed for _, agreed in gang.watchers[1].settled] == [3]  # beyond its end, sync point 2
    assert late.finish()


def test_a_process_that_breaks_off_fails_the_epoch_at_once_with_its_reason(
    make: Callable[..., Gang],
) -> None:
    gang = make(2)
    gang.agreements[1].abandon("ValueError: loss is NaN")
    gang.agreements[0].call("spot")
    gang.watchers[0].wait_until(lambda: bool(gang.watchers[0].opened))
    started = time.monotonic()
    with pytest.raises(AgreementError, match="process 1 broke off: ValueError: loss is NaN"):
        gang.agreements[0].arrive()
    assert time.monotonic() - started < 5


def test_a_process_that_vanished_is_named_when_the_time_is_over(make: Callable[..., Gang]) -> None:
    gang = make(3, left_s=1.2)
    for agreement in gang.agreements[1:]:
        agreement.close()  # their threads end without a word, as a killed process's do
    gang.agreements[0].call("spot")
    gang.watchers[0].wait_until(lambda: bool(gang.watchers[0].opened))
    with pytest.raises(AgreementError) as caught:
        gang.agreements[0].arrive()
    # Held at the sync point, or told by the background thread, whichever saw the end of the time first.
    cause = caught.value.__cause__
    if isinstance(cause, BarrierTimeout):
        assert "processes 1, 2 of 3" in str(cause)
    else:
        assert "not every process said where it is" in str(caught.value)


def test_the_last_to_publish_may_die_before_it_hands_the_numbers_on() -> None:
    store = InMemoryStore()
    # All that process 0 left behind: its ordinal, and the count.
    store.set("epoch/0/frozen/0", "4")
    store.increment("epoch/0/count")
    _, gang = gangs(2, store)
    alive = Agreement(_LosingRelease(store), gang, Watcher())
    try:
        alive.call("spot")
        assert together(functools.partial(_until_stopped, alive)) == [5]
    finally:
        alive.close()


class _LosingRelease(InMemoryStore):
    """The store of the test before; here the count never tells anybody to be the last."""

    def __init__(self, store: InMemoryStore) -> None:
        super().__init__()
        self._values = store._values

    def increment(self, key: str) -> int:
        return super().increment(key) - 1


def _until_stopped(agreement: Agreement) -> int:
    while not agreement.arrive():
        time.sleep(1e-3)
    return agreement.seat.ordinal


def test_closing_ends_the_thread_at_once_and_may_be_repeated(make: Callable[..., Gang]) -> None:
    gang = make(3)
    started = time.monotonic()
    gang.close()
    gang.close()
    assert time.monotonic() - started < 2
    assert not [t for t in threading.enumerate() if t.name == "gracepoint-agreement"]


def test_a_notice_still_reaches_those_that_go_on_after_another_has_closed(make: Callable[..., Gang]) -> None:
    gang = make(3)
    gang.agreements[0].finish()
    gang.agreements[0].close()
    gang.agreements[1].call("spot")
    gang.watchers[2].wait_until(lambda: bool(gang.watchers[2].settled))
    assert gang.watchers[2].opened[0][2] == "spot"


def test_a_quiet_sync_point_costs_less_than_a_microsecond(make: Callable[..., Gang]) -> None:
    agreement = make(1).agreements[0]
    best_s = min(timeit.repeat(agreement.arrive, number=20_000, repeat=10)) / 20_000
    assert best_s < 1e-6
