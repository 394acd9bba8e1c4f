"""The worker's niceness follows what the trainer says, and no save waits while the kernel refuses to change it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from gracepoint.async_calls.worker import SessionNiceness
from tests.waiting import until


class Session:
    """The kernel's file. It refuses changes until ``allowed`` is set, as while other processes change theirs."""

    def __init__(self) -> None:
        self.nice = 10
        self.allowed = threading.Event()
        self.tried_by: list[threading.Thread] = []
        self.after_first: Callable[[], None] | None = None

    def read_text(self) -> str:
        return f"/autogroup-7 nice {self.nice}\n"

    def write_text(self, text: str) -> None:
        self.tried_by.append(threading.current_thread())
        if not self.allowed.is_set():
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self.nice = int(text)
        if self.after_first is not None:
            after, self.after_first = self.after_first, None
            after()


@pytest.fixture
def session() -> Session:
    return Session()


@pytest.fixture
def niceness(session: Session) -> SessionNiceness:
    return SessionNiceness(cast(Path, session))


def nobody_tries() -> bool:
    return all(thread.name != "gracepoint: niceness" for thread in threading.enumerate())


def test_a_worker_that_must_hurry_does_not_wait_for_the_kernel(session: Session, niceness: SessionNiceness) -> None:
    niceness.set(0)
    assert session.tried_by == [threading.current_thread()]
    session.allowed.set()
    until(lambda: session.nice == 0, "the niceness to be 0")
    assert session.tried_by.count(threading.current_thread()) == 1
    until(nobody_tries, "the thread to end")


def test_what_was_said_last_counts(session: Session, niceness: SessionNiceness) -> None:
    niceness.set(0)
    niceness.set(10)
    session.allowed.set()
    until(nobody_tries, "the thread to end")
    assert session.nice == 10
    niceness.set(0)
    assert session.nice == 0


def test_a_niceness_that_is_wanted_while_the_thread_ends_is_set(session: Session, niceness: SessionNiceness) -> None:
    """As if a save became urgent at the worst moment: when the kernel has just taken the change before."""
    wanted = threading.Event()

    def hurry() -> None:
        wanted.set()
        niceness.set(0)

    def then_hurry() -> None:
        threading.Thread(target=hurry).start()
        assert wanted.wait(60)

    session.nice, session.after_first = 0, then_hurry
    niceness.set(10)
    session.allowed.set()
    until(lambda: wanted.is_set() and nobody_tries(), "the thread to end")
    until(lambda: session.nice == 0, "the niceness to be 0")


def test_a_kernel_without_sessions_is_asked_once(tmp_path: Path) -> None:
    SessionNiceness(tmp_path / "absent").set(0)
    assert not (tmp_path / "absent").exists()
    assert nobody_tries()
