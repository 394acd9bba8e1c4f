"""A training loop that saves with Orbax, and asks only when; run by test_session.py in real processes.

The argument is the directory. Prints as train.py does.
"""

from __future__ import annotations

import logging
import sys
import time

from tests.multiprocess.launcher import here


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    logging.getLogger("absl").setLevel(logging.WARNING)
    here().initialize_jax()
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint

    session = gracepoint.attach(f"{sys.argv[1]}/unused")
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    state = {"w": jax.make_array_from_callback((8, 4), sharding, lambda index: np.zeros((8, 4), np.float32)[index])}
    train_step = jax.jit(lambda state: {"w": state["w"] + 1.0})
    manager = ocp.CheckpointManager(f"{sys.argv[1]}/orbax")
    try:
        for step in range(1, 100_000):
            state = train_step(state)
            time.sleep(0.01)
            if session.reached_preemption(step):
                manager.save(step, args=ocp.args.StandardSave(state), force=True)
                manager.wait_until_finished()
                print("orbax has", manager.latest_step(), flush=True)
                session.saved(step)
            if step % 10 == 0:
                print("training", step, flush=True)
    except gracepoint.Preempted as preempted:
        print("preempted", preempted.saved, preempted.step, preempted.reason, flush=True)
        raise


main()
