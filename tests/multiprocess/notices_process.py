"""Where notices come from, in real JAX processes; the first argument says which part runs."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import time

from tests.multiprocess.launcher import here

_GIVE_UP_S = 90.0


def orbax() -> None:
    """A loop that leaves saving to Orbax: its manager's default policy saves where JAX says that a preemption is."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint

    by_sigterm = len(sys.argv) == 3
    if not by_sigterm:
        watch_clouds()
    session = gracepoint.attach(
        os.path.join(sys.argv[2], "ours"), grace_period_s=_GIVE_UP_S, metadata=None if by_sigterm else "gce"
    )
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
    state = {"w": jax.make_array_from_callback((8,), sharding, lambda i: np.arange(8.0)[i])}
    manager = ocp.CheckpointManager(
        os.path.join(sys.argv[2], "orbax"),
        options=ocp.CheckpointManagerOptions(save_interval_steps=1_000_000, max_to_keep=None),
    )
    give_up_at_s = time.monotonic() + _GIVE_UP_S
    for step in itertools.count(1):
        saved = manager.save(step, args=ocp.args.StandardSave(state))
        if step == 3:
            print("training", flush=True)
            if by_sigterm and here().process_index == 1:
                os.kill(os.getpid(), signal.SIGTERM)
        if manager.reached_preemption(step):
            break
        assert time.monotonic() < give_up_at_s, "JAX never said so"
        time.sleep(0.01)
    manager.wait_until_finished()
    print(f"orbax saved={saved} step={step} steps={sorted(manager.all_steps())}", flush=True)
    manager.close()
    session.close()


def watch_clouds() -> None:
    """Each process's machine has a metadata server of its own."""
    from gracepoint.receivers import metadata as watchers

    watchers.BASE_URL = sys.argv[3 + here().process_index]


def metadata() -> None:
    """Only process 1's machine is announced to end, by its cloud; there is no operator and no SIGTERM."""
    import numpy as np

    import gracepoint

    watch_clouds()
    session = gracepoint.attach(sys.argv[2], metadata="auto")
    give_up_at_s = time.monotonic() + _GIVE_UP_S
    for step in itertools.count(1):
        session.step(step, {"w": np.zeros(4)})
        if step == 3:
            print("training", flush=True)
        time.sleep(0.01)
        assert time.monotonic() < give_up_at_s, "the cloud's notice never came"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    here().initialize_jax()
    globals()[sys.argv[1]]()
    print("done")
