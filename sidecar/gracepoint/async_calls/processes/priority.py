"""How much of the CPU the worker process takes from the training.

The worker's main thread calls ``give_way`` before other threads start. ``hurry`` and ``relax`` may be called by any
thread, and do not wait. The niceness of the session is the kernel's; this module only remembers what the trainer asked
for, and which niceness the session is to have.

The kernel lets processes without a privilege change the niceness of sessions once in 0.1 s, all of them together. If it
refuses, one daemon thread ("gracepoint: niceness") tries again, so that no save waits. It ends when the session has the
niceness, or after ``_TRIES`` attempts since somebody last asked for a niceness.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from pathlib import Path

from gracepoint import machine

_AUTOGROUP = Path("/proc/self/autogroup")
# Enough for the workers of a machine, which may all want it at once.
_TRIES, _TRY_EVERY_S = 50, 0.11

_nice = 0
_lock = threading.Lock()  # protects what follows
_wanted = 0
_tries = 0  # attempts that the thread still has; 0: there is no thread


def give_way(nice: int, *, idle: bool = False) -> None:
    """Leaves the CPU to the training, as far as ``nice`` says, or all of it if ``idle``.

    With ``SCHED_BATCH``, the kernel does not prefer this process to a thread of the training that wakes up. Outside of
    control groups, the kernel weighs sessions against each other and not processes (sched(7), "The autogroup feature").
    This process leads a session, so the niceness of that is set, too.
    """
    global _nice
    _nice = nice
    os.nice(nice)
    with contextlib.suppress(OSError):  # forbidden here
        if idle:
            machine.run_when_idle()
        elif nice and sys.platform == "linux":
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if nice:
        relax()


def hurry() -> None:
    """Has the session count as much as others, as somebody waits for this process. Its threads stay nice."""
    _set_session_nice(0)


def relax() -> None:
    """Has the session be as nice as ``give_way`` said, as the training goes on."""
    _set_session_nice(_nice)


def _set_session_nice(nice: int) -> None:
    global _wanted, _tries
    with _lock:
        _wanted, is_tried = nice, _tries > 0
        if is_tried:
            _tries = _TRIES
        elif not _has_wanted_niceness():
            thread = threading.Thread(target=_try_again, name="gracepoint: niceness", daemon=True)
            with contextlib.suppress(RuntimeError):  # the system has no thread, or the interpreter ends
                thread.start()
                _tries = _TRIES


def _try_again() -> None:
    global _tries
    while True:
        time.sleep(_TRY_EVERY_S)
        with _lock:
            _tries = 0 if _has_wanted_niceness() else _tries - 1
            if _tries <= 0:  # whoever wants another niceness from here on starts another thread
                return


def _has_wanted_niceness() -> bool:
    """Sets the niceness. Returns False if the kernel may allow it later. True also if it never does."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # this kernel does not weigh sessions
        if int(_AUTOGROUP.read_text().split()[-1]) != _wanted:
            try:
                _AUTOGROUP.write_text(str(_wanted))
            except BlockingIOError:
                return False
    return True
