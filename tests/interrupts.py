"""Exceptions that come from outside of the code in the main thread, as those of signal handlers do."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Callable, Collection
from types import FrameType, ModuleType
from typing import Any

_A_MOMENT_S = 1e-4


class Interrupted(BaseException):
    """What the signal handler raises."""


def interrupt(function: Callable[[], object], after_s: float, *, times: int = 1) -> bool:
    """Calls ``function``. A signal's handler raises ``Interrupted`` in it after ``after_s`` seconds, if it still runs.

    With ``times``, the handler raises again after as many seconds, as code in a ``finally`` may wait, too. It never
    raises in Python's ``logging``, which keeps its locks then, up to Python 3.12.

    Returns whether it did. Errors of the function that follow from it are dropped.
    """
    left, raised = times, False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal left, raised
        if frame is not None and frame.f_code.co_filename == logging.__file__:
            signal.setitimer(signal.ITIMER_REAL, _A_MOMENT_S, after_s)
        elif left:
            left, raised = left - 1, True
            raise Interrupted

    before = signal.signal(signal.SIGALRM, handle)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s, after_s)
            function()
        finally:
            left = 0
    except BaseException:
        if not raised:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return raised


def interrupt_at(function: Callable[[], object], number: int, modules: Collection[ModuleType]) -> bool:
    """Calls ``function``, and raises ``Interrupted`` before the given bytecode of these modules that it comes to.

    Returns whether it came to so many.
    """
    files = {module.__file__ for module in modules}
    left = number

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files or frame.f_code.co_name == "__del__":  # where Python drops it
            return None
        # From Python 3.13 on, bytecodes are traced only in a frame that has its function already.
        frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = trace, True, False
        if event == "opcode":
            left -= 1
            if left < 0:
                raise Interrupted
        return trace

    before = sys.gettrace()
    # Python 3.12 traces bytecodes only if a frame has asked for it before.
    sys._getframe().f_trace_opcodes = True
    try:
        sys.settrace(trace)
        function()
    except Interrupted:
        return True
    finally:
        sys.settrace(before)
    return False


def leave_unlocked(event: threading.Event, timeout: float | None = None) -> bool:
    """Stands for ``Event.wait``: an exception of a signal handler comes as the wait has given its lock up.

    Then leaving the block raises RuntimeError, as the lock is not held.
    """
    condition = threading.Condition(threading.Lock())
    with condition:
        condition.release()
        raise Interrupted
