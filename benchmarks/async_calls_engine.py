"""What ``benchmarks.async_calls`` measures of Gracepoint's engine: how long saves take in the two extremes.

* An **emergency save**: the training has stopped, and waits for it.
* A periodic save **while all cores are busy**: as many processes as there are cores compute without a pause, in the
  session of the training. The kernel gives the threads of a periodic save almost nothing then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.process_group import SingleProcess

_TIMEOUT_S = 300.0


class Engine:
    """Gracepoint's engine, ready to save as a session does.

    Args:
        state: What is saved.
        folder: Where it is saved. It is made.
        writer: ``WriteOptions.writer``.
    """

    def __init__(self, state: dict[str, Any], folder: Path, writer: str) -> None:
        folder.mkdir()
        self._state = state
        self._steps = itertools.count(1)
        self._checkpointer = StepCheckpointer(
            Layout(storage_path(folder)),
            gang=SingleProcess(),
            attempt="a",
            retention=Retention(keep_last=1),
            settings=SaveSettings(WriteOptions(writer=writer)),
        )
        self._checkpointer.prepare(state)

    def start(self) -> Callable[[], bool]:
        """Begins a periodic save. Returns a function that says whether it has ended."""
        self._checkpointer.save_in_background(next(self._steps), self._state, {})
        return lambda: not self._checkpointer.executor.busy

    def periodic_s(self) -> float:
        """Returns the seconds of a periodic save that nobody waits for."""
        began_s = time.monotonic()
        ended = self.start()
        while not ended():
            time.sleep(0.01)
        return time.monotonic() - began_s

    def emergency_s(self) -> float:
        """Returns the seconds of a save that the training waits for."""
        began_s = time.monotonic()
        deadline = Deadline.after(_TIMEOUT_S, time.monotonic)
        self._checkpointer.save(next(self._steps), self._state, {}, deadline=deadline, on_stage=lambda stage: None)
        return time.monotonic() - began_s

    def close(self) -> None:
        """Ends the engine."""
        self._checkpointer.close(_TIMEOUT_S)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Within the block, a process for each core computes without a pause."""
    code = "print(flush=True)\nwhile True: pass"
    with contextlib.ExitStack() as stack:
        for _ in os.sched_getaffinity(0):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE))
            stack.callback(process.kill)
            assert process.stdout is not None
            process.stdout.readline()
        yield
