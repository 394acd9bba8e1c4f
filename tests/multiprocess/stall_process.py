"""A training loop with a collective in each step, which is watched for stalls.

python stall_process.py <folder> <report|restart> [<seconds>]
"""

from __future__ import annotations

import itertools
import logging
import sys
import time

from tests.multiprocess.launcher import here

_GIVE_UP_S = 120.0


def train() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint

    session = gracepoint.attach(
        sys.argv[1], stall_after_s=float(sys.argv[3]), stall_action=sys.argv[2], save_every_steps=5
    )
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
    state = {"w": jax.make_array_from_callback((12,), sharding, lambda i: np.arange(12.0)[i])}
    state, begun = session.restore(like=state)

    step = jax.jit(lambda state: {"w": state["w"] + jnp.sum(state["w"]) * 1e-3})

    give_up_at_s = time.monotonic() + _GIVE_UP_S
    for number in itertools.count(begun + 1):
        state = step(state)
        jax.block_until_ready(state)
        session.step(number, state)
        if number == begun + 3:
            print("three steps", flush=True)
        print(f"step {number}", flush=True)
        assert time.monotonic() < give_up_at_s, "the test never ended it"
        time.sleep(0.05)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    here().initialize_jax()
    train()
