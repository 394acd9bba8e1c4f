"""A loop in the shape of MaxText's: a configuration with checkpointing settings of its own, which stay in force.

Periodic saves follow ``checkpoint_period`` and ``async_checkpointing``. Gracepoint adds the save before a preemption.
Lines with a plus are Gracepoint's, and a comment with a minus is the line that one replaces.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from model import FEATURES, batch, squared_error

import gracepoint


@dataclasses.dataclass(frozen=True)
class Config:
    base_output_directory: str
    steps: int
    enable_checkpointing: bool = True
    async_checkpointing: bool = True
    checkpoint_period: int = 10
    learning_rate: float = 0.05


def create_checkpoint_manager(config: Config) -> ocp.CheckpointManager | None:
    if not config.enable_checkpointing:
        return None
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=config.async_checkpointing,
        save_decision_policy=ocp.checkpoint_managers.FixedIntervalPolicy(config.checkpoint_period),
    )
    return ocp.CheckpointManager(f"{config.base_output_directory}/checkpoints", options=options)


def setup_training_state(config: Config, manager: ocp.CheckpointManager | None) -> tuple[Any, int, Any]:
    optimizer = optax.adam(config.learning_rate)
    params = {"decoder": {"w": jnp.zeros((FEATURES, 1))}}
    state: Any = {"params": params, "opt_state": optimizer.init(params)}
    newest = None if manager is None else manager.latest_step()
    if manager is not None and newest is not None:
        state = manager.restore(newest, args=ocp.args.StandardRestore(state))
    return state, newest or 0, optimizer


def maybe_save_checkpoint(manager: ocp.CheckpointManager | None, state: Any, step: int, *, force: bool = False) -> None:
    if manager is not None:
        manager.save(step, args=ocp.args.StandardSave(state), force=force)
        if force:
            manager.wait_until_finished()


def train_loop(config: Config, report: Callable[[int, float], object]) -> None:
    session = gracepoint.attach(f"{config.base_output_directory}/gracepoint")  # +
    manager = create_checkpoint_manager(config)
    state, start_step, optimizer = setup_training_state(config, manager)

    @jax.jit
    def train_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(lambda p: squared_error(x @ p["decoder"]["w"], y))(state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, loss

    for step in range(start_step + 1, config.steps + 1):
        state, loss = train_step(state, *batch(step))
        report(step, float(loss))
        # - leaving = manager is not None and manager.reached_preemption(step)
        leaving = session.reached_preemption(step)  # +
        maybe_save_checkpoint(manager, state, step, force=leaving)
        if leaving:
            # - break
            session.saved(step)  # +
    if manager is not None:
        manager.close()
    session.close()


def main(directory: str, steps: int, report: Callable[[int, float], object] = print) -> None:
    train_loop(Config(base_output_directory=directory, steps=steps), report)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
