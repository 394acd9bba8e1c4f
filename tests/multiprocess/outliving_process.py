"""One trainer whose worker process writes its saves: saves step 1, and then step 2 until the test kills somebody.

    outliving_process.py ROOT ATTEMPT KIND SECONDS WRITER

KIND is ``background`` or ``emergency``. SECONDS bound the save of step 2. WRITER is ``WriteOptions.writer``. With
``TEST_WHERE`` in the environment, the worker stops at a point of that save (``worker_points``), and the file
``handed.N`` says that process N has handed it over.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving import save_worker
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import GracepointError
from tests import leftovers
from tests.multiprocess import worker_points
from tests.multiprocess.checkpoint_process import make_state, with_keys
from tests.multiprocess.launcher import here

_ENDS_S = 30.0


def main(root: str, attempt: str, kind: str, seconds: str, writer: str) -> None:
    place = here()
    place.initialize_jax(shutdown_timeout_s=5)
    gang = place.gang(attempt)
    engine = StepCheckpointer(
        Layout(storage_path(root)), gang=gang, attempt=attempt, settings=SaveSettings(WriteOptions(writer=writer))
    )
    engine.prepare(with_keys(make_state(0), 0))
    engine.save_in_background(1, with_keys(make_state(1), 1), {})
    engine.executor.wait_until_finished(60)
    if where := os.environ.get(worker_points.WHERE):
        tell_handed(Path(where) / f"handed.{gang.process_index}")
        save_worker.write_handed = worker_points.write_handed  # type: ignore[assignment]
    state = with_keys(make_state(2), 2)
    print("saves 2", flush=True)
    try:
        if kind == "background":
            engine.save_in_background(2, state, {}, timeout_s=float(seconds))
            engine.executor.wait_until_finished(float(seconds) + 10)
        else:
            deadline = Deadline.after(float(seconds), time.monotonic)
            engine.save(2, state, {}, deadline=deadline, on_stage=lambda stage: None)
        print("saved 2", flush=True)
    except GracepointError as error:
        print(f"failed: {type(error).__name__}: {error}", flush=True)
    engine.close(30)
    del engine, state
    gc.collect()
    until_s = time.monotonic() + _ENDS_S
    while (left := left_here()) and time.monotonic() < until_s:  # nobody waits for the worker and its thread
        time.sleep(0.01)
    print("left", left, flush=True)


def left_here() -> list[str]:
    """Returns the threads and the shared memory of this process."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("gracepoint")]
    return threads + leftovers.shared_memory([os.getpid()])


def tell_handed(file: Path) -> None:
    real = save_worker.SaveWorker.hand_over

    def hand_over(*arguments: Any, **keywords: Any) -> Any:
        handed = real(*arguments, **keywords)
        file.touch()
        return handed

    save_worker.SaveWorker.hand_over = hand_over  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
