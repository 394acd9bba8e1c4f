"""One replica of the operator, which also writes down what blocks its event loops.

    python -m benchmarks.operator_scale_process FILE ARGUMENTS...

The arguments are the operator's own. Each callback of an event loop that takes longer than a moment becomes one line of
JSON in the file: when it ended, in which thread, how long it took, how much of that its own thread worked, and what it
was. Work of other threads, and of other processes on the same cores, is in the first figure and not in the second one.
"""

from __future__ import annotations

import asyncio
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

    def timed(handle: asyncio.Handle) -> None:
        began_s, worked_s = time.perf_counter(), time.thread_time()
        what = handle._callback  # type: ignore[attr-defined]
        run(handle)
        took_s = time.perf_counter() - began_s
        if took_s >= _TOLD_S:
            worked_s = time.thread_time() - worked_s
            line = {"at": time.time(), "thread": threading.current_thread().name, "took_s": took_s}
            write(json.dumps({**line, "worked_s": worked_s, "what": repr(what)[:200]}) + "\n")

    asyncio.Handle._run = timed  # type: ignore[assignment,method-assign]


if __name__ == "__main__":
    with open(sys.argv[1], "a", buffering=1) as sink:
        measure(sink.write)
        status = operator(sys.argv[2:])
    sys.exit(status)
