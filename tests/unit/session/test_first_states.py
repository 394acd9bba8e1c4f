"""What people write as ``init``: each start works, the first and the one that restores, and gives what ``init`` gives.

With one device a process of its own runs all of them, as the test process has several.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gracepoint
from gracepoint.errors import CheckpointMismatch, CheckpointRefused, SettingsError
from gracepoint.preemption.exit import ProcessExit
from tests.unit.checkpoint.fakes.engine import sharding

pytestmark = pytest.mark.integration

Made = tuple[Callable[[], Any], Callable[[Any], Any]]


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ProcessExit, "start", lambda self: None)


class Colour(enum.IntEnum):
    RED, BLUE = 1, 2


class Name(enum.StrEnum):
    FIRST = "first"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w", "step"], meta_fields=["apply", "vocabulary"])
@dataclasses.dataclass
class Train:
    w: Any
    step: Any
    apply: Any
    vocabulary: Any


def arrays() -> Any:
    return {"w": jnp.arange(3.0), "weak": jnp.asarray(1e-3), "key": jax.random.key(1), "raw": jax.random.PRNGKey(2)}


def python_leaves() -> Any:
    return {"w": jnp.zeros(2), "i": 3, "f": 1e-3, "b": True, "c": 1 + 2j, "s": "run", "none": None, "big": 2**40}


def enums() -> Any:
    return {"w": jnp.zeros(2), "colour": Colour.BLUE, "name": Name.FIRST}


def numpy_leaves() -> Any:
    return {"a": np.arange(3.0), "b": np.float32(2), "c": np.int64(3), "d": np.zeros((0, 2)), "e": np.array(4)}


def functions() -> Any:
    return {"w": jnp.zeros(2), "f": jax.nn.relu, "g": [lambda x: x, jnp.ones(1)], "h": np.tanh, "i": jnp.float32}


def static_fields() -> Any:
    return Train(jnp.ones(3), 0, lambda x: x, np.arange(3))


def host_code() -> Any:
    w = jax.random.normal(jax.random.key(0), (3,))
    return {"w": w / float(jnp.linalg.norm(w)), "host": np.asarray(w), "list": w.tolist()}


def empty_nodes() -> Any:
    return {"a": {}, "b": [], "c": (), "d": None, "w": jnp.ones(2), "n": {10: 1, 2: jnp.ones(1)}}


def linen_train_state() -> Any:
    import flax.linen as nn
    import optax
    from flax.training import train_state

    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
    return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(jnp.float32(1e-3)))


def take_a_step(state: Any) -> Any:
    return jax.jit(lambda s: s.apply_gradients(grads=jax.tree.map(jnp.ones_like, s.params)))(state)


def optimizer_states() -> Any:
    import optax

    params = {"w": jnp.ones(3), "b": jnp.ones(2)}
    one = optax.multi_transform({"a": optax.adam(1e-3), "b": optax.set_to_zero()}, {"w": "a", "b": "b"})
    other = optax.chain(optax.masked(optax.adamw(1e-3), {"w": True, "b": False}), optax.sgd(1e-2))
    return [each.init(params) for each in (one, other, optax.inject_hyperparams(optax.adam)(learning_rate=1e-3))]


@functools.cache
def rngs() -> Any:
    from flax import nnx

    return nnx.Rngs(0)


def nnx_state_of_rngs_outside() -> Any:
    from flax import nnx

    return nnx.state(nnx.Linear(4, 4, rngs=rngs()))


def nnx_model_and_optimizer() -> Any:
    import optax
    from flax import nnx

    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def nnx_split() -> Any:
    from flax import nnx

    return nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(0)))


def same(state: Any) -> Any:
    return state


ONE_DEVICE: dict[str, Made] = {
    "arrays and keys": (arrays, same),
    "compiled": (jax.jit(arrays), same),
    "compiled, with arguments bound": (functools.partial(jax.jit(lambda n: {"w": jnp.zeros(3), "n": n}), 3), same),
    "numbers and strings of Python": (python_leaves, same),
    "enums": (enums, same),
    "numpy": (numpy_leaves, same),
    "functions as leaves, as in Equinox": (functions, same),
    "static fields that have no equality": (static_fields, same),
    "values that are looked at": (host_code, same),
    "empty nodes and numbers as keys": (empty_nodes, same),
    "Flax's TrainState": (linen_train_state, take_a_step),
    "states of Optax": (optimizer_states, same),
    "rngs made outside": (nnx_state_of_rngs_outside, same),
    "nnx model and optimizer": (nnx_model_and_optimizer, same),
    "nnx split": (nnx_split, same),
    "a loop that counts in Python": (
        jax.jit(lambda: {"w": jnp.zeros(1), "step": 0, "lr": 0.1}),
        lambda state: state | {"step": 7, "lr": 0.5},
    ),
    "a loop that counts in JAX": (
        lambda: {"w": jnp.zeros(1), "step": 0},
        jax.jit(lambda s: s | {"step": s["step"] + 1}),
    ),
}


def leaves_of(state: Any) -> list[tuple[str, str, Any]]:
    """Returns path, type and value of each leaf."""
    return [
        (jax.tree_util.keystr(path), type(leaf).__name__, _value(leaf))
        for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]
    ]


def _value(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return [str(leaf.dtype), bool(getattr(leaf, "weak_type", False)), np.asarray(leaf).tolist()]
    return ["code"] if callable(leaf) else [leaf if isinstance(leaf, int | float) else repr(leaf)]


def two_starts(root: str, init: Callable[[], Any], use: Callable[[Any], Any]) -> list[Any]:
    """Returns the leaves that the first start gave, those that it saved, and those that the second start gave."""
    found: list[Any] = []
    for start in range(2):
        with gracepoint.attach(root, save_every_steps=1) as session:
            state, step = session.restore(init=init)
            assert step == start
            found.append(leaves_of(state))
            state = use(state)
            if start == 0:
                found.append(leaves_of(state))
            session.step(step + 1, state)
    return found


def main() -> None:
    for name, (init, use) in ONE_DEVICE.items():
        with tempfile.TemporaryDirectory() as root:
            try:
                print(json.dumps([name, two_starts(root, init, use)]), flush=True)
            except Exception as error:  # noqa: BLE001 - told, and the next one is tried
                print(json.dumps([name, f"{type(error).__name__}: {error}"]), flush=True)


@pytest.fixture(scope="module")
def on_one_device() -> dict[str, Any]:
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ended = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return dict(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("["))


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_on_one_device_both_starts_give_what_init_gives(on_one_device: dict[str, Any], name: str) -> None:
    found = on_one_device[name]
    assert not isinstance(found, str), found
    first, saved, second = found
    assert [(path, kind) for path, kind, _ in second] == [(path, kind) for path, kind, _ in first]
    for (path, kind, value), (_, kind_saved, expected) in zip(second, saved, strict=True):
        if kind == kind_saved:
            assert value == expected, path
        else:  # a loop may count in Python's numbers or in JAX's
            assert value[-1] == expected[-1], path


def test_several_devices_need_shardings_and_the_leaf_is_named(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path) as session, pytest.raises(SettingsError) as caught:
        session.restore(init=arrays)
    assert "does not give the sharding of state['key'] (and of 3 more leaves)" in str(caught.value)
    assert "jax.jit(init, out_shardings=...)" in str(caught.value)


def test_leaves_that_cannot_be_compiled_are_named_with_what_to_write(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path) as session, pytest.raises(SettingsError) as caught:
        session.restore(init=functions)
    assert "the sharding of state['g'][1] (and of 1 more leaves). Give like=" in str(caught.value)
    assert "as state['f'] is nothing that jax.jit can return" in str(caught.value)


def test_an_init_that_cannot_be_traced_is_said_with_what_to_write(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path) as session, pytest.raises(SettingsError) as caught:
        session.restore(init=host_code)
    assert "ConcretizationTypeError while it was traced" in str(caught.value)
    assert "jax.jit(init, out_shardings=...)" in str(caught.value)


def sharded_form(step: Any) -> Any:
    return Train(jax.ShapeDtypeStruct((4,), jnp.float32, sharding=sharding("x")), step, len, np.arange(3))


def sharded_init(step: Any = 0) -> Any:
    return Train(jax.device_put(jnp.arange(4.0), sharding("x")), step, lambda x: x, np.arange(3))


@pytest.mark.parametrize(
    "form_of_step",
    [
        pytest.param(lambda: 0, id="a number"),
        pytest.param(lambda: jax.ShapeDtypeStruct((), jnp.int32), id="an array"),
        pytest.param(lambda: jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding()), id="an array on all devices"),
    ],
)
def test_on_several_devices_a_form_and_init_give_the_same_in_both_starts(
    tmp_path: Path, form_of_step: Callable[[], Any]
) -> None:
    kinds = []
    for start in range(2):
        with gracepoint.attach(tmp_path, save_every_steps=1) as session:
            state, number = session.restore(sharded_form(form_of_step()), init=sharded_init)
            assert number == start
            kinds.append([(type(leaf), getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(state)])
            session.step(number + 1, state)
    assert kinds[0] == kinds[1]


def test_under_a_mesh_with_explicit_axes_any_init_has_the_shardings(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))

    def init() -> Any:
        w = jax.reshard(jax.random.normal(jax.random.key(0), (8, 4)), jax.sharding.PartitionSpec("x"))
        return {"w": w, "y": w @ jnp.ones((4, 2)), "count": jnp.int32(0), "step": 0, "key": jax.random.key(1)}

    kinds = []
    with jax.set_mesh(mesh):
        for start in range(2):
            with gracepoint.attach(tmp_path, save_every_steps=1) as session:
                state, number = session.restore(init=init)
                assert number == start
                kinds.append([(type(leaf), getattr(leaf, "sharding", None)) for leaf in jax.tree.leaves(state)])
                session.step(number + 1, state)
    assert kinds[0] == kinds[1]
    assert state["w"].sharding.spec == jax.sharding.PartitionSpec("x", None)


@pytest.mark.parametrize("axes", list(jax.sharding.AxisType)[:2], ids=str)
def test_a_compiled_init_may_be_used_under_a_mesh_of_the_only_device(
    tmp_path: Path, axes: jax.sharding.AxisType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(axes,), devices=jax.devices()[:1])
    init = jax.jit(lambda: {"w": jnp.ones((8, 4)), "count": jnp.int32(0), "key": jax.random.key(1)})
    placed = []
    with jax.set_mesh(mesh):
        for start in range(2):
            with gracepoint.attach(tmp_path, save_every_steps=1) as session:
                state, number = session.restore(init=init)
                assert number == start
                placed.append([leaf.sharding for leaf in jax.tree.leaves(state)])
                session.step(number + 1, state)
        assert placed == [[leaf.sharding for leaf in jax.tree.leaves(init())]] * 2


def test_like_may_be_what_jax_says_of_init_under_a_mesh(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    init = jax.jit(lambda: {"w": jax.reshard(jnp.ones((8, 4)), jax.sharding.PartitionSpec("x"))})
    with jax.set_mesh(mesh):
        form = jax.eval_shape(init)
        for start in range(2):
            with gracepoint.attach(tmp_path, save_every_steps=1) as session:
                state, number = session.restore(form, init=init)
                assert number == start
                assert state["w"].sharding == init()["w"].sharding
                session.step(number + 1, state)
    with pytest.raises(CheckpointRefused, match=r"'w': its sharding is on an abstract mesh \{'x': 4\}, .*none is set"):
        gracepoint.checkpoint.restore(tmp_path / "1", form)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        pytest.param({"a": 1}, "expected a jax.Array bool[], found a Python int", id="a number of another kind"),
        pytest.param({"a": np.ones(2)}, "expected a jax.Array bool[], found a numpy array float64[2]", id="numpy"),
        pytest.param({"a": "x"}, "expected a jax.Array bool[], found a string", id="a string"),
        pytest.param({"b": True}, "it made no state['a'], which like has; state['b'], which like", id="another name"),
        pytest.param([True], "it made no state['a'], which like has; state[0], which like", id="a list"),
    ],
)
def test_what_init_makes_otherwise_is_said_with_what_differs(tmp_path: Path, made: Any, message: str) -> None:
    like = {"a": jax.ShapeDtypeStruct((), jnp.bool_)}
    with gracepoint.attach(tmp_path) as session, pytest.raises(SettingsError) as caught:
        session.restore(like, init=lambda: made)
    assert message in str(caught.value)


def test_arrays_that_init_closes_over_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    base, calls = jnp.arange(3.0), []

    def init() -> Any:
        calls.append(1)
        return {"w": base, "doubled": base * 2}

    for start in range(2):
        with gracepoint.attach(tmp_path, save_every_steps=1) as session:
            state, step = session.restore(init=init)
            session.step(step + 1, state)
        assert (step, len(calls)) == (start, start + 1)
    np.testing.assert_array_equal(base, np.arange(3.0))


MASKED = np.ma.masked_array([1.0, 2.0], [True, False])


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        pytest.param(MASKED, r"\['bad'\]: expected a plain numpy array, found a MaskedArray.*\.mask", id="masked"),
        pytest.param(np.ones((1, 2)).view(np.matrix), r"\['bad'\]: expected a plain .*found a matrix", id="matrix"),
        pytest.param(np.zeros(2, [("a", "f4")]), r"\['bad'\]: cannot save arrays of dtype", id="structured"),
        pytest.param(np.array([object()]), r"\['bad'\]: cannot save arrays of dtype object", id="objects"),
        pytest.param(np.array(["2020"], "M8[D]"), r"\['bad'\]: cannot save arrays of dtype datetime64", id="dates"),
        pytest.param({1, 2}, r"\['bad'\]: cannot save a value of type set", id="set"),
    ],
)
def test_a_leaf_that_cannot_come_back_is_found_at_restore_and_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leaf: Any, message: str
) -> None:
    state = {"w": jnp.zeros(2), "bad": leaf}
    with gracepoint.attach(tmp_path) as session, pytest.raises(CheckpointRefused, match=message):
        session.step(1, state)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with gracepoint.attach(tmp_path) as session, pytest.raises(CheckpointRefused, match=message):
        session.restore(init=lambda: state)


def test_a_number_that_does_not_fit_into_the_array_is_a_mismatch(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.step(1, {"w": jnp.zeros(2), "step": 2**40})
    with (
        gracepoint.attach(tmp_path) as session,
        pytest.raises(CheckpointMismatch, match="1099511627776, which does not"),
    ):
        session.restore(like={"w": jnp.zeros(2), "step": jnp.int32(0)})


if __name__ == "__main__":
    main()
