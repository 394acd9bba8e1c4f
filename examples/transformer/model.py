"""A small byte-level transformer in plain JAX: parameters are a dict of arrays, the model is a function."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

VOCABULARY = 256  # bytes

Parameters = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model; the defaults give about half a million parameters."""

    length: int = 64
    width: int = 128
    layers: int = 2
    heads: int = 4
    dropout: float = 0.1


def init(config: Config, key: jax.Array) -> Parameters:
    """Returns fresh parameters. Those of the layers are stacked: their first axis is the layer."""
    width, hidden = config.width, 4 * config.width
    keys = iter(jax.random.split(key, 7))

    def normal(*shape: int, scale: float) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape)

    return {
        "embedding": normal(VOCABULARY, width, scale=0.02),
        "position": normal(config.length, width, scale=0.02),
        "layers": {
            "attention_norm": jnp.ones((config.layers, width)),
            "qkv": normal(config.layers, width, 3 * width, scale=width**-0.5),
            "attention_out": normal(config.layers, width, width, scale=width**-0.5 / config.layers),
            "mlp_norm": jnp.ones((config.layers, width)),
            "mlp_in": normal(config.layers, width, hidden, scale=width**-0.5),
            "mlp_out": normal(config.layers, hidden, width, scale=hidden**-0.5 / config.layers),
        },
        "norm": jnp.ones(width),
        "head": normal(width, VOCABULARY, scale=width**-0.5),
    }


def loss(config: Config, parameters: Parameters, rows: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy, in nats a byte, of predicting each byte from those before it.

    Args:
        config: The sizes that ``parameters`` were made with.
        parameters: From ``init``.
        rows: uint8, (examples, ``config.length + 1``).
        key: For dropout.
    """
    rows = rows.astype(jnp.int32)
    inputs, targets = rows[:, :-1], rows[:, 1:]
    x = parameters["embedding"][inputs] + parameters["position"]
    keys = jax.random.split(key, config.layers)

    def layer(x: jax.Array, layer_and_key: tuple[Parameters, jax.Array]) -> tuple[jax.Array, None]:
        weights, key = layer_and_key
        attention_key, mlp_key = jax.random.split(key)
        attended = _attention(config, _norm(x, weights["attention_norm"]), weights)
        x = x + _dropout(config, attended, attention_key)
        hidden = jax.nn.gelu(_norm(x, weights["mlp_norm"]) @ weights["mlp_in"])
        return x + _dropout(config, hidden @ weights["mlp_out"], mlp_key), None

    x, _ = jax.lax.scan(layer, x, (parameters["layers"], keys))
    logits = _norm(x, parameters["norm"]) @ parameters["head"]
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -chosen.mean()


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(config: Config, x: jax.Array, weights: Parameters) -> jax.Array:
    examples, length, width = x.shape
    qkv = (x @ weights["qkv"]).reshape(examples, length, 3, config.heads, width // config.heads)
    attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
    return attended.reshape(examples, length, width) @ weights["attention_out"]


def _dropout(config: Config, x: jax.Array, key: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(key, 1 - config.dropout, x.shape)
    return jnp.where(kept, x / (1 - config.dropout), 0)
