"""One replica of the operator, which also writes down what blocks its event loops.

    python -m benchmarks.operator_scale_process FILE ARGUMENTS...

The arguments are the operator's own. Each callback of an event loop that takes longer than a moment becomes one line of
JSON in the file: when it ended, in which thread, how long it took, how much of that its own thread worked, and what it
was. Work of other threads, and of other processes on the same cores, is in the first figure and not in the second one.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from gracepoint_operator.__main__ import main as operator

_TOLD_S = 0.02


def measure(write: Callable[[str], Any]) -> None:
    """From now on tells what blocks the event loops of this process."""
    run = asyncio.Handle._run
    collections = _Collections()

    def timed(handle: asyncio.Handle) -> None:
        began_s, worked_s, collected_s = time.perf_counter(), time.thread_time(), collections.took_s
        what = handle._callback  # type: ignore[attr-defined]
        run(handle)
        took_s = time.perf_counter() - began_s
        if took_s >= _TOLD_S:
            worked_s = time.thread_time() - worked_s
            of_task = repr(getattr(what, "__self__", what))[:200]
            said = f"{of_task}, of that garbage collections {collections.took_s - collected_s:.3f} s"
            line = {"at": time.time(), "thread": threading.current_thread().name, "took_s": took_s}
            write(json.dumps({**line, "worked_s": worked_s, "what": said}) + "\n")

    asyncio.Handle._run = timed  # type: ignore[assignment,method-assign]


class _Collections:
    """Adds up the time of all garbage collections of this process, which stop every thread."""

    def __init__(self) -> None:
        self.took_s = 0.0
        self._began_s = 0.0
        gc.callbacks.append(self._see)

    def _see(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        else:
            self.took_s += time.perf_counter() - self._began_s


if __name__ == "__main__":
    with open(sys.argv[1], "a", buffering=1) as sink:
        measure(sink.write)
        status = operator(sys.argv[2:])
    sys.exit(status)
