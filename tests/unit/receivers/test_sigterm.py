"""SIGTERM becomes a notice; handlers and wakeup fds of others keep working and come back."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from gracepoint.receivers import Disruption, Mailbox, SigtermReceiver


class Post:
    """A mailbox with an ear."""

    def __init__(self) -> None:
        self.posts: list[tuple[Disruption, float]] = []
        self.came = threading.Event()
        self.signalled = threading.Event()
        self.mailbox = Mailbox(time.monotonic)
        self.mailbox.listen(self._heard)
        self.receiver = SigtermReceiver(self.mailbox, 25.0, self.signalled.set)

    def _heard(self, disruption: Disruption) -> None:
        self.posts.append((disruption, time.monotonic()))
        self.came.set()


@pytest.fixture
def post() -> Iterator[Post]:
    before = signal.getsignal(signal.SIGTERM)
    post = Post()
    yield post
    post.receiver.close()
    signal.signal(signal.SIGTERM, before)


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_sigterm_is_posted_with_the_grace_period(post: Post) -> None:
    assert post.receiver.install()
    sigterm()
    assert post.came.wait(10)
    ((disruption, _),) = post.posts
    assert (disruption.preemption, disruption.cause, disruption.remaining_s) == ("", "SIGTERM", 25.0)
    assert post.signalled.wait(10)


def test_it_is_posted_while_the_main_thread_is_busy_in_c(post: Post) -> None:
    post.receiver.install()
    timer = threading.Timer(0.1, sigterm)
    timer.start()
    began = time.monotonic()
    # One long call that, like JAX, lets other threads run: no Python handler can before it returns.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)
    ended = time.monotonic()
    timer.join()
    assert post.came.wait(10)
    assert ended - began > 0.2, "the call was too short to prove anything"
    assert post.posts[0][1] < ended


def test_a_second_sigterm_does_not_move_the_deadline(post: Post) -> None:
    post.receiver.install()
    sigterm()
    assert post.came.wait(10)
    sigterm()
    post.receiver.close()  # joins the reader: both are read by now
    assert len(post.posts) == 1


def test_a_python_handler_that_was_there_before_is_called_too_and_comes_back(post: Post) -> None:
    called: list[int] = []

    def before(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(signal.SIGTERM, before)
    post.receiver.install()
    sigterm()
    assert post.came.wait(10)
    assert called == [signal.SIGTERM]
    post.receiver.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_that_somebody_installs_later_is_left_alone(post: Post) -> None:
    post.receiver.install()
    later = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, later)
    sigterm()
    assert post.came.wait(10), "the wakeup fd works under any Python handler"
    post.receiver.close()
    assert signal.getsignal(signal.SIGTERM) is later


def test_a_wakeup_fd_that_was_there_before_gets_every_signal_and_comes_back(post: Post) -> None:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        ours.setblocking(False)
        theirs.settimeout(10)
        signal.set_wakeup_fd(ours.fileno())
        try:
            post.receiver.install()
            sigterm()
            assert post.came.wait(10)
            assert set(theirs.recv(16)) == {signal.SIGTERM}
            post.receiver.close()
            found = signal.set_wakeup_fd(-1)
            assert found == ours.fileno()
        finally:
            signal.set_wakeup_fd(-1)


def test_a_wakeup_fd_that_somebody_sets_later_does_not_silence_ours(post: Post) -> None:
    theirs, other = socket.socketpair()
    with theirs, other:
        post.receiver.install()
        other.setblocking(False)
        signal.set_wakeup_fd(other.fileno())
        try:
            sigterm()
            assert post.came.wait(10)
            post.receiver.close()
            assert signal.set_wakeup_fd(-1) == other.fileno(), "and it stays where it is"
        finally:
            signal.set_wakeup_fd(-1)


def test_outside_of_the_main_thread_it_says_so_and_installs_nothing(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    installed: list[bool] = []
    thread = threading.Thread(target=lambda: installed.append(post.receiver.install()), name="trainer")
    thread.start()
    thread.join(10)
    assert installed == [False]
    assert signal.getsignal(signal.SIGTERM) is before
    assert "SIGTERM is not watched" in caplog.text
    assert "trainer" in caplog.text


def test_closing_twice_or_uninstalled_does_nothing(post: Post) -> None:
    post.receiver.close()
    post.receiver.install()
    post.receiver.close()
    post.receiver.close()
    assert not [t for t in threading.enumerate() if t.name == "gracepoint-sigterm"]


def test_a_forked_child_that_is_terminated_is_no_notice_to_its_parent() -> None:
    # In a process of its own: forking the test runner, with its threads, is asking for trouble.
    code = """
import os, signal, time
from gracepoint.receivers import Mailbox, SigtermReceiver
mailbox = Mailbox(time.monotonic)
receiver = SigtermReceiver(mailbox, 1.0, lambda: None)
receiver.install()
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM, status
receiver.close()
assert mailbox.current is None, mailbox.current
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
