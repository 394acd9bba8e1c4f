"""Flax Linen with optax: the loop of a TrainState. Lines with a plus are Gracepoint's, and a comment with a minus
is the line that one replaces."""

from __future__ import annotations

import sys
from collections.abc import Callable

import flax.linen as nn
import jax
import optax
from flax.training.train_state import TrainState
from model import FEATURES, batch, squared_error

import gracepoint


@jax.jit
def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    loss, gradients = jax.value_and_grad(lambda params: squared_error(state.apply_fn(params, x), y))(state.params)
    return state.apply_gradients(grads=gradients), loss


def main(directory: str, steps: int, report: Callable[[int, float], object] = print) -> None:
    model = nn.Dense(1)
    params = model.init(jax.random.key(0), jax.numpy.zeros((1, FEATURES)))
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.05))
    session = gracepoint.attach(directory)  # +
    # - first = 0
    state, first = session.restore(like=state)  # +
    for step in range(first + 1, steps + 1):
        state, loss = train_step(state, *batch(step))
        report(step, float(loss))
        session.step(step, state)  # +
    session.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
