"""How a process exits: in its turn, in time, and with the right code."""

from __future__ import annotations

import functools
import io
import logging
import math
import threading
import time
from collections.abc import Iterator

import pytest

from gracepoint.multihost import InMemoryStore
from gracepoint.preemption.exit import ProcessExit
from tests.unit.multihost.fakes.gangs import together


class End:
    """Notes how a process would have ended."""

    def __init__(self) -> None:
        self.codes: list[tuple[int, float]] = []
        self.ended = threading.Event()

    def __call__(self, code: int) -> None:
        self.codes.append((code, time.monotonic()))
        self.ended.set()


@pytest.fixture(autouse=True)
def _keep_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("logging.shutdown", lambda: None)
    yield
    for thread in threading.enumerate():  # one that comes late must not shut the tests' own logging down
        if thread.name == "gracepoint-last-words":
            thread.join(60)
            assert not thread.is_alive()


_started: list[ProcessExit] = []


@pytest.fixture(autouse=True)
def _watch_no_longer() -> Iterator[None]:
    yield
    while _started:
        _started.pop().stop()


def leaving(store: InMemoryStore, service_id: int, count: int, end: End) -> ProcessExit:
    member = ProcessExit(store, service_id, count, clock=time.monotonic, end=end)
    member.start()
    _started.append(member)
    return member


def test_the_host_of_the_coordination_service_leaves_last() -> None:
    store, ends = InMemoryStore(), [End() for _ in range(3)]
    members = [leaving(store, i, 3, end) for i, end in enumerate(ends)]

    def leave(member: ProcessExit, after_s: float) -> None:
        member.decide(77)
        time.sleep(after_s)
        member.leave()

    together(*(functools.partial(leave, m, s) for m, s in zip(members, (0.0, 0.1, 0.2), strict=True)))
    assert [e.codes[0][0] for e in ends] == [77, 77, 77]
    assert ends[0].codes[0][1] > max(e.codes[0][1] for e in ends[1:])


def test_nobody_leaves_before_the_end_is_decided() -> None:
    end = End()
    leaving(InMemoryStore(), 1, 2, end).leave()
    assert end.codes == []


def test_the_watchdog_ends_a_process_at_its_deadline_after_saying_so() -> None:
    end, said = End(), threading.Event()
    until_s = time.monotonic() + 0.1
    leaving(InMemoryStore(), 0, 1, end).watch(lambda: until_s - time.monotonic(), 78, on_overdue=said.set)
    assert end.ended.wait(60)
    assert said.is_set()
    assert end.codes[0][0] == 78


def test_watchdog_ends_a_process_stuck_with_the_log_lock() -> None:
    end, handler = End(), logging.StreamHandler(io.StringIO())
    log = logging.getLogger("gracepoint.preemption.exit")
    log.addHandler(handler)
    assert handler.lock is not None
    handler.lock.acquire()
    try:
        leaving(InMemoryStore(), 1, 2, end).watch(lambda: 0.0, 78, on_overdue=lambda: log.error("overdue"))
        assert end.ended.wait(60)
    finally:
        handler.lock.release()
        log.removeHandler(handler)
    assert end.codes[0][0] == 78


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_watchdog_ends_a_process_though_its_last_word_fails() -> None:
    end = End()

    def fail() -> None:
        raise OSError("no word gets out")

    leaving(InMemoryStore(), 1, 2, end).watch(lambda: 0.0, 78, on_overdue=fail)
    assert end.ended.wait(60)
    assert end.codes[0][0] == 78


def test_watchdog_exit_code_is_what_its_last_callback_decides() -> None:
    end = End()
    member = leaving(InMemoryStore(), 1, 2, end)
    member.watch(lambda: 0.0, 78, on_overdue=lambda: member.decide(77))
    assert end.ended.wait(60)
    assert end.codes[0][0] == 77


def test_the_watchdog_keeps_to_what_was_decided() -> None:
    end, said = End(), threading.Event()
    member = leaving(InMemoryStore(), 1, 2, end)
    member.decide(77)
    member.watch(lambda: 0.0, 78, on_overdue=said.set)
    assert end.ended.wait(60)
    assert end.codes[0][0] == 77
    assert not said.is_set()


def test_a_process_that_fails_by_itself_is_not_held_up_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gracepoint.preemption.exit.FAILED_S", 0.1)
    end = End()
    leaving(InMemoryStore(), 1, 2, end).hurry(1)
    assert end.ended.wait(60)
    assert end.codes[0][0] == 1


def test_a_stopped_watchdog_watches_no_more() -> None:
    end = End()
    member = leaving(InMemoryStore(), 1, 2, end)
    member.stop()
    assert "gracepoint-watchdog" not in [t.name for t in threading.enumerate()]
    member.watch(lambda: 0.0, 78, on_overdue=lambda: None)
    member.stop()
    assert end.codes == []


def test_the_bound_of_a_notice_ends_a_process_for_which_no_epoch_opens() -> None:
    end, said = End(), threading.Event()
    leaving(InMemoryStore(), 1, 2, end).bound(lambda: 0.0, 78, on_overdue=said.set)
    assert end.ended.wait(60)
    assert said.is_set()
    assert end.codes[0][0] == 78


def test_the_bound_of_a_notice_counts_no_more_once_an_epoch_is_open() -> None:
    end, late = End(), threading.Event()
    member = leaving(InMemoryStore(), 1, 2, end)
    member.watch(lambda: 0.0 if late.is_set() else 60.0, 78, on_overdue=lambda: None)
    member.bound(lambda: 0.0, 1, on_overdue=lambda: None)
    assert not end.ended.wait(1.0)
    late.set()
    assert end.ended.wait(60)
    assert end.codes[0][0] == 78


def test_a_bound_that_went_away_ends_nobody_and_is_no_watch() -> None:
    end = End()
    member = leaving(InMemoryStore(), 1, 2, end)
    member.bound(lambda: math.inf, 78, on_overdue=lambda: None)
    assert not member.watches
    over = threading.Event()
    member.bound(lambda: 0.0 if over.is_set() else 60.0, 78, on_overdue=lambda: None)
    member.cancel()
    over.set()
    assert not end.ended.wait(1.0)


def test_a_cancelled_watchdog_ends_nobody() -> None:
    end = End()
    member = leaving(InMemoryStore(), 1, 2, end)
    until_s = time.monotonic() + 0.2
    member.watch(lambda: until_s - time.monotonic(), 78, on_overdue=lambda: None)
    member.cancel()
    assert not end.ended.wait(0.5)
