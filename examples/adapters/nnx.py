"""Flax NNX with optax: modules with their own state. Lines with a plus are Gracepoint's."""

from __future__ import annotations

import sys
from collections.abc import Callable

import jax
import optax
from flax import nnx
from model import FEATURES, batch, squared_error

import gracepoint


@nnx.jit
def train_step(model: nnx.Linear, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(lambda model: squared_error(model(x), y))(model)
    optimizer.update(model, gradients)
    return loss


def main(directory: str, steps: int, report: Callable[[int, float], object] = print) -> None:
    model = nnx.Linear(FEATURES, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.05), wrt=nnx.Param)
    session = gracepoint.attach(directory)  # +
    nnx.update((model, optimizer), session.restore(like=nnx.state((model, optimizer)))[0])  # +
    for step in range(int(optimizer.step[...]) + 1, steps + 1):
        loss = train_step(model, optimizer, *batch(step))
        report(step, float(loss))
        session.step(step, nnx.state((model, optimizer)))  # +
    session.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
