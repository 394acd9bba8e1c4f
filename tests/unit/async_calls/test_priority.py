"""The worker's niceness follows what the trainer says, and no save waits while the kernel refuses to change it."""

from __future__ import annotations

import errno
import threading
import time

import pytest

from gracepoint.async_calls import worker
from tests.waiting import until


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
    monkeypatch.setattr(worker, "_AUTOGROUP", session)
    monkeypatch.setattr(worker, "_nice", 10)
    return session


def nobody_tries() -> bool:
    return all(thread.name != "gracepoint: niceness" for thread in threading.enumerate())


def test_a_worker_that_must_hurry_does_not_wait_for_the_kernel(session: Session) -> None:
    worker.hurry()
    assert session.tried_by == [threading.current_thread()]
    session.allowed.set()
    until(lambda: session.nice == 0, "the niceness to be 0")
    assert session.tried_by.count(threading.current_thread()) == 1
    until(nobody_tries, "the thread to end")


def test_what_was_said_last_counts(session: Session) -> None:
    worker.hurry()
    worker.relax()
    session.allowed.set()
    until(nobody_tries, "the thread to end")
    assert session.nice == 10
    worker.hurry()
    assert session.nice == 0


class Polite:
    """A lock. Whoever releases it lets others have it first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        time.sleep(0.05)


def test_a_niceness_that_is_wanted_while_the_thread_ends_is_set(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a save became urgent at the worst moment: when the kernel has just taken the change before."""
    real, wanted = worker._has_wanted_niceness, threading.Event()

    def hurry() -> None:
        wanted.set()
        worker.hurry()

    def then_hurry() -> bool:
        found = real()
        if found and threading.current_thread() is not threading.main_thread() and not wanted.is_set():
            threading.Thread(target=hurry).start()
            assert wanted.wait(60)
        return found

    monkeypatch.setattr(worker, "_has_wanted_niceness", then_hurry)
    monkeypatch.setattr(worker, "_lock", Polite())
    session.nice = 0
    worker.relax()
    session.allowed.set()
    until(lambda: wanted.is_set() and nobody_tries(), "the thread to end")
    until(lambda: session.nice == 0, "the niceness to be 0")


def test_a_kernel_without_sessions_is_asked_once(monkeypatch: pytest.MonkeyPatch, session: Session) -> None:
    def missing() -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(session, "read_text", missing)
    worker.hurry()
    assert session.tried_by == []
    assert nobody_tries()
