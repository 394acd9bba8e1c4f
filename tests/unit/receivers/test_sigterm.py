"""SIGTERM becomes a notice; handlers of others are called afterwards, and their wakeup fds keep working."""

from __future__ import annotations

import asyncio
import faulthandler
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gracepoint.receivers import SigtermReceiver
from tests.unit.receivers.fakes.heard import Heard
from tests.waiting import until


class Post:
    """A receiver and what came of it."""

    def __init__(self, look_every_s: float = 5.0) -> None:
        self.heard = Heard()
        self.signalled = threading.Event()
        self.receiver = SigtermReceiver(self.heard, 25.0, self.signalled.set, look_every_s=look_every_s)


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
    post.heard.wait_for_posts()
    (disruption,) = post.heard.posts
    assert (disruption.preemption, disruption.cause, disruption.remaining_s) == ("", "SIGTERM", 25.0)
    assert post.signalled.wait(60)


def test_it_is_posted_while_the_main_thread_is_busy_in_c(post: Post) -> None:
    post.receiver.install()
    timer = threading.Timer(0.1, sigterm)
    timer.start()
    began = time.monotonic()
    # One long call that, like JAX, lets other threads run: no Python handler can before it returns.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 1_500_000)
    ended = time.monotonic()
    timer.join()
    post.heard.wait_for_posts()
    assert ended - began > 0.2, "the call was too short to prove anything"
    assert post.heard.posted_at_s[0] < ended


def test_a_second_sigterm_does_not_move_the_deadline(post: Post) -> None:
    post.receiver.install()
    sigterm()
    post.heard.wait_for_posts()
    sigterm()
    post.receiver.close()  # joins the reader: both are read by now
    assert len(post.heard.posts) == 1


def test_previous_python_handler_is_called_after_the_end_and_restored(post: Post) -> None:
    called: list[int] = []

    def before(number: int, frame: object) -> None:
        called.append(number)

    signal.signal(signal.SIGTERM, before)
    post.receiver.install()
    sigterm()
    sigterm()
    post.heard.wait_for_posts()
    assert called == [], "ours decides first"
    post.receiver.close()
    assert called == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def _raises_an_error(*_: object) -> None:
    raise RuntimeError("terminated")


def _exits_hard(*_: object) -> None:
    os._exit(0)


@pytest.mark.parametrize(
    ("before", "told"),
    [
        (lambda *_: sys.exit(0), "raised SystemExit(0)"),
        (signal.default_int_handler, "raised KeyboardInterrupt()"),
        (_raises_an_error, "_raises_an_error, called after the session's end, raised RuntimeError('terminated')"),
        (_exits_hard, "_exits_hard, called after the session's end, raised SystemExit(0)"),
    ],
)
@pytest.mark.parametrize("later", [False, True])
def test_a_handler_of_others_that_ends_the_process_does_not(
    post: Post, before: Callable[..., object], told: str, later: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if not later:
        signal.signal(signal.SIGTERM, before)
    post.receiver.install()
    if later:
        signal.signal(signal.SIGTERM, before)
        post.receiver.look()
    sigterm()
    post.heard.wait_for_posts()
    post.receiver.close()
    assert told in caplog.text
    assert signal.getsignal(signal.SIGTERM) is before
    assert os._exit.__name__ == "_exit"


def test_a_watchdog_of_others_may_end_the_process_while_their_handler_hangs(
    post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)

    def hangs_until_the_watchdog_acts(*_: object) -> None:
        watchdog = threading.Thread(target=lambda: os._exit(5))
        watchdog.start()
        watchdog.join(10.0)

    signal.signal(signal.SIGTERM, hangs_until_the_watchdog_acts)
    post.receiver.install()
    sigterm()
    post.heard.wait_for_posts()
    post.receiver.close()
    assert codes == [5]


def _faulthandler() -> None:
    faulthandler.register(signal.SIGTERM, chain=False)


@pytest.mark.parametrize(
    ("taking", "told"),
    [
        (
            lambda: signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)),
            "by tests.unit.receivers.test_sigterm.<lambda>",
        ),
        (lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL), "by SIG_DFL"),
        (lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN), "by SIG_IGN"),
        (_faulthandler, "by one in C, of "),
    ],
)
def test_who_takes_the_signal_away_later_is_named_and_comes_second(
    post: Post, taking: Callable[[], object], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    post.receiver.install()
    taking()
    try:
        post.receiver.look()
        assert f"SIGTERM's handler was replaced after attach() {told}" in caplog.text
        sigterm()
        post.heard.wait_for_posts()
    finally:
        faulthandler.unregister(signal.SIGTERM)


def test_a_handler_in_c_from_before_is_named(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    faulthandler.register(signal.SIGTERM, chain=False)
    try:
        post.receiver.install()
        assert "SIGTERM's handler in C is replaced, and will not be called library=/" in caplog.text
        sigterm()
        post.heard.wait_for_posts()
    finally:
        faulthandler.unregister(signal.SIGTERM)


def test_a_signal_that_is_blocked_in_all_other_threads_is_noticed(post: Post, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        post.receiver.install()
        assert "SIGTERM is blocked in the main thread" in caplog.text
        sigterm()
        post.heard.wait_for_posts()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize(("before", "noticed"), [(signal.SIG_DFL, True), (signal.SIG_IGN, False)])
def test_a_hang_up_is_a_notice_unless_it_is_ignored(
    post: Post, before: signal.Handlers, noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = signal.signal(signal.SIGHUP, before)
    try:
        post.receiver.install()
        os.kill(os.getpid(), signal.SIGHUP)
        if not noticed:
            sigterm()
        post.heard.wait_for_posts()
        (disruption,) = post.heard.posts
        assert disruption.signal == ("SIGHUP" if noticed else "SIGTERM")
        post.receiver.close()
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, found)


def test_a_handler_that_somebody_installs_later_is_left_alone(post: Post) -> None:
    post.receiver.install()
    later = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGTERM, later)
    sigterm()
    post.heard.wait_for_posts()  # the wakeup fd works under any Python handler
    post.receiver.close()
    assert signal.getsignal(signal.SIGTERM) is later


def test_previous_wakeup_fd_gets_every_signal_and_is_restored(post: Post) -> None:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        ours.setblocking(False)
        theirs.settimeout(10)
        signal.set_wakeup_fd(ours.fileno())
        try:
            post.receiver.install()
            sigterm()
            post.heard.wait_for_posts()
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
            post.heard.wait_for_posts()
            post.receiver.close()
            assert signal.set_wakeup_fd(-1) == other.fileno(), "and it stays where it is"
        finally:
            signal.set_wakeup_fd(-1)


def test_previous_asyncio_handler_is_called_and_restored(post: Post) -> None:
    loop = asyncio.new_event_loop()
    called = 0

    def on_sigterm() -> None:
        nonlocal called
        called += 1
        loop.stop()

    try:
        loop.add_signal_handler(signal.SIGTERM, on_sigterm)
        post.receiver.install()
        sigterm()
        loop.call_later(60, loop.stop)
        loop.run_forever()
        post.heard.wait_for_posts()
        post.receiver.close()
        sigterm()
        loop.run_forever()
        assert called == 2
        assert len(post.heard.posts) == 1
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.close()


def test_asyncio_that_takes_handler_and_fd_later_comes_second(
    post: Post, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    post = Post(look_every_s=0.01)
    loop = asyncio.new_event_loop()
    try:
        post.receiver.install()
        post.receiver.look()  # the first sync point
        loop.add_signal_handler(signal.SIGTERM, loop.stop)

        def is_told() -> bool:
            post.receiver.look()  # each sync point
            return (
                "SIGTERM's handler was replaced after attach() by asyncio.unix_events._sighandler_noop" in caplog.text
            )

        until(is_told, "the warning")
        sigterm()
        loop.call_later(60, loop.stop)
        loop.run_forever()  # asyncio's handler works
        post.heard.wait_for_posts()
        post.receiver.close()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        loop.close()
    assert caplog.text.count("was replaced after attach()") == 1


def test_outside_of_the_main_thread_it_says_so_and_installs_nothing(
    post: Post, caplog: pytest.LogCaptureFixture
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    installed: list[bool] = []
    thread = threading.Thread(target=lambda: installed.append(post.receiver.install()), name="trainer")
    thread.start()
    thread.join(60)
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


@pytest.mark.integration
def test_a_forked_child_that_is_terminated_is_no_notice_to_its_parent() -> None:
    # In a process of its own: forking the test runner, with its threads, is asking for trouble.
    code = """
import os, signal, time
from gracepoint.receivers import Mailbox, SigtermReceiver
mailbox = Mailbox(time.monotonic)
receiver = SigtermReceiver(mailbox, 1.0, lambda: None)
receiver.install()
runs, child_runs = os.pipe()
child = os.fork()
if child == 0:
    os.write(child_runs, b"x")
    time.sleep(60)
    os._exit(0)
os.read(runs, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
assert os.WTERMSIG(status) == signal.SIGTERM, status
receiver.close()
assert mailbox.remaining_s() == float("inf")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
