"""Daemon threads that know when they have ended, and what a forked child does with what it has inherited.

If a signal handler raises in the main thread (Ctrl-C, a time limit by SIGALRM), the exception comes between any two
bytecodes. In CPython 3.11 and 3.12, a ``Thread.join`` that is left so marks a running thread as stopped. And after an
interrupted ``Thread.start`` nobody can say whether the thread runs. So whoever hands memory to a thread uses
``DaemonThread``. Its thread takes its turn before it calls the function, and the maker takes the turn away when a start
was left: exactly one of the two succeeds. What ``ended`` reads is set by the thread. The maker's thread calls
``start``. Any thread may ask ``ended`` and ``wait``. After a fork, the child has none of its parent's threads: there,
all have ended. A lock is left held if an exception comes right after it was taken; so no lock decides anything here,
and a wait only sleeps on one.

A ``threading.Event`` or a ``Future`` that such an exception leaves can stay locked, and whoever sets it then hangs. So
saves, asynchronous calls, compilations and connections end by an ``Ending``, for which any thread may ask and wait.

A ``BackgroundThread`` runs functions in the background, one at a time, each on a separate ``DaemonThread``. One thread
owns it and starts functions. The thread of a function ends with the function: an exception that leaves the owner's
``start`` or ``wait`` changes nothing about what ``busy`` says. After that, the owner reads its outcome by ``wait`` or
``take_error``. An error that was not read is logged when the object is deleted. A save that hangs never keeps a process
from ending. Any thread may ask ``busy`` and ``thread_id``, also while the owner's wait ends.

A child of ``os.fork``, such as a data loader's worker, has copies of all objects of its parent, and none of its
threads. It shares the parent's connections and file locks, and a lock that another thread held at the fork stays held
in the child for ever. So in the child an object drops what the parent still uses, without a message to the other side
(``forget_in_child``). What a child may never do, such as a save of its parent's, raises (``check_not_forked``).

``ask_in_thread`` is for questions that may never be answered.
"""

from __future__ import annotations

import collections
import functools
import logging
import math
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from gracepoint import machine
from gracepoint.deadline import Deadline
from gracepoint.errors import ForkedChild, SaveFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")
_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def forget_in_child(owner: T, forget: Callable[[T], object]) -> None:
    """Has each child that is forked from now on call ``forget(owner)`` at once, if ``owner`` still exists.

    ``forget`` must take no lock: a thread of the parent may have held it.
    """
    _owners[owner] = forget


def is_forked(pid: int) -> bool:
    """Returns whether this process is not ``pid``, but was forked from it."""
    return machine.process_id() != pid


def check_not_forked(pid: int, owner: str) -> None:
    """Raises ForkedChild if this process is not ``pid``, which made ``owner``."""
    if is_forked(pid):
        raise ForkedChild(
            f"{owner} belongs to process {pid}, and this is process {machine.process_id()}, which was forked from it: "
            "a forked child has none of its parent's threads. Use it in the process that made "
            "it; in the child, make another"
        )


def _forget() -> None:
    for owner, forget in list(_owners.items()):
        try:
            forget(owner)
        except Exception as error:  # noqa: BLE001 - the child continues, and the others are forgotten
            logger.debug("a forked child keeps something of its parent's: %r", error)


os.register_at_fork(after_in_child=_forget)


def ask_in_thread(ask: Callable[[], T], name: str, timeout_s: float) -> T:
    """Returns what a function returns that may never return, such as a question to another process.

    It is called in a daemon thread. One that gets no answer is left behind, and ends with the process.

    Args:
        ask: The function.
        name: The thread's name.
        timeout_s: Seconds to wait for the answer.

    Raises:
        Exception: What ``ask`` raises.
        NoThread: The system has none for it, or the interpreter ends.
        TimeoutError: There was no answer in time.
    """
    answers = queue.SimpleQueue[Callable[[], T]]()

    def run() -> None:
        try:
            answer = ask()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits
            answers.put(functools.partial(_raise, error))
        else:
            answers.put(lambda: answer)

    start_thread(threading.Thread(target=run, name=name, daemon=True))
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"{name}: no answer after {timeout_s:g} s") from None
    return answer()


def _raise(error: Exception) -> NoReturn:
    raise error


# A wait looks again so often: an interruption may have left the lock held that it sleeps on.
_SLEEPS_S = 0.5


class NoThread(RuntimeError):
    """The system has no thread, or the interpreter ends: the thread does not run."""


class Ending:
    """How something ended that another thread does: a ``Future`` without a value, which no interruption locks."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._ended = False
        self._callbacks: collections.deque[Callable[[], object]] = collections.deque()
        self._running = threading.Lock()  # held until the end; only slept on
        self._running.acquire()

    def end(self, error: Exception | None = None) -> None:
        """Says that it has ended, well if there is no ``error``. Once it has ended, this changes nothing."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._wake()
        self._call()

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def error(self) -> Exception | None:
        """The error with which it has ended. None if it ended well, or has not."""
        return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the end, for ``timeout_s`` seconds at most. None: without a limit. Returns whether it has ended."""
        until_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._ended and (left_s := until_s - time.monotonic()) > 0:
            if self._running.acquire(timeout=min(left_s, _SLEEPS_S)):
                self._wake()
        return self._ended

    def then(self, function: Callable[[], object]) -> None:
        """Has ``function`` called at the end, by the thread that ends it. If it has ended: now, by this thread.

        An error of the function is logged.
        """
        self._callbacks.append(function)
        if self._ended:
            self._call()

    def _wake(self) -> None:
        """Lets the next one go on that sleeps."""
        try:  # noqa: SIM105 - an interruption may come between any two calls
            self._running.release()
        except RuntimeError:
            pass  # another thread has released it

    def _call(self) -> None:
        while True:
            try:
                function = self._callbacks.popleft()  # each is called once
            except IndexError:
                return
            try:
                function()
            except Exception:
                logger.exception("what was to be done at the end of a call has failed")


def start_thread(thread: threading.Thread) -> None:
    """Starts a thread.

    An exception of a signal handler may leave Python's own ``start`` as RuntimeError, from the lock of its wait, and
    the thread runs. Such an exception leaves this function as it came.

    Raises:
        NoThread: It does not run.
    """
    handled = sys.exception()
    try:
        thread.start()
    except RuntimeError as error:
        if type(error) is not RuntimeError:
            raise  # of a signal handler
        if "new thread" in str(error):
            raise NoThread(str(error)) from error
        came = error.__context__
        if came is None or came is handled:
            raise
        raise came from None


_RUNS, _NEVER = "runs", "never runs"
_TURN = "turn"
# Seconds for the interpreter to take a thread down whose function has returned.
_TAKEN_DOWN_S = 1.0


class DaemonThread:
    """Calls ``function`` once, in a daemon thread of the given name.

    Args:
        function: What the thread does.
        name: The thread's name.
    """

    def __init__(self, function: Callable[[], object], name: str) -> None:
        self._function: Callable[[], object] | None = function
        self._turn: dict[str, str] = {}  # ``setdefault`` is one step: the first to call it wins
        self._is_started = False
        self._ending = Ending()
        self._made_by = threading.get_ident()
        self._pid = machine.process_id()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. If this raises, the thread never runs, or runs to its end: ``ended`` says which.

        Raises:
            NoThread: The system has no thread, or the interpreter ends.
        """
        try:
            start_thread(self._thread)
        except BaseException:
            self._turn.setdefault(_TURN, _NEVER)
            raise
        self._is_started = True

    @property
    def ended(self) -> bool:
        """True once the function has returned or raised, or if it will never be called.

        The maker must not ask between making the thread and starting it: a thread that was not started then never runs.
        """
        if self._ending.ended or is_forked(self._pid):
            return True
        if not self._is_started and self._made_by == threading.get_ident():  # exceptions have left the start
            self._turn.setdefault(_TURN, _NEVER)
        return self._turn.get(_TURN) == _NEVER

    @property
    def ident(self) -> int | None:
        """Python's identifier of the thread. None before it runs."""
        return self._thread.ident

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the thread has ended, for ``timeout_s`` seconds at most. Returns whether it has ended."""
        if not self.ended and not self._ending.wait(timeout_s):
            return False
        if self._thread.is_alive():
            self._thread.join(_TAKEN_DOWN_S)
        return True

    def _run(self) -> None:
        function, self._function = self._function, None
        try:
            if self._turn.setdefault(_TURN, _RUNS) == _RUNS and function is not None:
                function()
        finally:
            del function  # frees what it holds before anybody learns of the end
            self._ending.end()


_LOOK_EVERY_S = 0.05


class BackgroundThread:
    """Runs functions one after the other. An error is kept until ``take_error`` is called."""

    def __init__(self) -> None:
        self._thread: DaemonThread | None = None
        self._name = ""
        self._error: Exception | None = None  # written by the thread, read once it has ended
        self._failed = ""  # the name of the function that ended with the error

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Starts ``function``. No other function may be running.

        If an exception of a signal handler leaves this, the function may run: ``busy`` knows.

        Raises:
            NoThread: The system has none, or the interpreter ends.
        """
        assert not self.busy

        def run() -> None:
            try:
                function()
            except Exception as error:  # noqa: BLE001 - kept for the training thread
                self._error, self._failed = error, name
            except BaseException as error:  # noqa: BLE001 - a callback that calls sys.exit() must not count as success
                failure = SaveFailed(f"{name} was ended by {error!r}")
                failure.__cause__ = error
                self._error, self._failed = failure, name

        thread = DaemonThread(run, f"gracepoint: {name}")
        self._name, self._thread = name, thread
        thread.start()

    def __del__(self) -> None:
        # May run in the thread of the function, which holds a reference to this object until it ends.
        if self._error is not None:
            logger.error("%s failed, and the caller never waited for it: %s", self._failed, self._error)

    @property
    def busy(self) -> bool:
        thread = self._thread  # read once: the owner may set it to None meanwhile
        return thread is not None and not thread.ended

    @property
    def has_failed(self) -> bool:
        """True if a function has ended with an error that was not taken yet."""
        return self._error is not None and not self.busy

    @property
    def thread_id(self) -> int | None:
        """Identifier of the thread of the function that was started last. None if a wait has seen that thread end."""
        thread = self._thread
        return None if thread is None else thread.ident

    def wait(self, timeout_s: float) -> None:
        """Waits until no function runs. ``take_error`` then returns its error.

        Raises:
            SaveFailed: The function still ran after ``timeout_s``.
        """
        if self._thread is None:
            return
        if not self._thread.wait(timeout_s):
            raise SaveFailed(f"{self._name} did not end within {timeout_s} s")
        self._thread = None

    def wait_until(self, deadline: Deadline) -> None:
        """Waits as ``wait`` does, until a deadline that may move meanwhile."""
        while self._thread is not None:
            if self._thread.wait(min(deadline.remaining_s(), _LOOK_EVERY_S)):
                self._thread = None
            elif deadline.passed():
                raise SaveFailed(f"{self._name} did not end {deadline.ended}")

    def take_error(self) -> Exception | None:
        """Returns the error of a function that has ended, once. None if it succeeded or still runs."""
        if self.busy:
            return None
        error, self._error = self._error, None
        return error
