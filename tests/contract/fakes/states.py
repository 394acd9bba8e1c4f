"""States of every kind that training code has, small, on the devices of the test process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.experimental.layout import Format, Layout

from tests.jax_settings import no_mesh
from tests.unit.checkpoint.fakes.engine import Moments, Params, sharding


class Empty(NamedTuple):
    """A namedtuple without fields, as optax's states without any state are."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Outer:
    inner: Params
    rest: Any


def spread(*shape: int, dtype: Any = np.float32) -> jax.Array:
    """Returns distinct values over the devices."""
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return jax.device_put(values, sharding(*("x", "y")[: len(shape)]))


def containers() -> Any:
    return {
        "dict": {"b": {"c": spread(4, 4)}, "a": spread(2, 4)},
        "list": [spread(4), [spread(2, 2), {"x": spread(8)}]],
        "tuple": (spread(4), (spread(2, 2),)),
        "namedtuple": Moments(mu=spread(4), nu=[spread(2, 2)]),
        "dataclass": Outer(Params(w=spread(4, 2), b=spread(4)), rest={"deep": (spread(4),)}),
    }


def empties() -> Any:
    return {
        "w": spread(4),
        "none": None,
        "dict": {},
        "list": [],
        "tuple": (),
        "inner": {"none": None, "dict": {}, "list": [None, {}]},
    }


def scalars() -> Any:
    return {
        "int": 7,
        "float": 0.1,
        "bool": True,
        "negative zero": -0.0,
        "large": 2**53 + 1,
        "numpy": np.float32(0.1),
        "array": jnp.float32(3),
        "array without axes": np.asarray(5),
        "weak": jnp.asarray(0.1),
    }


def strings() -> Any:
    return {"w": spread(4), "name": "a name", "empty": "", "deep": {"unicode": "Größe ∆ 名前", "quoted": '"a\\b"\n'}}


def numpy_arrays() -> Any:
    return {
        "float64": np.linspace(0, 1, 7),
        "int64": np.arange(6).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "view": np.arange(20)[::3],
        "bool": np.asarray([True, False]),
        "uint8": np.arange(256, dtype=np.uint8),
        "complex": np.asarray([1 + 2j, -0.0j]),
        "bfloat16": np.arange(4).astype(jnp.bfloat16),
    }


DTYPES = (
    *("bool", "int4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("bfloat16", "float16", "float32", "complex64"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)


def dtypes() -> Any:
    return {name: spread(4, 2, dtype=jnp.dtype(name)) for name in DTYPES}


def special_values() -> Any:
    payload = np.asarray([0x7FC00001, 0xFF800001, 0x80000000, 1], np.uint32).view(np.float32)  # NaNs, -0, a subnormal
    return {"float": jax.device_put(payload, sharding("x")), "inf": jnp.asarray([jnp.inf, -jnp.inf, jnp.nan])}


def zero_size() -> Any:
    return {"w": spread(4), "numpy": np.zeros((0, 3), np.float32), "deep": {"numpy": np.zeros((2, 0), np.int32)}}


def keys() -> Any:
    return {
        "one": jax.random.key(3),
        "many": jax.device_put(jax.random.split(jax.random.key(1), 4), sharding("x")),
        "grid": jax.device_put(jax.random.split(jax.random.key(1), (4, 2)), sharding("x", "y")),
        "rbg": jax.random.key(3, impl="rbg"),
        "raw": jax.random.PRNGKey(0),
    }


def names() -> Any:
    return {
        "with.dots": {"a.b": spread(4)},
        "with spaces": {" lead": spread(4), "trail ": 1},
        "Größe ∆ 名前": {"ключ": spread(2, 2)},
        "UPPER": spread(4),
        "upper": spread(2, 2),
        "star*?[x]": 1,
        "quote'\"": np.ones(2),
        "percent%20": 2,
        "-dash": 3,
        "5": [spread(4)],
    }


def slashes() -> Any:
    return {"with/slash": {"a/b": spread(4)}, "w": spread(2, 2)}


def layouts() -> Any:
    turned = Format(Layout(major_to_minor=(1, 0)), sharding("x", "y"))
    return {"turned": jax.device_put(np.arange(32.0, dtype=np.float32).reshape(4, 8), turned), "usual": spread(4, 8)}


def shardings() -> Any:
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    placed = {
        "both": sharding("x", "y"),
        "merged": sharding(("x", "y")),
        "inner": sharding(None, "y"),
        "replicated": sharding(),
        "single": jax.sharding.SingleDeviceSharding(jax.devices()[-1]),
    }
    return {name: jax.device_put(values, where) for name, where in placed.items()}


def train_state() -> Any:
    """A flax TrainState with optax's AdamW, after one step."""
    network = linen.Sequential([linen.Dense(8), linen.relu, linen.Dense(4)])
    variables = network.init(jax.random.key(0), jnp.ones((1, 4)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 100)))
    made = TrainState.create(apply_fn=network.apply, params=variables["params"], tx=optimizer)
    return made.apply_gradients(grads=jax.tree.map(jnp.ones_like, made.params))


def nnx_state() -> Any:
    """The state of a flax nnx model as a plain dict."""
    return nnx.to_pure_dict(nnx.state(nnx.Linear(4, 2, rngs=nnx.Rngs(0))))


def nnx_states() -> Any:
    """The states of a flax nnx model and of its optimizer as nnx has them, with a node around each array."""
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    return {"model": nnx.state(model), "optimizer": nnx.state(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))}


def boxed_parameters() -> Any:
    """Parameters in flax's boxes with names of axes: ``Partitioned`` and ``LogicallyPartitioned``."""
    kernel = linen.initializers.lecun_normal()
    network = linen.Sequential(
        [
            linen.Dense(4, kernel_init=linen.with_partitioning(kernel, ("x", "y"))),
            linen.Dense(2, kernel_init=linen.with_logical_partitioning(kernel, ("embed", "mlp"))),
        ]
    )
    with no_mesh():  # flax constrains the shardings of what it makes, which is an error where axes are explicit
        return network.init(jax.random.key(0), jnp.ones((1, 4)))


def optax_states() -> Any:
    params = {"w": spread(4, 2), "b": spread(4)}
    makers: dict[str, optax.GradientTransformation] = {
        "adamw": optax.adamw(1e-3),
        "sgd": optax.sgd(0.1, momentum=0.9),
        "adafactor": optax.adafactor(1e-3),
        "lion": optax.lion(1e-3),
        "accumulated": optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        "masked": optax.masked(optax.adam(1e-3), {"w": True, "b": False}),
        "several": optax.multi_transform({"a": optax.adam(1e-3), "z": optax.set_to_zero()}, {"w": "a", "b": "z"}),
        "injected": optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    }
    return {name: maker.init(params) for name, maker in makers.items()}


STATES: dict[str, Callable[[], Any]] = {
    "containers": containers,
    "empty containers and None": empties,
    "scalars": scalars,
    "strings": strings,
    "numpy arrays": numpy_arrays,
    "dtypes": dtypes,
    "special values": special_values,
    "arrays without elements": zero_size,
    "typed PRNG keys": keys,
    "odd names": names,
    "names with slashes": slashes,
    "device layouts": layouts,
    "shardings": shardings,
    "flax TrainState": train_state,
    "flax nnx": nnx_state,
    "flax nnx with its nodes": nnx_states,
    "boxed parameters": boxed_parameters,
    "optax states": optax_states,
}
