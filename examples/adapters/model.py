"""What the examples beside this one train: a line through noisy points. Every batch follows from its step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

BATCH, FEATURES = 16, 8


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(step)
    x = random.normal(size=(BATCH, FEATURES)).astype(np.float32)
    return x, (x.sum(axis=1, keepdims=True) + 0.1 * random.normal(size=(BATCH, 1))).astype(np.float32)


def squared_error(predicted: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((predicted - y) ** 2)
