"""One trainer of ``benchmarks.worker_kills``: saves one step after the other through its worker, until it is killed.

    worker_kills_process.py ROOT ATTEMPT NOTES MIB

``NOTES/staged.N`` says which step process N has handed over last. ``NOTES/worker.N`` is the process ID of its worker.
Every second save is an emergency save, which the caller waits for.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.saving.save_worker import SaveWorker
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.multihost import JaxStore, StoreProcessGroup
from tests.multiprocess.launcher import here

_LEAVES = 8
_TIMEOUT_S = 60.0


def state_of(step: int, mib: int) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the values that the leaves have at a step."""
    size = (mib << 20) // 4 // _LEAVES
    return {f"w{n}": np.arange(size, dtype=np.float32) + np.float32(1000 * step + n) for n in range(_LEAVES)}


def main(root: str, attempt: str, notes: str, mib: str) -> None:
    here().initialize_jax(shutdown_timeout_s=5)
    from jax._src import distributed

    store = JaxStore(distributed.global_state.client, f"kills/{attempt}")
    gang = StoreProcessGroup(store, here().process_index, here().process_count)
    engine = StepCheckpointer(
        Layout(storage_path(root)),
        gang=gang,
        attempt=attempt,
        retention=Retention(keep_last=2),
        settings=SaveSettings(WriteOptions(writer="worker")),
    )
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))

    def state(step: int) -> dict[str, jax.Array]:
        return {
            name: jax.make_array_from_callback(array.shape, sharding, array.__getitem__)
            for name, array in state_of(step, int(mib)).items()
        }

    staged = Path(notes) / f"staged.{gang.process_index}"
    real = SaveWorker.hand_over

    def hand_over(self: Any, part: Any, *arguments: Any, **keywords: Any) -> Any:
        handed = real(self, part, *arguments, **keywords)
        staged.write_text(str(part.temporary.step))
        return handed

    SaveWorker.hand_over = hand_over  # type: ignore[method-assign]
    engine.prepare(state(0))
    (worker,) = engine.executor.worker_process_ids
    (Path(notes) / f"worker.{gang.process_index}").write_text(str(worker))
    for step in itertools.count(1):
        if step % 2:
            engine.save_in_background(step, state(step), {}, timeout_s=_TIMEOUT_S)
        else:
            deadline = Deadline.after(_TIMEOUT_S, time.monotonic)
            engine.save(step, state(step), {}, deadline=deadline, on_stage=lambda stage: None)
        print(f"step {step}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
