"""Trains on records of which each must be used once: ``elastic_process.py DIRECTORY STEPS``.

Prints the records that this process takes in each step, and what is restored. The arrays depend on nothing that the
number of processes could change, so that their values are known: an array of floats that is halved or doubled in each
step, and one that counts how often each record was used.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import gracepoint
from gracepoint.elastic import ElasticData, Share, dealt_out
from tests.multiprocess.launcher import here

RECORDS, GLOBAL_BATCH, PARTS = 2400, 12, 7
_PACE_S = 0.02


def order() -> np.ndarray:
    """The order of the records, the same for every number of processes."""
    return np.random.default_rng(5).permutation(RECORDS).astype(np.int32)


def first_floats() -> np.ndarray:
    """The values of the array of floats at step 0."""
    return np.random.default_rng(6).standard_normal((24, 64)).astype(np.float32)


def batches(share: Share) -> Iterator[np.ndarray]:
    mine = order()[share.begins :: share.processes]
    for start in range(0, len(mine), share.batch):
        yield mine[start : start + share.batch]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    directory, steps = sys.argv[1], int(sys.argv[2])
    here().initialize_jax()
    session = gracepoint.attach(directory, grace_period_s=20.0)
    process, processes = jax.process_index(), jax.process_count()
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    data = ElasticData(batches, process=process, processes=processes, global_batch=GLOBAL_BATCH)
    parts = {f"part-{number}": {"read": 0} for number in range(process, PARTS, processes)}

    def set_parts(value: dict[str, dict[str, int]]) -> None:
        parts.clear()
        parts.update(value)

    session.host_state("parts", lambda: dict(parts), set_parts, reshard=dealt_out)

    def init() -> dict[str, jax.Array]:
        return {"floats": jnp.asarray(first_floats()), "used": jnp.zeros(RECORDS, jnp.int32)}

    state, step = session.restore(
        init=jax.jit(init, out_shardings={"floats": split, "used": split}),
        data=data,
    )
    print("restored", json.dumps([step, parts]), flush=True)

    def update(state: dict[str, jax.Array], batch: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
        factor = jnp.where(step % 2 == 0, 2.0, 0.5).astype(jnp.float32)  # exact, however it is computed
        return {"floats": state["floats"] * factor, "used": state["used"].at[batch].add(1)}

    train_step = jax.jit(update, donate_argnums=0, out_shardings={"floats": split, "used": split})
    while step < steps:
        mine = next(data)
        batch = jax.make_array_from_process_local_data(split, mine)
        state = train_step(state, batch, jax.device_put(np.int32(step), whole))
        step += 1
        for part in parts.values():
            part["read"] += 1
        print("took", json.dumps([step, mine.tolist()]), flush=True)
        time.sleep(_PACE_S)
        session.step(step, state)
    gather = jax.jit(lambda state: state, out_shardings={"floats": whole, "used": whole})
    found = {name: np.asarray(value.addressable_data(0)) for name, value in gather(state).items()}
    print("bits", json.dumps([found["floats"].view(np.uint32).tolist(), found["used"].tolist()]), flush=True)
    print("parts", json.dumps(parts), flush=True)
    session.close()


if __name__ == "__main__":
    main()
