"""One process of the test of the compilation cache: starts, trains a few steps, and prints what JAX compiled.

compile_cache_process.py DIRECTORY [PROGRAMS]

PROGRAMS: the folder that JAX's own settings name, as its variables do. Without it, ``attach`` says "on".
"""

from __future__ import annotations

import collections
import json
import logging
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gracepoint
from gracepoint.checkpoint import WriteOptions
from tests.multiprocess.launcher import here

#: Slices that are copied from the devices, as on GPU and TPU: each process copies its part of what all of them hold.
OPTIONS = WriteOptions(pinned_host_transfer=True, min_slice_bytes=1 << 10)


def main(directory: str, programs: str | None = None) -> None:
    if programs is not None:  # JAX, which was imported before this process was forked off, does not read the variables
        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    setting = "on" if programs is None else None
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    found = collections.Counter[str]()

    def count(event: str, **_: Any) -> None:
        found[event.rpartition("/")[2]] += 1

    jax.monitoring.register_event_listener(count)
    here().initialize_jax()
    with gracepoint.attach(directory, save_every_steps=2, compilation_cache=setting, write_options=OPTIONS) as session:
        mesh = Mesh(np.array(jax.devices()), ("x",))
        everywhere, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("x"))
        shardings = {"replicated": everywhere, "split": split}

        def train_step(state: dict[str, jax.Array]) -> dict[str, jax.Array]:
            total = jnp.sum(state["split"])  # over all processes
            return {"replicated": state["replicated"] + total, "split": state["split"] * 1.5 + total}

        def first() -> dict[str, jax.Array]:
            return {"replicated": jnp.zeros((64, 64)), "split": jnp.arange(32.0)}

        init = jax.jit(first, out_shardings=shardings)
        train = session.compile(train_step, jax.eval_shape(init), out_shardings=shardings)
        state, step = session.restore(init=init)
        for number in range(step + 1, step + 5):
            state = train(state)
            session.step(number, state)
        # A program of this process alone, of the training's own.
        jax.jit(lambda x: x + 1)(jax.device_put(np.float32(1), jax.local_devices()[0])).block_until_ready()
        result = float(np.asarray(state["replicated"].addressable_data(0))[0, 0])
    print("counted", json.dumps({"step": step, "result": result, **found}), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
