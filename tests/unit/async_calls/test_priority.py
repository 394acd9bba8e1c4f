"""The worker's niceness follows what the trainer says, and no save waits while the kernel refuses to change it."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable

import pytest

from gracepoint.async_calls import priority


class Session:
    """The kernel's file. It refuses changes until ``allowed`` is set, as while other processes change theirs."""

    def __init__(self) -> None:
        self.nice = 10
        self.allowed = threading.Event()
        self.tried_by: list[threading.Thread] = []

    def read_text(self) -> str:
        return f"/autogroup-7 nice {self.nice}\n"

    def write_text(self, text: str) -> None:
        self.tried_by.append(threading.current_thread())
        if not self.allowed.is_set():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self.nice = int(text)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    session = Session()
    monkeypatch.setattr(priority, "_AUTOGROUP", session)
    monkeypatch.setattr(priority, "_nice", 10)
    return session


def until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.005)


def nobody_tries() -> bool:
    return all(thread.name != "gracepoint: niceness" for thread in threading.enumerate())


def test_a_worker_that_must_hurry_does_not_wait_for_the_kernel(session: Session) -> None:
    priority.hurry()
    assert session.tried_by == [threading.current_thread()]
    session.allowed.set()
    until(lambda: session.nice == 0, "the niceness to be 0")
    assert session.tried_by.count(threading.current_thread()) == 1
    until(nobody_tries, "the thread to end")


def test_what_was_said_last_counts(session: Session) -> None:
    priority.hurry()
    priority.relax()
    session.allowed.set()
    until(nobody_tries, "the thread to end")
    assert session.nice == 10
    priority.hurry()
    assert session.nice == 0


def test_a_kernel_without_sessions_is_asked_once(monkeypatch: pytest.MonkeyPatch, session: Session) -> None:
    def missing() -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(session, "read_text", missing)
    priority.hurry()
    assert session.tried_by == []
    assert nobody_tries()
