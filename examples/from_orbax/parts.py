"""What has nothing to do with checkpoints: a model, its optimizer, a step, and data with a position."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

State = dict[str, Any]

_WIDTH = 16
_OPTIMIZER = optax.adam(1e-2)


class Batches:
    """Batches of data. This process's part, in an order that the seed and the position determine."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.position = 0

    def __next__(self) -> npt.NDArray[np.float32]:
        self.position += 1
        return np.random.default_rng([self.seed, self.position]).standard_normal((8, _WIDTH), np.float32)


def _sharding(shape: tuple[int, ...]) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    is_divisible = bool(shape) and shape[0] % jax.device_count() == 0
    return NamedSharding(mesh, PartitionSpec("data") if is_divisible else PartitionSpec())


def _first_state(seed: int) -> State:
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {
        "in": jax.random.normal(keys[0], (_WIDTH, _WIDTH)),
        "out": {"w": jax.random.normal(keys[1], (_WIDTH, 1)), "b": jnp.zeros(())},
    }
    return {"params": params, "opt_state": _OPTIMIZER.init(params), "step": jnp.zeros((), jnp.int32)}


def form(seed: int) -> State:
    """Returns the shapes, types and shardings of the state. Computes nothing."""
    found: State = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(leaf.shape)),
        jax.eval_shape(_first_state, seed),
    )
    return found


def first_state(seed: int) -> State:
    """Returns the state that training begins with."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, form(seed))
    found: State = jax.jit(_first_state, out_shardings=shardings, static_argnums=0)(seed)
    return found


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: State, batch: jax.Array) -> tuple[State, jax.Array]:
    """Returns the state after one step, and the loss. The state that is passed in is donated."""

    def loss_of(params: Any) -> jax.Array:
        found = jnp.tanh(batch @ params["in"]) @ params["out"]["w"] + params["out"]["b"]
        return jnp.mean((found - batch[:, :1]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["params"])
    updates, opt_state = _OPTIMIZER.update(gradients, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss
