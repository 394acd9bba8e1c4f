"""The engine's round trips on the devices of each platform that is there: the CPU's, and a GPU's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests import accelerators
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, save

pytestmark = pytest.mark.integration

DTYPES = ("bool", "int4", "int8", "uint32", "bfloat16", "float16", "float32", "complex64", "float8_e4m3fn")


@pytest.fixture(params=["cpu", "gpu"])
def devices(request: pytest.FixtureRequest) -> Sequence[Any]:
    """Up to four devices of a platform: one, two or four."""
    if request.param == "gpu" and not accelerators.has_gpu():
        pytest.skip(accelerators.NO_GPU)
    found: Sequence[Any] = jax.devices(request.param)
    return found[: 4 if len(found) >= 4 else 2 if len(found) >= 2 else 1]


def over(devices: Sequence[Any], *spec: Any) -> NamedSharding:
    mesh = Mesh(np.array(devices).reshape(max(1, len(devices) // 2), -1), ("x", "y"))
    return NamedSharding(mesh, PartitionSpec(*spec))


def state(devices: Sequence[Any]) -> Any:
    values = np.arange(64).reshape(8, 8)
    keys = jax.random.key_data(jax.random.split(jax.random.key(1), 4))
    return {
        "dtypes": {name: jax.device_put(values.astype(jnp.dtype(name)), over(devices, "x", "y")) for name in DTYPES},
        "replicated": jax.device_put(values.astype(np.float32) / 3, over(devices)),
        "single": jax.device_put(np.asarray([np.nan, -0.0, np.inf], np.float32), SingleDeviceSharding(devices[-1])),
        "keys": jax.random.wrap_key_data(jax.device_put(keys, over(devices, "x"))),
        "numpy": np.arange(3),
        "count": 3,
    }


def assert_placed_as(found: Any, expected: Any) -> None:
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(other, jax.Array):
            assert leaf.sharding == other.sharding


def test_a_state_comes_back_bit_for_bit_to_where_it_was(devices: Sequence[Any], tmp_path: Path) -> None:
    saved = state(devices)
    save(engine(tmp_path), 1, saved)
    for like in (saved, None):
        restored = restore(tmp_path, like)
        assert restored is not None
        assert_same(restored.state, saved)
        assert_placed_as(restored.state, saved)


def test_a_state_that_is_donated_after_a_background_save_comes_back(devices: Sequence[Any], tmp_path: Path) -> None:
    saved = {"w": jax.device_put(np.arange(1 << 16, dtype=np.float32), over(devices, ("x", "y")))}
    expected = np.asarray(saved["w"]).copy()
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x * 0, state), donate_argnums=0)
    checkpointer = engine(tmp_path)
    checkpointer.save_in_background(1, saved, {})
    jax.block_until_ready(overwrite(saved))
    checkpointer.close(60)
    restored = restore(tmp_path, {"w": np.zeros(1 << 16, np.float32)})
    assert restored is not None
    np.testing.assert_array_equal(restored.state["w"], expected)


def test_a_state_comes_back_in_another_sharding_and_layout(devices: Sequence[Any], tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    save(engine(tmp_path), 1, {"w": jax.device_put(values, over(devices, "x", "y"))})
    turned = Format(Layout(major_to_minor=(1, 0)), over(devices, "y"))
    restored = restore(tmp_path, {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=turned)})
    assert restored is not None
    assert restored.state["w"].sharding == turned.sharding
    assert restored.state["w"].format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(restored.state["w"], values)


def test_a_state_moves_between_the_host_and_devices(devices: Sequence[Any], tmp_path: Path) -> None:
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    save(engine(tmp_path), 1, {"w": jax.device_put(values, over(devices, "x"))})
    (cpu, *_) = jax.devices("cpu")
    for where in (SingleDeviceSharding(cpu), over(devices, None, "y")):
        restored = restore(tmp_path, {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=where)})
        assert restored is not None
        assert restored.state["w"].sharding == where
        np.testing.assert_array_equal(restored.state["w"], values)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_orbax_and_we_restore_each_other_s(devices: Sequence[Any], tmp_path: Path) -> None:
    saved = state(devices)
    save(engine(tmp_path / "ours"), 1, saved)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "ours" / "1" / "default", saved)
        assert_same(found, saved)
        assert_placed_as(found, saved)
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        manager.save(1, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
    restored = restore(tmp_path / "theirs", saved)
    assert restored is not None
    assert_same(restored.state, saved)
    assert_placed_as(restored.state, saved)
