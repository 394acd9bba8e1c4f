"""What a caller asks of a restore, leaf by leaf: placement, type, shape, part of the tree, or nothing at all."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec

from gracepoint import checkpoint
from gracepoint.checkpoint.memory import aligned_empty
from gracepoint.checkpoint.metadata import LeafMetadata, metadata_of
from gracepoint.checkpoint.options import ArrayRestoreArgs, RestoreArgs, RestoreOptions
from gracepoint.checkpoint.restoring.restore_tree import PLACEHOLDER, read_tree
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, CheckpointMismatch
from tests.unit.checkpoint.fakes.engine import assert_same, bits, engine, rich_state, save, sharding

VALUES = np.arange(64.0, dtype=np.float32).reshape(8, 8)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one leaf of each kind."""
    root = tmp_path_factory.mktemp("root")
    state = {
        "w": jax.device_put(VALUES, sharding("x", "y")),
        "layers": [{"b": jnp.arange(4, dtype=jnp.bfloat16)}, {"b": jnp.ones(4, jnp.bfloat16)}],
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), sharding("x")),
        "numpy": np.arange(5),
        "count": 7,
        "rate": 0.5,
        "name": "a name",
    }
    save(engine(root), 1, state)
    return root / "1"


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root, state = tmp_path_factory.mktemp("rich"), rich_state()
    save(engine(root), 1, state)
    return root / "1", state


def read(folder: Path, like: Any = None, args: Any = None, **options: Any) -> Any:
    return read_tree(
        storage_path(folder), like, args, options=RestoreOptions(**options), deadline=Deadline.after(60, time.monotonic)
    )


def one(folder: Path, name: str, args: RestoreArgs, like: Any = PLACEHOLDER) -> Any:
    """Restores one leaf as it was saved, but for ``args``."""
    tree = read(folder, None, {name: args}) if like is PLACEHOLDER else read(folder, {name: like}, {name: args})
    return tree[name]


# --- without like


def test_without_like_dicts_and_lists_come_back_with_their_shardings(
    rich: tuple[Path, Any],
) -> None:
    folder, state = rich
    found = read(folder)
    assert bits(found["params"]["w"]) == bits(state["params"].w)
    assert found["params"]["w"].sharding == state["params"].w.sharding
    assert bits(found["moments"]["mu"][0]) == bits(state["moments"].mu[0])
    assert isinstance(found["moments"]["nu"], list)  # a tuple: Orbax's metadata does not tell
    assert bits(found["keys"]) == bits(state["keys"])
    assert bits(found["rbg"]) == bits(state["rbg"])
    assert bits(found["int4"]) == bits(state["int4"])
    assert found["python"] == [3, 2.5, True]
    assert type(found["python"][2]) is bool
    assert found["nothing"] == {"none": None, "dict": {}, "list": [], "tuple": ()}


def test_shardings_that_nobody_gave_are_warned_of_once(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(saved)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "are restored with the shardings that they were saved with" in warnings[0]


def test_abstract_leaves_are_restored_with_their_saved_shardings(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    like = jax.eval_shape(
        lambda: {
            "w": jnp.asarray(VALUES),
            "keys": jax.random.split(jax.random.key(1), 4),
            "layers": [{"b": jnp.zeros(4, jnp.bfloat16)}] * 2,
        }
    )
    found = read(saved, like, partial_restore=True)
    assert found["w"].sharding == sharding("x", "y")
    assert found["keys"].sharding == sharding("x")
    assert not found["layers"][0]["b"].committed  # was on one device, and is where JAX puts it
    assert "2 arrays, as 'keys', are restored with the shardings that they were saved with" in caplog.text
    caplog.clear()
    assert not read(saved, {"w": jnp.zeros((8, 8))}, partial_restore=True)["w"].committed  # as the array is
    assert "as none were given" not in caplog.text


def test_abstract_leaves_go_to_the_default_device_when_devices_are_missing(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: devices[:2])
    found = read(saved, {"w": jax.ShapeDtypeStruct((8, 8), np.float32)}, partial_restore=True)["w"]
    assert np.array_equal(found, VALUES)
    assert not found.committed


def test_a_sharding_over_devices_that_are_not_here_is_refused_in_words(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: devices[:2])
    with pytest.raises(CheckpointError, match=re.escape("devices [0, 1, 2, 3], of which [2, 3] are not here")):
        read(saved)
    assert metadata_of(storage_path(saved), Deadline.after(60, time.monotonic)).tree["w"].sharding is None


def test_all_is_restored_as_numpy_arrays_if_so_asked(saved: Path) -> None:
    found = read(saved, None, {name: RestoreArgs(restore_type=np.ndarray) for name in ("w", "layers", "keys")})
    assert type(found["w"]) is np.ndarray
    np.testing.assert_array_equal(found["w"], VALUES)
    assert found["layers"][0]["b"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["keys"], jax.random.key_data(jax.random.split(jax.random.key(1), 4)))


# --- placement


def test_a_sharding_is_given_by_itself_or_by_mesh_and_axes(saved: Path) -> None:
    wanted = sharding("y", None)
    for args in (ArrayRestoreArgs(sharding=wanted), ArrayRestoreArgs(mesh=wanted.mesh, mesh_axes=wanted.spec)):
        found = one(saved, "w", args)
        assert found.sharding == wanted
        np.testing.assert_array_equal(found, VALUES)


def test_an_argument_s_sharding_is_taken_before_the_leaf_s(saved: Path) -> None:
    like = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding("x"))}
    found = read(saved, like, {"w": ArrayRestoreArgs(sharding=sharding("y"))}, partial_restore=True)
    assert found["w"].sharding == sharding("y")


def test_a_device_layout_is_kept_or_taken_from_what_is_asked(saved: Path) -> None:
    turned = Format(Layout(major_to_minor=(1, 0)), sharding("x"))
    leaf = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=turned)
    array = jax.device_put(np.zeros((8, 8), np.float32), turned)
    for found in (
        one(saved, "w", ArrayRestoreArgs(sharding=turned)),
        read(saved, {"w": leaf}, partial_restore=True)["w"],
        read(saved, {"w": array}, partial_restore=True)["w"],
    ):
        assert found.format.layout.major_to_minor == (1, 0)
        assert found.sharding == turned.sharding
        np.testing.assert_array_equal(found, VALUES)


def test_read_bytes_become_device_memory_without_a_copy(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gracepoint.checkpoint.reading import parallel_reader

    taken: list[range] = []

    def noted(*form: Any) -> Any:
        memory = aligned_empty(*form)
        taken.append(range(memory.ctypes.data, memory.ctypes.data + memory.nbytes))
        return memory

    monkeypatch.setattr(parallel_reader, "aligned_empty", noted)
    found = read(
        saved, {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding("x", "y"))}, None, partial_restore=True
    )
    places = {shard.data.unsafe_buffer_pointer() for shard in found["w"].addressable_shards}
    assert len(places) == 4
    assert all(any(place in memory for memory in taken) for place in places)


def test_typed_keys_are_restored_with_the_sharding_that_is_given(saved: Path) -> None:
    keys = jax.random.split(jax.random.key(1), 4)
    found = one(saved, "keys", ArrayRestoreArgs(sharding=sharding("y")))
    assert bits(found) == bits(keys)
    assert found.sharding == sharding("y")


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_typed_keys_keep_their_implementation_whatever_is_asked_of_them(tmp_path: Path, impl: str) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(1, impl=impl), 4), sharding("x"))
    save(engine(tmp_path), 1, {"keys": keys})
    for like, args in (({"keys": keys}, None), (None, None), (None, {"keys": ArrayRestoreArgs(sharding=sharding())})):
        found = read(tmp_path / "1", like, args)["keys"]
        assert (str(jax.random.key_impl(found)), bits(found)) == (impl, bits(keys))


# --- type and shape


def test_values_are_cast_only_where_that_is_asked(saved: Path) -> None:
    cast = ArrayRestoreArgs(sharding=sharding("x"), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(one(saved, "w", cast), VALUES.astype(jnp.bfloat16))
    assert one(saved, "w", cast).dtype == jnp.bfloat16
    assert one(saved, "numpy", RestoreArgs(dtype=np.float16)).dtype == np.float16
    with pytest.raises(CheckpointMismatch, match=r"leaf 'w': expected bfloat16\[8, 8\], found float32\[8, 8\]"):
        read(saved, {"w": jnp.ones((8, 8), jnp.bfloat16)}, partial_restore=True)


@pytest.mark.parametrize("shape", [(6, 10), (8, 16), (3, 3), (16, 8)])
def test_a_shape_that_may_differ_cuts_off_or_fills_up_with_zeros(saved: Path, shape: tuple[int, int]) -> None:
    expected = np.zeros(shape, np.float32)
    part = tuple(slice(0, min(a, b)) for a, b in zip(shape, VALUES.shape, strict=True))
    expected[part] = VALUES[part]
    spec = ("x",) if shape[0] % 2 == 0 else ()
    found = one(saved, "w", ArrayRestoreArgs(sharding=sharding(*spec), global_shape=shape, strict=False))
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(CheckpointMismatch, match=re.escape(f"expected float32{list(shape)}")):
        one(saved, "w", ArrayRestoreArgs(sharding=sharding(), shape=shape))


def test_a_shape_with_another_number_of_axes_is_always_refused(saved: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"expected float32\[64\]"):
        one(saved, "w", ArrayRestoreArgs(sharding=sharding(), shape=(64,), strict=False))


@pytest.mark.parametrize(
    ("name", "restore_type", "expected"),
    [
        ("count", float, 7.0),
        ("count", np.ndarray, np.asarray(7)),
        ("rate", None, 0.5),
        ("rate", int, 0),
        ("name", str, "a name"),
        ("name", None, "a name"),
    ],
)
def test_number_or_string_is_restored_as_the_requested_type(
    saved: Path, name: str, restore_type: Any, expected: Any
) -> None:
    found = one(saved, name, RestoreArgs(restore_type=restore_type))
    assert type(found) is type(expected)
    assert found == expected


@pytest.mark.parametrize(
    ("value", "like", "expected"),
    [
        (jnp.int32(3), 0, 3),
        (2**63 + 5, 0, 2**63 + 5),
        (np.float32(0.5), 0.1, 0.5),
        (jnp.bfloat16(0.5), 0.1, 0.5),
        (jnp.int4(-3), 0, -3),
    ],
)
def test_a_number_of_any_width_is_restored_into_pythons(tmp_path: Path, value: Any, like: Any, expected: Any) -> None:
    checkpoint.save(tmp_path / "tree", {"n": value})
    found = checkpoint.restore(tmp_path / "tree", {"n": like})["n"]
    assert (type(found), found) == (type(like), expected)


@pytest.mark.parametrize("like", [0, True])
def test_a_number_of_another_kind_is_refused(tmp_path: Path, like: Any) -> None:
    checkpoint.save(tmp_path / "tree", {"n": 0.5})
    with pytest.raises(CheckpointMismatch, match=r"leaf 'n': expected .*, found float64\[\]"):
        checkpoint.restore(tmp_path / "tree", {"n": like})


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"w": RestoreArgs(restore_type=float)}, r"leaf 'w': expected a number, found float32\[8, 8\]"),
        ({"w": RestoreArgs(restore_type=str)}, r"leaf 'w': expected a string, found float32\[8, 8\]"),
        ({"name": RestoreArgs(restore_type=np.ndarray)}, r"leaf 'name': expected .*, found a string"),
        ({"w": RestoreArgs(restore_type=dict)}, r"leaf 'w': cannot restore into a <class 'dict'>"),
        ({"numpy": ArrayRestoreArgs(dtype=jnp.int32)}, r"leaf 'numpy': no sharding is known to restore it with"),
        ({"numpy": ArrayRestoreArgs(sharding=sharding())}, "leaf 'numpy': JAX has no int64 without jax_enable_x64"),
        ({"w": ArrayRestoreArgs(shape=(1,), global_shape=(2,))}, r"shape \(1,\) and global_shape \(2,\) differ"),
        ({"v": RestoreArgs()}, r"restore_args\['v'\]: expected a leaf or container of what is restored"),
        ({"w": 3}, r"restore_args\['w'\]: expected RestoreArgs, found a int"),
    ],
)
def test_arguments_that_cannot_be_met_are_refused_by_the_leaf_s_path(
    saved: Path, args: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(saved, None, args)


def test_arguments_for_a_container_or_all_hold_for_leaves_below(saved: Path) -> None:
    found = read(saved, None, {"layers": RestoreArgs(restore_type=np.ndarray, dtype=np.float32)})
    assert [type(layer["b"]) for layer in found["layers"]] == [np.ndarray] * 2
    assert isinstance(found["w"], jax.Array)
    arrays = read(
        saved,
        {"w": ..., "layers": [{"b": jnp.ones(4)}, {"b": jnp.ones(4)}]},
        RestoreArgs(dtype=jnp.float32),
        partial_restore=True,
    )
    assert [layer["b"].dtype for layer in arrays["layers"]] == [jnp.float32] * 2


# --- parts of the tree


def test_a_placeholder_stays_and_is_not_read(rich: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from gracepoint.checkpoint.reading import stored_arrays

    folder, state = rich
    opened: list[str] = []

    def noted(path: StoragePath, *rest: Any) -> None:
        opened.append(path.parent.name)
        read_checked(path, *rest)

    monkeypatch.setattr(stored_arrays, "read_checked", noted)
    like = jax.tree.map(lambda _: PLACEHOLDER, state) | {"bool": state["bool"]}
    found = read(folder, like)
    assert bits(found["bool"]) == bits(state["bool"])
    assert found["params"].w is PLACEHOLDER
    assert set(opened) == {"bool"}


def test_part_of_the_tree_is_restored_only_if_so_asked(rich: tuple[Path, Any]) -> None:
    folder, state = rich
    like = {"params": state["params"], "python": [0, 0.0, False]}
    assert_same(read(folder, like, partial_restore=True), {"params": state["params"], "python": [3, 2.5, True]})
    with pytest.raises(CheckpointMismatch, match=r"leaf '[\w.]+': expected nothing, found .*; and \d+ more"):
        read(folder, like)


def test_leaves_missing_in_the_checkpoint_keep_their_value_only_on_request(saved: Path) -> None:
    like = {"w": jnp.zeros((8, 8)), "new": np.full(3, 9.0), "layers": [{"b": jnp.zeros(4, jnp.bfloat16), "c": 1}]}
    found = read(saved, like, keep_missing=True, partial_restore=True)
    np.testing.assert_array_equal(found["w"], VALUES)
    np.testing.assert_array_equal(found["new"], np.full(3, 9.0))
    assert found["layers"][0]["c"] == 1
    with pytest.raises(CheckpointMismatch, match=r"leaf 'layers.0.c': expected int64\[\], found nothing; leaf 'new'"):
        read(saved, like, partial_restore=True)
    abstract = {"new": jax.ShapeDtypeStruct((3,), np.float32, sharding=sharding())}
    with pytest.raises(CheckpointMismatch, match=r"expected float32\[3\] replicated over x=2, y=2, found nothing"):
        read(saved, abstract, keep_missing=True, partial_restore=True)


# --- metadata


def test_metadata_names_all_leaves_without_reading_a_value(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gracepoint.checkpoint.reading import stored_arrays

    monkeypatch.setattr(stored_arrays, "read_checked", lambda *_: pytest.fail("a chunk was read"))
    found = metadata_of(storage_path(saved), Deadline.after(60, time.monotonic)).tree
    assert found["w"] == LeafMetadata(
        "w",
        "jax.Array",
        (8, 8),
        np.dtype(np.float32),
        sharding("x", "y"),
        "sharded (x, y) over x=2, y=2",
        chunk_shape=(4, 4),
        write_shape=(4, 4),
    )
    assert (found["keys"].shape, found["keys"].dtype) == ((4,), jax.random.key(0).dtype)
    assert (found["layers"][1]["b"].shape, found["layers"][1]["b"].dtype) == ((4,), jnp.bfloat16)
    assert (found["numpy"].value_type, found["count"].value_type, found["name"].value_type) == (
        "np.ndarray",
        "scalar",
        "string",
    )
    assert (found["name"].shape, found["name"].dtype) == (None, None)


def test_a_recorded_sharding_comes_back_equal(tmp_path: Path) -> None:
    wanted = {
        "both": sharding("x", "y"),
        "merged": sharding(("x", "y")),
        "inner": sharding(None, "y"),
        "none": sharding(),
        "single": jax.sharding.SingleDeviceSharding(jax.devices()[2]),
    }
    save(engine(tmp_path), 1, {name: jax.device_put(VALUES, where) for name, where in wanted.items()})
    found = read(tmp_path / "1")
    assert {name: array.sharding for name, array in found.items()} == wanted
    assert found["inner"].sharding.spec == PartitionSpec(None, "y")
