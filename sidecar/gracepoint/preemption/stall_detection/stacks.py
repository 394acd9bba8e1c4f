"""What the threads of this process do. There is no state here; any thread may call everything."""

from __future__ import annotations

import faulthandler
import io
import logging
import sys
import traceback
import types

log = logging.getLogger(__name__)

_FRAMES = 12
#: Parts of the names of JAX's functions that make a program, as in jax 0.4.35 to 0.10.
_COMPILERS = ("compil", "trace_to", "lower_")


def is_compiling(thread_id: int) -> bool:
    """Returns whether the thread traces, lowers or compiles a JAX program. Reads the thread's stack."""
    frame = _frame(thread_id)
    while frame is not None:
        code = frame.f_code
        if "/jax/_src/" in code.co_filename and any(word in code.co_name for word in _COMPILERS):
            return True
        frame = frame.f_back
    return False


def _frame(thread_id: int) -> types.FrameType | None:
    """Returns what the thread runs. None if it has ended."""
    return sys._current_frames().get(thread_id)  # noqa: SLF001 - documented, despite its name


def stack_of(thread_id: int | None) -> str:
    """Returns the innermost frames of a thread, as lines of a traceback. Empty if it has ended or is None."""
    frame = None if thread_id is None else _frame(thread_id)
    return "" if frame is None else "".join(traceback.format_stack(frame)[-_FRAMES:])


def dump_all_stacks() -> None:
    """Writes the stacks of all threads to the standard error stream."""
    try:
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    except (io.UnsupportedOperation, AttributeError, ValueError, OSError):  # the stream is no file, or there is none
        log.info("the stacks of all threads cannot be written to the standard error stream")
