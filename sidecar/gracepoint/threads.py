"""Daemon threads that know when they have ended, and what a forked child does with what it has inherited.

If a signal handler raises in the main thread (Ctrl-C, a time limit by SIGALRM), the exception comes between any two
bytecodes. In CPython 3.11 and 3.12, a ``Thread.join`` that is left so marks a running thread as stopped. And after an
interrupted ``Thread.start`` nobody can say whether the thread runs. So whoever hands memory to a thread uses
``DaemonThread``. Its thread takes its turn before it calls the function, and the maker takes the turn away when a start
was left: exactly one of the two succeeds. What ``ended`` reads is set by the thread. The maker's thread calls
``start``. Any thread may ask ``ended`` and ``wait``. After a fork, the child has none of its parent's threads: there,
all have ended. A lock is left held if an exception comes right after it was taken; so no lock decides anything here,
and a wait only sleeps on one.

A child of ``os.fork``, such as a data loader's worker, has copies of all objects of its parent, and none of its
threads. It shares the parent's connections and file locks, and a lock that another thread held at the fork stays held
in the child for ever. So in the child an object drops what the parent still uses, without a message to the other side
(``forget_in_child``). What a child may never do, such as a save of its parent's, raises (``check_not_forked``).

``ask_in_thread`` is for questions that may never be answered.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from gracepoint import machine
from gracepoint.errors import ForkedChild

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
        RuntimeError: There is no thread for it: the system has none, or the interpreter ends.
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

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"{name}: no answer after {timeout_s:g} s") from None
    return answer()


def _raise(error: Exception) -> NoReturn:
    raise error


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
        self._ended = self._is_started = False
        self._running = threading.Lock()  # held until the thread has ended
        self._running.acquire()
        self._made_by = threading.get_ident()
        self._pid = machine.process_id()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread. If this raises, the thread never runs, or runs to its end: ``ended`` says which.

        Raises:
            RuntimeError: The system has no thread, or the interpreter ends.
        """
        try:
            self._thread.start()
        except BaseException:
            self._turn.setdefault(_TURN, _NEVER)
            raise
        self._is_started = True

    @property
    def ended(self) -> bool:
        """True once the function has returned or raised, or if it will never be called.

        The maker must not ask between making the thread and starting it: a thread that was not started then never runs.
        """
        if self._ended or is_forked(self._pid):
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
        limit_s = threading.TIMEOUT_MAX if timeout_s is None else min(max(timeout_s, 0.0), threading.TIMEOUT_MAX)
        if not self.ended and self._running.acquire(timeout=limit_s):
            self._running.release()
        if not self.ended:
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
            self._ended = True
            self._running.release()
