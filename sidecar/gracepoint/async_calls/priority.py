"""How much of the CPU the worker process takes from the training.

The worker's main thread calls ``give_way`` before other threads start. ``hurry`` and ``relax`` may be called by any
thread. The niceness of the session is the kernel's; this module only remembers what the trainer asked for.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_AUTOGROUP = Path("/proc/self/autogroup")
# The kernel lets processes without a privilege change the niceness of sessions once in 0.1 s, all of them together.
_TRIES, _TRY_EVERY_S = 10, 0.11

_nice = 0


def give_way(nice: int) -> None:
    """Leaves the CPU to the training, as far as ``nice`` says.

    The kernel must also not prefer this process to a thread of the training that wakes up (``SCHED_BATCH``). Outside of
    control groups, it weighs sessions against each other and not processes (sched(7), "The autogroup feature"), and
    this process leads one.
    """
    global _nice
    _nice = nice
    os.nice(nice)
    if nice:
        with contextlib.suppress(OSError):  # forbidden here
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        relax()


def hurry() -> None:
    """Has the session count as much as others, as somebody waits for this process. Its threads stay nice."""
    _set_session_nice(0)


def relax() -> None:
    """Has the session be as nice as ``give_way`` said, as the training goes on."""
    _set_session_nice(_nice)


def _set_session_nice(nice: int) -> None:
    with contextlib.suppress(OSError, ValueError, IndexError):  # this kernel does not weigh sessions
        for _ in range(_TRIES):
            if int(_AUTOGROUP.read_text().split()[-1]) == nice:
                return
            try:
                _AUTOGROUP.write_text(str(nice))
            except BlockingIOError:
                time.sleep(_TRY_EVERY_S)
