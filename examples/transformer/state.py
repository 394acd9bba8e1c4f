"""The train state, sharded over every device of every process, and the step that changes it.

Parameters and both of Adam's moments are split over all devices (as FSDP does); the batch is split over the
same devices. The state also holds the key that dropout draws from, so a run that goes on from a saved state
drops the same units as one that never stopped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import model
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

State = dict[str, Any]
Step = Callable[[State, jax.Array], tuple[State, jax.Array]]

AXIS = "devices"
_BETA1, _BETA2, _EPSILON = 0.9, 0.99, 1e-8


def mesh() -> Mesh:
    """Returns all devices of all processes in one row."""
    return Mesh(np.array(jax.devices()), (AXIS,))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns how a batch lies on the devices: split by example."""
    return NamedSharding(mesh, PartitionSpec(AXIS))


def init(config: model.Config, mesh: Mesh, seed: int) -> Callable[[], State]:
    """Returns the compiled function that makes the state of step 0; no process ever holds the whole of it."""

    def build() -> State:
        parameters_key, dropout_key = jax.random.split(jax.random.key(seed))
        parameters = model.init(config, parameters_key)
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        return {
            "parameters": parameters,
            "mean": zeros,
            "variance": zeros,
            "dropout": jax.random.key_data(dropout_key),
            "step": jnp.int32(0),
        }

    compiled: Callable[[], State] = jax.jit(build, out_shardings=_shardings(jax.eval_shape(build), mesh))
    return compiled


def train_step(config: model.Config, mesh: Mesh, learning_rate: float) -> Step:
    """Returns the compiled ``(state, batch) -> (state, loss)``. It donates the state that it is given."""

    def step(state: State, rows: jax.Array) -> tuple[State, jax.Array]:
        dropout_key, next_key = jax.random.split(jax.random.wrap_key_data(state["dropout"]))
        # Each process gathers the parameters once a step, and keeps only its part of what comes out.
        gathered = jax.lax.with_sharding_constraint(state["parameters"], NamedSharding(mesh, PartitionSpec()))
        loss, gradients = jax.value_and_grad(lambda p: model.loss(config, p, rows, dropout_key))(gathered)
        count = state["step"] + 1
        mean = jax.tree.map(lambda m, g: _BETA1 * m + (1 - _BETA1) * g, state["mean"], gradients)
        variance = jax.tree.map(lambda v, g: _BETA2 * v + (1 - _BETA2) * g * g, state["variance"], gradients)
        rate = learning_rate * jnp.sqrt(1 - _BETA2**count) / (1 - _BETA1**count)
        parameters = jax.tree.map(
            lambda p, m, v: p - rate * m / (jnp.sqrt(v) + _EPSILON), state["parameters"], mean, variance
        )
        new = {
            "parameters": parameters,
            "mean": mean,
            "variance": variance,
            "dropout": jax.random.key_data(next_key),
            "step": count,
        }
        return jax.lax.with_sharding_constraint(new, _shardings(new, mesh)), loss

    replicated = NamedSharding(mesh, PartitionSpec())
    compiled: Step = jax.jit(step, donate_argnums=0, out_shardings=(None, replicated))
    return compiled


def digest(state: State) -> str:
    """Returns a SHA-256 over this process's shards of every array, in order; waits for the devices."""
    sha = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        sha.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}\n".encode())
        for shard in sorted(leaf.addressable_shards, key=lambda shard: shard.device.id):
            sha.update(np.asarray(shard.data).tobytes())
    return sha.hexdigest()


def _shardings(tree: Any, mesh: Mesh) -> Any:
    """Splits every array on its longest axis that all devices can share; others are replicated."""

    def sharding(leaf: Any) -> NamedSharding:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0 and size >= 16]
        if not axes:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(axes, key=lambda axis: leaf.shape[axis])
        return NamedSharding(mesh, PartitionSpec(*([None] * longest), AXIS))

    return jax.tree.map(sharding, tree)
