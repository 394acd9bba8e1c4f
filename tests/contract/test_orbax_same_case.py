"""The same case through Orbax and through Gracepoint: values, types, shardings and classes of errors are compared."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import type_handlers

from gracepoint import checkpoint
from gracepoint.checkpoint import AsyncCheckpointer, RestoreOptions
from gracepoint.errors import CheckpointMismatch, CheckpointRefused
from tests.unit.checkpoint.fakes.engine import assert_same, sharding

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

PARTIAL = RestoreOptions(partial_restore=True)


def keys() -> jax.Array:
    return jax.device_put(jax.random.split(jax.random.key(1), 4), sharding("x"))


def state() -> dict[str, Any]:
    return {
        "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding("x", "y")),
        "n": np.arange(3),
        "i": 3,
        "keys": keys(),
        "rbg": jax.random.key(3, impl="rbg"),
        "none": None,
        "masked": optax.MaskedNode(),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The state as each of the two saved it."""
    root = tmp_path_factory.mktemp("saved")
    ocp.PyTreeCheckpointer().save(root / "theirs", state())
    checkpoint.save(root / "ours", state())
    return {"Orbax's": root / "theirs", "Gracepoint's": root / "ours"}


each_writer = pytest.mark.parametrize("writer", ["Orbax's", "Gracepoint's"])


def orbax(path: Path, like: Any = None, restore_args: Any = None, partial: bool = False) -> Any:
    if like is None:
        return ocp.PyTreeCheckpointer().restore(path, args=ocp.args.PyTreeRestore(restore_args=restore_args))
    args = ocp.args.PyTreeRestore(like, restore_args=restore_args, partial_restore=partial)
    return ocp.PyTreeCheckpointer().restore(path, args=args)


def assert_same_as_orbax(found: Any, expected: Any) -> None:
    assert_same(found, expected)
    for leaf, there in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(there, jax.Array):
            assert leaf.sharding.is_equivalent_to(there.sharding, there.ndim)


def abstract(**changes: Any) -> dict[str, Any]:
    return {
        name: leaf if name in ("i", "none", "masked") else ocp.utils.to_shape_dtype_struct(leaf)
        for name, leaf in state().items()
    } | changes


LIKES: dict[str, Callable[[], Any]] = {
    "the state": state,
    "abstract arrays of Orbax, keys by their data": abstract,
    "numpy without a device stays numpy": lambda: abstract(n=jax.ShapeDtypeStruct((3,), np.int64)),
    "None in the place of arrays": lambda: state() | {"w": None, "n": None, "keys": None},
    "MaskedNode in the place of arrays": lambda: state() | {"w": optax.MaskedNode(), "i": optax.MaskedNode()},
    "an array in the place of None": lambda: state() | {"none": jnp.ones(2)},
    "an array in the place of MaskedNode": lambda: state() | {"masked": jnp.ones(2)},
    "None and MaskedNode exchanged": lambda: state() | {"none": optax.MaskedNode(), "masked": None},
    "an empty dict in the place of an array": lambda: state() | {"w": {}},
}


@each_writer
@pytest.mark.parametrize("name", LIKES)
def test_the_same_like_gives_what_orbax_gives(saved: dict[str, Path], writer: str, name: str) -> None:
    like = LIKES[name]()
    expected = orbax(saved[writer], like, ocp.checkpoint_utils.construct_restore_args(like))
    assert_same_as_orbax(checkpoint.restore(saved[writer], like), expected)


def args_for(**changes: Any) -> dict[str, Any]:
    """Returns arguments for all leaves, by Orbax's defaults for each."""
    return {name: ocp.RestoreArgs() for name in state()} | changes


ARGS: dict[str, Callable[[], dict[str, Any]]] = {
    "type(array)": lambda: {"w": ocp.RestoreArgs(restore_type=type(jnp.ones(1)))},
    "jax.Array": lambda: {"w": ocp.RestoreArgs(restore_type=jax.Array)},
    "keys with a sharding": lambda: {"keys": ocp.ArrayRestoreArgs(sharding=sharding("y"))},
    "keys in their own type": lambda: {"keys": ocp.ArrayRestoreArgs(sharding=sharding(), dtype=keys().dtype)},
    "keys in their data's type": lambda: {"keys": ocp.ArrayRestoreArgs(sharding=sharding(), dtype=np.dtype("uint32"))},
    "keys in their data's type and shape": lambda: {
        "keys": ocp.ArrayRestoreArgs(sharding=sharding("y", None), dtype=np.dtype("uint32"), global_shape=(4, 2))
    },
}


@each_writer
@pytest.mark.parametrize("make", ARGS.values(), ids=ARGS)
def test_the_same_arguments_give_what_orbax_gives(saved: dict[str, Path], writer: str, make: Callable[[], Any]) -> None:
    args = make()
    like = dict.fromkeys(args, 0)
    expected = orbax(saved[writer], like, args, partial=True)
    found = checkpoint.restore(saved[writer], restore_args=args)
    assert_same_as_orbax({name: found[name] for name in args}, expected)


@each_writer
def test_arguments_of_orbax_s_metadata_restore_everything(saved: dict[str, Path], writer: str) -> None:
    args = ocp.checkpoint_utils.construct_restore_args(
        ocp.PyTreeCheckpointer().metadata(saved[writer]).item_metadata.tree
    )
    expected = orbax(saved[writer], restore_args=args)
    found = checkpoint.restore(saved[writer], restore_args={name: args[name] for name in args if name in expected})
    assert_same_as_orbax(found, expected)


@each_writer
def test_arguments_for_more_leaves_than_are_wanted_are_left_alone(saved: dict[str, Path], writer: str) -> None:
    args = {"w": ocp.RestoreArgs(restore_type=np.ndarray), "i": ocp.RestoreArgs(), "n": ocp.RestoreArgs()}
    like = {"w": np.ones((8, 8), np.float32)}
    found = checkpoint.restore(saved[writer], like, restore_args=args, options=PARTIAL)
    assert_same(found, orbax(saved[writer], like, args, partial=True))
    with pytest.raises(ValueError, match=r"restore_args\['gone'\]: expected a leaf or container"):
        checkpoint.restore(saved[writer], like, restore_args=args | {"gone": ocp.RestoreArgs()}, options=PARTIAL)


@each_writer
@pytest.mark.parametrize("dtype", [jax.random.key(0, impl="rbg").dtype, np.float32], ids=["rbg", "float32"])
def test_keys_of_another_kind_than_was_saved_are_never_given_in_silence(
    saved: dict[str, Path], writer: str, dtype: Any
) -> None:
    args = {"keys": checkpoint.ArrayRestoreArgs(sharding=sharding(), dtype=dtype)}
    with pytest.raises(CheckpointMismatch, match="leaf 'keys': expected .*, found key<threefry2x32>"):
        checkpoint.restore(saved[writer], restore_args=args)


@each_writer
def test_what_is_given_up_or_restored_as_none_is_in_the_log(
    saved: dict[str, Path], writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    checkpoint.restore(saved[writer], state() | {"w": None, "none": jnp.ones(2)})
    assert "not restored, as there is nothing in their place: w" in caplog.text
    assert "leaf 'none' is restored as None, as which it was saved" in caplog.text


@each_writer
def test_the_metadata_of_every_leaf_is_what_orbax_says(saved: dict[str, Path], writer: str) -> None:
    theirs = ocp.PyTreeCheckpointer().metadata(saved[writer]).item_metadata.tree
    with AsyncCheckpointer() as checkpointer:
        ours = checkpointer.metadata(saved[writer]).tree
    for name in ("w", "n", "keys", "rbg"):
        assert ours[name].chunk_shape == theirs[name].storage.chunk_shape, name
        if theirs[name].storage.write_shape is not None or writer == "Orbax's":
            assert ours[name].write_shape == theirs[name].storage.write_shape, name
    assert ours["w"].sharding == theirs["w"].sharding.to_jax_sharding()


@each_writer
def test_metadata_needs_no_file_of_shardings(saved: dict[str, Path], tmp_path: Path, writer: str) -> None:
    shutil.copytree(saved[writer], tmp_path / "a")
    (tmp_path / "a" / "_sharding").unlink()
    theirs = ocp.PyTreeCheckpointer().metadata(tmp_path / "a").item_metadata.tree
    with AsyncCheckpointer() as checkpointer:
        ours = checkpointer.metadata(tmp_path / "a").tree
    for name in ("w", "n", "keys", "rbg"):
        assert ours[name].chunk_shape == theirs[name].storage.chunk_shape, name
        assert ours[name].sharding is theirs[name].sharding is None, name


@each_writer
def test_metadata_of_keys_is_an_abstract_array_that_restores_them(saved: dict[str, Path], writer: str) -> None:
    with AsyncCheckpointer() as checkpointer:
        found = checkpointer.metadata(saved[writer]).tree["keys"]
    like = jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=found.sharding)
    assert found.sharding.is_equivalent_to(keys().sharding, 1)
    restored = checkpoint.restore(saved[writer], {"keys": like}, options=PARTIAL)
    assert_same_as_orbax(restored, {"keys": keys()})


def test_the_write_shape_of_orbax_s_arrays_is_what_a_process_wrote(tmp_path: Path) -> None:
    values = {"w": state()["w"]}
    args = ocp.args.PyTreeSave(values, save_args={"w": ocp.SaveArgs(chunk_byte_size=32)})
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", args=args)
    with AsyncCheckpointer() as checkpointer:
        found = checkpointer.metadata(tmp_path / "theirs").tree["w"]
    where = values["w"].sharding
    rows, columns = where.shard_shape((8, 8))
    replicas = where.num_devices * rows * columns // 64  # each of them writes a part of a shard
    assert (found.chunk_shape, found.write_shape) == ((2, 4), (rows // replicas, columns))


def test_arrays_whose_metadata_have_a_name_of_their_own_are_read(tmp_path: Path) -> None:
    registry = type_handlers.create_type_handler_registry(
        (int, type_handlers.ScalarHandler()),
        (np.ndarray, type_handlers.NumpyHandler(metadata_key="other")),
        (jax.Array, type_handlers.ArrayHandler(metadata_key="mine")),
    )
    values = {"w": state()["w"], "b": {"c": jnp.ones(3)}, "n": np.arange(3), "i": 3}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, type_handler_registry=registry)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "theirs", values)
    assert_same(checkpoint.restore(tmp_path / "theirs"), values)


WITHOUT_ARRAYS: dict[str, Any] = {
    "None alone": {"a": None},
    "an empty dict": {"a": {}},
    "a string": {"a": "text"},
    "strings and None": {"a": "text", "b": {"c": None, "d": [], "e": "more"}},
    "a number": {"a": 3},
}
BARE: dict[str, Callable[[], Any]] = {
    "array": lambda: state()["w"],
    "array without axes": lambda: jnp.asarray(2.5),
    "numpy": lambda: np.arange(5.0),
    "number": lambda: 3,
    "string": lambda: "text",
    "keys": keys,
}
CASES: dict[str, Callable[[], Any]] = {name: (lambda tree=tree: tree) for name, tree in WITHOUT_ARRAYS.items()} | {
    f"bare {name}": make for name, make in BARE.items()
}


@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_trees_without_arrays_and_bare_leaves_go_both_ways(tmp_path: Path, make: Callable[[], Any]) -> None:
    value = make()
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", value)
    checkpoint.save(tmp_path / "ours", value)
    for path in (tmp_path / "theirs", tmp_path / "ours"):
        expected = orbax(path)
        assert_same_as_orbax(checkpoint.restore(path), expected)
        assert_same(checkpoint.restore(path, value), value)
        with AsyncCheckpointer() as checkpointer:
            checkpointer.metadata(path)
    assert checkpoint.verify(tmp_path / "ours").damage == ()


@pytest.mark.parametrize("options", [{"use_ocdbt": True}, {"use_zarr3": True}, {"compression": "zstd"}], ids=str)
def test_bare_arrays_go_to_orbax_in_every_format(tmp_path: Path, options: dict[str, Any]) -> None:
    value = state()["w"]
    checkpoint.save(tmp_path / "ours", value, options=checkpoint.WriteOptions(**options))
    for found in (orbax(tmp_path / "ours"), checkpoint.restore(tmp_path / "ours")):
        assert_same_as_orbax(found, value)


@pytest.mark.parametrize("form", [{"use_ocdbt": False}, {"use_zarr3": True}, {"use_ocdbt": False, "use_zarr3": True}])
def test_bare_arrays_come_from_orbax_in_every_format(tmp_path: Path, form: dict[str, Any]) -> None:
    value = state()["w"]
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**form)) as checkpointer:
        checkpointer.save(tmp_path / "theirs", value)
    assert_same_as_orbax(checkpoint.restore(tmp_path / "theirs"), value)


@pytest.mark.parametrize("empty", [{}, [], (), None], ids=repr)
def test_an_empty_state_is_a_value_error_in_both(tmp_path: Path, empty: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        ocp.PyTreeCheckpointer().save(tmp_path / "theirs", empty)
    with pytest.raises(CheckpointRefused, match="the state is (None|an empty)"):
        checkpoint.save(tmp_path / "ours", empty)


def test_a_restore_that_orbax_refuses_with_a_value_error_is_one_here(tmp_path: Path) -> None:
    ocp.PyTreeCheckpointer().save(tmp_path / "a", {"w": jnp.ones(2)})
    (tmp_path / "a" / "_sharding").unlink()
    args = {"w": ocp.ArrayRestoreArgs()}
    with pytest.raises(ValueError, match="[Ss]harding"):
        orbax(tmp_path / "a", {"w": 0}, args)
    with pytest.raises(CheckpointRefused, match="no sharding is known"):
        checkpoint.restore(tmp_path / "a", restore_args=args)
