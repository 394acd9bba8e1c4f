"""Trains on records of which each must be used once, whatever the number of processes.

The arrays depend on nothing that the number of processes could change, so that their values are known: an array of
floats that is halved or doubled in each step, and one that counts how often each record was used. Some parts of the
data belong to one process each, as host states.

Tests run ``train`` in processes of their own. As a script it runs in a trainer's container, and writes what it tells
into files:

    python elastic_training.py --output=FOLDER --steps=150 --pace=0.1
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import gracepoint
from gracepoint.elastic import ElasticData, Share, dealt_out

RECORDS, GLOBAL_BATCH, PARTS = 2400, 12, 7


def order() -> np.ndarray:
    """The order of the records, the same for every number of processes."""
    return np.random.default_rng(5).permutation(RECORDS).astype(np.int32)


def first_floats() -> np.ndarray:
    """The values of the array of floats at step 0."""
    return np.random.default_rng(6).standard_normal((24, 64)).astype(np.float32)


def floats_at(step: int) -> np.ndarray:
    """The values of the array of floats after so many steps."""
    floats = first_floats()
    for done in range(step):
        floats = floats * _factor(done)
    return floats


def _factor(step: int) -> np.float32:
    """Exact, however the product is computed."""
    return np.float32(2.0 if step % 2 == 0 else 0.5)


def batches(share: Share) -> Iterator[np.ndarray]:
    """The batches of one process."""
    mine = order()[share.begins :: share.processes]
    for start in range(0, len(mine), share.batch):
        yield mine[start : start + share.batch]


def train(
    session: gracepoint.Session, steps: int, pace_s: float, tell: Callable[[str, Any], None], *, ballast_mib: int = 0
) -> None:
    """Trains until ``steps``, or until a preemption ends it.

    Args:
        session: The attached session.
        steps: Number of steps.
        pace_s: Seconds between steps at least.
        tell: Called with a word and a value: what was restored, the records that this process takes in each step, and
            at the end the bits of the arrays and the parts.
        ballast_mib: So much more each device has, which changes in each step.
    """
    import jax  # not before the session is attached, which joins the processes
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

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
        made = {"floats": jnp.asarray(first_floats()), "used": jnp.zeros(RECORDS, jnp.int32)}
        return made | {name: jnp.zeros((ballast_mib * mesh.size, 1 << 18), jnp.int32) for name in ballast}

    ballast = ["ballast"] if ballast_mib else []
    sharded = dict.fromkeys(["floats", "used", *ballast], split)
    state, step = session.restore(
        init=jax.jit(init, out_shardings=sharded),
        data=data,
    )
    tell("restored", [step, parts])

    def update(state: dict[str, jax.Array], batch: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
        factor = jnp.where(step % 2 == 0, 2.0, 0.5).astype(jnp.float32)
        trained = {"floats": state["floats"] * factor, "used": state["used"].at[batch].add(1)}
        return trained | {name: state[name] + 1 for name in ballast}

    train_step = jax.jit(update, donate_argnums=0, out_shardings=sharded)
    while step < steps:
        mine = next(data)
        batch = jax.make_array_from_process_local_data(split, mine)
        state = train_step(state, batch, jax.device_put(np.int32(step), whole))
        step += 1
        for part in parts.values():
            part["read"] += 1
        tell("took", [step, mine.tolist()])
        time.sleep(pace_s)
        session.step(step, state)
    for name in ballast:
        assert (np.asarray(state.pop(name).addressable_data(0)) == step).all()
    gather = jax.jit(lambda state: state, out_shardings={"floats": whole, "used": whole})
    found = {name: np.asarray(value.addressable_data(0)) for name, value in gather(state).items()}
    tell("bits", [found["floats"].view(np.uint32).tolist(), found["used"].tolist()])
    tell("parts", parts)
    session.close()


def main() -> None:
    """Trains as the flags say, under the settings of the environment."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True)
    flags, _ = parser.parse_known_args()  # the others are the example's
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("gracepoint").setLevel(logging.INFO)
    session = gracepoint.attach()
    import jax

    place = f"process-{jax.process_index()}-of-{jax.process_count()}"
    with open(flags.output / f"{time.time_ns()}.{place}.jsonl", "xb", buffering=0) as file:

        def write(word: str, value: Any) -> None:
            # Whole lines at once, so that a killed process leaves no half line behind it.
            file.write(f"{json.dumps([word, value])}\n".encode())

        train(session, flags.steps, flags.pace, write)


if __name__ == "__main__":
    main()
