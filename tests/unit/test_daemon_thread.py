"""Threads that say by themselves when they have ended."""

from __future__ import annotations

import functools
import itertools
import threading

import pytest

from gracepoint import daemon_thread
from gracepoint.checkpoint import background_thread
from gracepoint.checkpoint.background_thread import BackgroundThread
from gracepoint.daemon_thread import DaemonThread
from gracepoint.errors import SaveFailed
from tests.forked import forked
from tests.interrupts import interrupt, interrupt_at
from tests.waiting import until

_TIMEOUT_S = 30.0
_NAME = "gracepoint: a save"


class Work:
    """A function that waits until it may go on."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.done.append("begun")
        self.begun.set()
        self.may_go_on.wait(_TIMEOUT_S)
        self.done.append("ended")


def until_no_thread_is_left() -> None:
    until(lambda: all(thread.name != _NAME for thread in threading.enumerate()), f"the end of {_NAME}")


@pytest.mark.parametrize("after_s", [0.01, 0.02, 0.05])
def test_a_thread_whose_wait_was_interrupted_still_runs(after_s: float) -> None:
    work, thread = Work(), BackgroundThread()
    thread.start("a save", work)
    for _ in range(3):
        assert interrupt(lambda: thread.wait(_TIMEOUT_S), after_s)
        assert thread.busy
    work.may_go_on.set()
    thread.wait(_TIMEOUT_S)
    assert not thread.busy
    assert work.done == ["begun", "ended"]


def test_wherever_a_start_is_interrupted_the_thread_runs_to_its_end_or_never() -> None:
    for number in itertools.count():
        work, thread = Work(), BackgroundThread()
        start = functools.partial(thread.start, "a save", work)
        if not interrupt_at(start, number, [daemon_thread, background_thread]):
            break
        busy = thread.busy
        work.may_go_on.set()
        if busy:
            thread.wait(_TIMEOUT_S)
        until_no_thread_is_left()
        assert work.done == (["begun", "ended"] if busy else []), f"bytecode {number}"
        assert not thread.busy
    assert number > 50
    work.may_go_on.set()
    thread.wait(_TIMEOUT_S)


def test_wherever_a_wait_is_interrupted_the_thread_is_busy_until_it_has_ended() -> None:
    for number in itertools.count():
        work, thread = Work(), BackgroundThread()
        thread.start("a save", work)
        assert work.begun.wait(_TIMEOUT_S)
        try:
            wait = functools.partial(thread.wait, 0.0)
            reached = interrupt_at(wait, number, [daemon_thread, background_thread])
        except SaveFailed:
            reached = False
        assert thread.busy, f"bytecode {number}"
        work.may_go_on.set()
        thread.wait(_TIMEOUT_S)
        assert work.done == ["begun", "ended"]
        if not reached:
            break
    assert number > 20


def test_a_thread_that_the_system_refuses_never_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    thread = DaemonThread(lambda: None, _NAME)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.start()
    seen: list[bool] = []
    monkeypatch.undo()
    asking = threading.Thread(target=lambda: seen.append(thread.ended))
    asking.start()
    asking.join(_TIMEOUT_S)
    assert seen == [True]
    assert thread.wait(0.0)


def test_an_error_of_the_function_ends_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def fail() -> None:
        raise ValueError("no")

    thread = DaemonThread(fail, _NAME)
    thread.start()
    assert thread.wait(_TIMEOUT_S)
    assert thread.ended


@pytest.mark.integration
def test_a_forked_child_has_no_thread_to_wait_for() -> None:
    work = Work()
    thread = DaemonThread(work, _NAME)
    thread.start()
    assert work.begun.wait(_TIMEOUT_S)
    assert forked(lambda: (thread.ended, thread.wait())) == "(True, True)"
    assert not thread.ended
    work.may_go_on.set()
    assert thread.wait(_TIMEOUT_S)
