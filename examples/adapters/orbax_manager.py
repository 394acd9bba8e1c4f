"""Orbax's CheckpointManager keeps saving, and Gracepoint says when. Lines with a plus are Gracepoint's,
and a comment with a minus is the line that one replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from model import FEATURES, batch, squared_error

import gracepoint

State = dict[str, jax.Array]


@jax.jit
def train_step(state: State, x: jax.Array, y: jax.Array) -> tuple[State, jax.Array]:
    loss, gradients = jax.value_and_grad(lambda state: squared_error(x @ state["w"], y))(state)
    return jax.tree.map(lambda value, gradient: value - 0.05 * gradient, state, gradients), loss


def main(directory: str, steps: int, report: Callable[[int, float], object] = print) -> None:
    session = gracepoint.attach(f"{directory}/gracepoint")  # +
    # Saves at preemptions are asked for below, so that the manager need not look for them.
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(10)
    )
    manager = ocp.CheckpointManager(f"{directory}/steps", options=options)
    state, newest = {"w": jnp.zeros((FEATURES, 1))}, manager.latest_step() or 0
    if newest:
        state = manager.restore(newest, args=ocp.args.StandardRestore(state))
    for step in range(newest + 1, steps + 1):
        state, loss = train_step(state, *batch(step))
        report(step, float(loss))
        # - leaving = manager.reached_preemption(step)
        leaving = session.reached_preemption(step)  # +
        manager.save(step, args=ocp.args.StandardSave(state), force=leaving)
        if leaving:
            manager.wait_until_finished()
            # - break
            session.saved(step)  # +
    manager.close()
    session.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
