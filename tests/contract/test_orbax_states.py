"""States of every kind go both ways between Gracepoint and stock Orbax, bit for bit, with their shardings.

All of them are one checkpoint, as most of what a checkpoint costs it costs once; a failure names the leaf.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata.pytree_metadata_options import PyTreeMetadataOptions

from gracepoint.checkpoint.metadata import metadata_of
from gracepoint.checkpoint.options import RestoreArgs, RestoreOptions
from gracepoint.checkpoint.restoring.restore_tree import read_tree
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt
from tests.contract.fakes.states import STATES, names, spread
from tests.jax_settings import no_mesh
from tests.unit.checkpoint.fakes.engine import assert_same, bits, engine, save, sharding

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

LONG = os.environ.get("LONG_TESTS") == "1"
LEAVES = 10_000 if LONG else 500  # Orbax takes about a minute for so many
LARGE_BYTES = (256 if LONG else 16) << 20
NOT_OF_ORBAX = ("arrays without elements",)  # it refuses to save them
FORMS: dict[str, dict[str, Any]] = {
    "default (OCDBT, zstd)": {},
    "zarr3 in OCDBT": {"use_ocdbt": True, "use_zarr3": True},
    "zarr2 files": {"use_ocdbt": False},
    "zarr2 files, uncompressed": {"use_ocdbt": False, "use_compression": False},
    "zarr3 files": {"use_ocdbt": False, "use_zarr3": True},
    "rich types in metadata": {
        "pytree_metadata_options": PyTreeMetadataOptions(support_rich_types=True),
    },
}


@functools.cache
def state_of(name: str) -> Any:
    return STATES[name]()


def all_states(*left_out: str) -> dict[str, Any]:
    return {name: state_of(name) for name in STATES if name not in left_out}


def read(folder: Path, like: Any = None, args: Any = None, **options: Any) -> Any:
    deadline = Deadline.after(100, time.monotonic)
    return read_tree(storage_path(folder), like, args, options=RestoreOptions(**options), deadline=deadline)


def assert_same_shardings(found: Any, expected: Any) -> None:
    there = dict(jax.tree_util.tree_flatten_with_path(expected)[0])
    for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
        if isinstance(leaf, jax.Array) and there[path].committed:
            assert leaf.sharding.is_equivalent_to(there[path].sharding, leaf.ndim), jax.tree_util.keystr(path)


def path_strings(tree: Any) -> dict[str, Any]:
    """Returns leaves by path, whatever the containers are."""
    return {
        ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))) for key in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def as_python(leaf: Any) -> Any:
    """Returns what a leaf is restored as by one who was told nothing: numbers are Python's."""
    return leaf.item() if isinstance(leaf, np.generic) else leaf


# --- ours, read by Orbax


def standard(state: Any) -> Any:
    """Returns the state without what Orbax's StandardCheckpointer does not take: strings, and numpy's own numbers."""
    scalars = state["scalars"] | {"numpy": np.asarray(state["scalars"]["numpy"])}
    return {name: tree for name, tree in state.items() if name != "strings"} | {"scalars": scalars}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Step 1 has all states, step 2 those that a StandardCheckpointer takes."""
    root, state = tmp_path_factory.mktemp("ours"), all_states()
    checkpointer = engine(root)
    save(checkpointer, 1, state)
    save(checkpointer, 2, standard(state))
    return root, state


def test_a_pytree_checkpointer_restores_every_state_of_ours(ours: tuple[Path, Any]) -> None:
    root, state = ours
    like = standard(state) | {"strings": state["strings"]}
    args = ocp.checkpoint_utils.construct_restore_args(like)
    found = ocp.PyTreeCheckpointer().restore(root / "1" / "default", item=like, restore_args=args)
    assert_same(found, like)
    assert_same_shardings(found, like)


def test_a_standard_checkpointer_restores_every_state_of_ours_that_it_takes(ours: tuple[Path, Any]) -> None:
    root, state = ours
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(root / "2" / "default", standard(state))
        with pytest.raises(ValueError, match="Unsupported type: <class 'str'>"):
            checkpointer.restore(root / "1" / "default", state | {"scalars": {}})
    assert_same(found, standard(state))
    assert_same_shardings(found, standard(state))


def test_a_checkpoint_manager_restores_every_state_of_ours_that_it_takes(ours: tuple[Path, Any]) -> None:
    root, state = ours
    with ocp.CheckpointManager(root) as manager:
        assert manager.latest_step() == 2
        found = manager.restore(2, args=ocp.args.StandardRestore(standard(state)))
    assert_same(found, standard(state))
    assert_same_shardings(found, standard(state))


def test_orbax_restores_every_state_of_ours_without_any_arguments(ours: tuple[Path, Any]) -> None:
    root, state = ours
    with ocp.CheckpointManager(root) as manager:
        found, expected = path_strings(manager.restore(1)), path_strings(state)
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert bits(leaf)[1:] == bits(as_python(expected[path]))[1:], path
        if isinstance(leaf, jax.Array):
            assert leaf.sharding.is_equivalent_to(expected[path].sharding, leaf.ndim), path


def test_orbax_reads_the_metadata_of_every_state_of_ours(ours: tuple[Path, Any]) -> None:
    root, state = ours
    with ocp.CheckpointManager(root, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        found = path_strings(manager.item_metadata(1).tree)
    for path, leaf in path_strings(state).items():
        if isinstance(leaf, jax.Array):
            data = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            assert (found[path].shape, found[path].dtype) == (data.shape, data.dtype), path
            assert found[path].sharding.to_jax_sharding().is_equivalent_to(data.sharding, data.ndim), path
        elif isinstance(leaf, np.ndarray):
            assert (found[path].shape, found[path].dtype) == (leaf.shape, leaf.dtype), path


# --- Orbax's, read by us


@pytest.fixture(scope="module", params=FORMS.values(), ids=list(FORMS))
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder, state = tmp_path_factory.mktemp("theirs") / "saved", all_states(*NOT_OF_ORBAX)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**request.param)) as checkpointer:
        checkpointer.save(folder, state)
    return folder, state


def test_every_state_that_orbax_wrote_is_restored(theirs: tuple[Path, Any]) -> None:
    folder, state = theirs
    found = read(folder, state)
    assert_same(found, state)
    assert_same_shardings(found, state)


def test_every_state_that_orbax_wrote_is_restored_without_any_arguments(theirs: tuple[Path, Any]) -> None:
    folder, state = theirs
    found, expected = path_strings(read(folder)), path_strings(state)
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert bits(leaf)[1:] == bits(as_python(expected[path]))[1:], path
        if isinstance(leaf, jax.Array):
            assert leaf.sharding.is_equivalent_to(expected[path].sharding, leaf.ndim), path


def test_metadata_of_what_orbax_wrote_is_that_of_the_leaves(theirs: tuple[Path, Any]) -> None:
    folder, state = theirs
    found = path_strings(metadata_of(storage_path(folder), Deadline.after(100, time.monotonic)).tree)
    for path, leaf in path_strings(state).items():
        if isinstance(leaf, jax.Array | np.ndarray):
            assert (found[path].shape, found[path].dtype) == (leaf.shape, leaf.dtype), path


def test_what_orbax_wrote_is_restored_into_another_sharding(theirs: tuple[Path, Any]) -> None:
    folder, _ = theirs
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    for spec in ((("x", "y"),), (None, ("x", "y")), ("y", "x"), ()):
        leaf = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding(*spec))
        like = {"shardings": dict.fromkeys(state_of("shardings"), leaf)}
        for found in read(folder, like, partial_restore=True)["shardings"].values():
            assert found.sharding == sharding(*spec)
            np.testing.assert_array_equal(found, values)


# --- options of Orbax's


def save_with(folder: Path, state: Any, save_args: Any = None, **form: Any) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**form)) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(state, save_args=save_args))


def registry_with(handler: Any) -> Any:
    return type_handlers.create_type_handler_registry(
        (int, type_handlers.ScalarHandler()), (np.ndarray, type_handlers.NumpyHandler()), (jax.Array, handler)
    )


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "replicas share the work": lambda: {
        "type_handler_registry": registry_with(
            type_handlers.ArrayHandler(use_replica_parallel=True, min_slice_bytes_for_replica_parallel=1)
        )
    },
    "one replica writes": lambda: {
        "type_handler_registry": registry_with(type_handlers.ArrayHandler(use_replica_parallel=False))
    },
    "the single-replica handler": lambda: {
        "type_handler_registry": registry_with(type_handlers.SingleReplicaArrayHandler())
    },
    "without a sharding file": lambda: {
        "type_handler_registry": registry_with(type_handlers.ArrayHandler(enable_write_sharding_file=False))
    },
    "little memory": lambda: {"save_concurrent_gb": 1, "save_device_host_concurrent_gb": 1},
    "pinned host transfer": lambda: {"enable_pinned_host_transfer": True},
}


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_what_orbax_wrote_with_an_option_is_restored(tmp_path: Path, option: Callable[[], dict[str, Any]]) -> None:
    state = {"arrays": state_of("shardings"), "numpy": np.arange(5), "count": 3}
    save_with(tmp_path / "saved", state, **option())
    found = read(tmp_path / "saved", state)
    assert_same(found, state)
    assert_same_shardings(found, state)


def test_small_chunks_that_orbax_wrote_are_restored(tmp_path: Path) -> None:
    state = state_of("shardings")
    for use_zarr3 in (False, True):
        folder = tmp_path / str(use_zarr3)
        save_with(folder, state, jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=32), state), use_zarr3=use_zarr3)
        assert_same(read(folder, state), state)
        chunks = metadata_of(storage_path(folder), Deadline.after(100, time.monotonic)).tree["both"].chunk_shape
        assert np.prod(chunks) * 4 <= 32


def test_values_that_orbax_cast_are_restored_as_they_are(tmp_path: Path) -> None:
    state = state_of("shardings")
    with no_mesh():  # Orbax casts by JAX: under a mesh JAX refuses to, for an array on one device
        save_with(tmp_path / "saved", state, jax.tree.map(lambda _: ocp.SaveArgs(dtype=jnp.dtype(jnp.bfloat16)), state))
        expected = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(np.float32), state)
    found = read(tmp_path / "saved")
    assert {leaf.dtype for leaf in found.values()} == {jnp.dtype(jnp.bfloat16)}
    back = read(tmp_path / "saved", state, RestoreArgs(dtype=np.float32))
    assert_same(back, expected)


def test_part_of_what_orbax_wrote_is_restored(tmp_path: Path) -> None:
    state: dict[str, Any] = {"a": spread(4), "b": {"c": spread(2, 2), "d": 1}}
    save_with(tmp_path / "saved", state)
    assert_same(
        read(tmp_path / "saved", {"b": {"c": state["b"]["c"]}}, partial_restore=True), {"b": {"c": spread(2, 2)}}
    )


@pytest.mark.parametrize("state", [names(), STATES["names with slashes"]()], ids=["odd names", "slashes"])
def test_oddly_named_orbax_array_is_found_missing_by_name(tmp_path: Path, state: Any) -> None:
    save_with(tmp_path / "saved", state, use_ocdbt=False)
    name = next(name for name in path_strings(state) if "/" in name or " " in name)
    for path in (tmp_path / "saved" / name).rglob("*"):
        if path.is_file() and path.name != ".zarray":
            path.unlink()
    with pytest.raises(CheckpointCorrupt, match="NOT_FOUND"):
        read(tmp_path / "saved", state)


# --- many leaves, and a large one


@pytest.mark.timeout(600)
def test_many_small_leaves_and_a_large_one_go_both_ways(tmp_path: Path) -> None:
    state: dict[str, Any] = {f"l{i}": np.full(3, i, np.int32) for i in range(LEAVES)}
    state["large"] = jax.device_put(np.arange(LARGE_BYTES // 4, dtype=np.int32).reshape(1024, -1), sharding("x", "y"))
    save(engine(tmp_path / "ours"), 1, state)
    args = ocp.checkpoint_utils.construct_restore_args(state)
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "ours" / "1" / "default", item=state, restore_args=args)
    assert_same(found, state)
    save_with(tmp_path / "theirs", state)
    assert_same(read(tmp_path / "theirs", state), state)
