"""What a training loop sets for JAX changes nothing of what is saved and restored: states of every kind, each setting.

Values leave CPU devices as they leave accelerators (``pinned_host_transfer``), with slices of all but the smallest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gracepoint import checkpoint
from gracepoint.checkpoint import AsyncCheckpointer, RestoreArgs, WriteOptions
from gracepoint.checkpoint.saving import device_copy
from gracepoint.multihost import broadcast_one_to_all
from tests.contract.fakes.states import nnx_states, train_state
from tests.jax_settings import SETTINGS, mesh_of_all
from tests.unit.checkpoint.fakes.engine import assert_same, bits, rich_state

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

AS_ON_ACCELERATORS = WriteOptions(pinned_host_transfer=True, target_chunk_bytes=1 << 10)


def on_many_devices() -> Any:
    large = jax.device_put(np.arange(64.0 * 64).reshape(64, 64).astype(np.float32), rich_state()["params"].w.sharding)
    return rich_state() | {"large": large, "flax": train_state(), "nnx": nnx_states()}


def on_one_device() -> Any:
    """As in a process of one device."""
    return jax.tree.map(lambda leaf: leaf if not is_array(leaf) else moved(leaf, jax.devices()[1]), on_many_devices())


def with_explicit_axes() -> Any:
    mesh = mesh_of_all(AxisType.Explicit)
    split, same = NamedSharding(mesh, PartitionSpec("loop")), NamedSharding(mesh, PartitionSpec())
    return {
        "split": jax.device_put(np.arange(64.0 * 64).reshape(64, 64), split),
        "same": jax.device_put(jnp.asarray([jnp.nan, 1.0]), same),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), split),
    }


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array)


def moved(leaf: jax.Array, device: jax.Device) -> jax.Array:
    return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(device))


def abstract(state: Any) -> Any:
    def form(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) if is_array(leaf) else leaf

    return jax.tree.map(form, state)


def in_any_order(state: Any) -> list[str]:
    return sorted(repr(bits(leaf)) for leaf in jax.tree.leaves(state) if is_array(leaf))


PLACES: dict[str, Callable[[], Any]] = {
    "on many devices": on_many_devices,
    "on one device": on_one_device,
    "with explicit axes": with_explicit_axes,
}


@pytest.mark.long
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SETTINGS)
def test_what_was_saved_is_restored_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    monkeypatch.setattr(device_copy, "_WHOLE_BYTES", 4 << 10)
    state = PLACES[place]()
    like, keys = abstract(state), {"one": moved(jax.random.key(3), jax.devices()[2])}
    with AsyncCheckpointer(options=AS_ON_ACCELERATORS) as checkpointer, SETTINGS[name]():
        checkpointer.prepare(state)
        checkpointer.save(tmp_path / "a", state)
        checkpointer.wait_until_finished()
        checkpoint.save(tmp_path / "b", state)
        found = [checkpoint.restore(tmp_path / saved, like) for saved in "ab"]
        as_saved = checkpoint.restore(tmp_path / "a")
        on_host = checkpoint.restore(tmp_path / "a", restore_args=RestoreArgs(restore_type=np.ndarray))
        checkpointer.metadata(tmp_path / "a")
        told = broadcast_one_to_all(keys)
    for each in found:
        assert_same(each, state)
    assert in_any_order(as_saved) == in_any_order(state)  # a dataclass is restored as a dict, whose order is another
    assert not any(map(is_array, jax.tree.leaves(on_host)))
    assert_same(told, keys)
