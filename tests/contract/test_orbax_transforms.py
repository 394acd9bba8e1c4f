"""Transformations on restore: the same ones through Orbax and through Gracepoint, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import ArrayRestoreArgs, AsyncCheckpointer, RestoreOptions, Transform
from gracepoint.errors import CheckpointError, CheckpointMismatch, CheckpointRefused, SettingsError
from tests.unit.checkpoint.fakes.engine import assert_same, sharding

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


def array(value: float) -> jax.Array:
    return jax.device_put(jnp.arange(16.0).reshape(4, 4) + value, sharding("x", "y"))


def saved_state() -> dict[str, Any]:
    return {
        "layers": {"a": {"w": array(0), "b": np.arange(4)}, "b": {"w": array(100), "b": np.arange(4) + 10}},
        "step": 7,
        "list": [array(200), array(300)],
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("saved")
    ocp.PyTreeCheckpointer().save(root / "theirs", saved_state())
    checkpoint.save(root / "ours", saved_state())
    return {"Orbax's": root / "theirs", "Gracepoint's": root / "ours"}


def doubled(value: Any) -> Any:
    return value * 2


CASES: dict[str, Callable[[], tuple[Any, Any, bool]]] = {
    "renamed": lambda: ({"new": array(0)}, {"new": ocp.Transform(original_key="layers/b/w")}, True),
    "renamed by groups": lambda: (
        {"blocks": {"a": {"kernel": array(0)}, "b": {"kernel": array(0)}}},
        {r"blocks/(\w+)/kernel": ocp.Transform(original_key=r"layers/\1/w")},
        True,
    ),
    "an item of a list": lambda: ({"second": array(0)}, {"second": ocp.Transform("list/1")}, True),
    "one leaf for several": lambda: ({"p": array(0), "q": array(0)}, {"[pq]": ocp.Transform("layers/a/w")}, True),
    "others dropped": lambda: ({"step": 0, "layers": {"a": {"w": array(0)}}}, {}, True),
    "a default": lambda: (
        {"step": 0, "layers": {"a": {"w": array(5), "b": np.zeros(4, np.int64)}}},
        {"layers/a/w": ocp.Transform(use_fallback=True)},
        True,
    ),
    "what was not saved keeps its value": lambda: ({"step": 0, "more": array(9)}, {}, True),
    "a function of an array": lambda: (
        {"step": 0, "list": [array(0), array(0)]},
        {r"list/\d": ocp.Transform(value_fn=doubled)},
        True,
    ),
    "a function of numpy": lambda: (
        {"n": np.zeros(4, np.int64)},
        {"n": ocp.Transform(original_key="layers/a/b", value_fn=doubled)},
        True,
    ),
    "a function of a number": lambda: ({"step": 0}, {"step": ocp.Transform(value_fn=doubled)}, True),
    "nested": lambda: ({"a": {"b": {"c": array(0)}}}, {"a": {"b": {"c": ocp.Transform("layers/a/w")}}}, True),
    "defaults, and the stored leaf where asked": lambda: (
        {"step": 3, "list": [array(1), array(2)]},
        {"list/0": ocp.Transform(use_fallback=True)},
        False,
    ),
}


@pytest.mark.parametrize("writer", ["Orbax's", "Gracepoint's"])
@pytest.mark.parametrize("make", CASES.values(), ids=CASES)
def test_a_transformation_gives_what_orbax_gives(
    saved: dict[str, Path], writer: str, make: Callable[[], tuple[Any, Any, bool]]
) -> None:
    like, transforms, by_default = make()
    args = ocp.args.PyTreeRestore(
        like,
        restore_args=ocp.checkpoint_utils.construct_restore_args(like),
        transforms=transforms,
        transforms_default_to_original=by_default,
    )
    expected = ocp.PyTreeCheckpointer().restore(saved[writer], args=args)
    with AsyncCheckpointer() as checkpointer:
        found = checkpointer.restore(saved[writer], args=args)
    assert_same(found, expected)
    for leaf, there in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert type(leaf) is type(there)
        assert not isinstance(there, jax.Array) or leaf.sharding == there.sharding


def restored(path: Path, like: Any, transforms: Any, restore_args: Any = None, **options: Any) -> Any:
    options = {"partial_restore": True} | options
    return checkpoint.restore(
        path, like, restore_args=restore_args, options=RestoreOptions(transforms=transforms, **options)
    )


def test_a_function_may_change_shape_and_type_and_the_result_is_placed(saved: dict[str, Path]) -> None:
    transforms = {"w": Transform("layers/a/w", value_fn=lambda value: value.astype(np.float16).reshape(2, 8))}
    for like in (
        jax.ShapeDtypeStruct((2, 8), np.float16, sharding=sharding("x")),
        jax.ShapeDtypeStruct((2, 8), np.float16),
        np.zeros((2, 8), np.float16),
    ):
        found = restored(saved["Gracepoint's"], {"w": like}, transforms)["w"]
        assert (found.shape, found.dtype) == ((2, 8), np.float16)
        assert np.asarray(found).tolist() == np.arange(16.0).reshape(2, 8).tolist()
        if getattr(like, "sharding", None):
            assert found.sharding == sharding("x")
    float16 = {"w": jax.ShapeDtypeStruct((2, 8), np.float16)}
    found = restored(saved["Gracepoint's"], float16, transforms, {"w": ArrayRestoreArgs(sharding=sharding("y"))})["w"]
    assert found.sharding == sharding("y")


def test_functions_compute_numbers_strings_and_donated_arrays(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"n": np.float32(2), "text": "a", "w": array(0)})
    like: dict[str, Any] = {"n": 1.0, "text": "", "w": array(9), "m": np.float64(1)}
    transforms = {
        "n": Transform(value_fn=doubled),
        "m": Transform("n", value_fn=float),
        "text": Transform(value_fn=str.upper),
        "w": Transform(value_fn=doubled),
    }
    found = restored(tmp_path / "a", like, transforms, donate=True)
    assert like["w"].is_deleted()
    assert_same(found, {"n": 4.0, "text": "A", "w": array(0) * 2, "m": np.float64(2)})


REFUSED: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "no like": (None, {"a": Transform()}, CheckpointRefused, "transforms: expected like="),
    "no such leaf": ({"a": 1}, {"a": Transform("gone")}, CheckpointMismatch, "leaf 'a': expected 'gone'"),
    "another shape": (
        {"w": jax.ShapeDtypeStruct((3,), np.float32)},
        {"w": Transform("layers/a/w", value_fn=doubled)},
        CheckpointMismatch,
        r"expected float32\[3\].* from value_fn, found float32\[4, 4\]",
    ),
    "a function that fails": (
        {"step": 0},
        {"step": Transform(value_fn=lambda value: value.gone)},
        CheckpointError,
        "has no attribute 'gone'",
    ),
    "a function of several leaves": (
        {"w": 0},
        {"w": ocp.Transform(multi_value_fn=lambda *_: 0)},
        CheckpointRefused,
        "multi_value_fn is not supported",
    ),
    "a function with arguments": (
        {"w": 0},
        {"w": ocp.RestoreTransform(value_fn=lambda value, args: value)},
        CheckpointRefused,
        "the value_fn of a RestoreTransform",
    ),
    "no transformation": ({"w": 0}, {"w": "layers/a/w"}, CheckpointRefused, "expected a Transform, found a str"),
    "a tuple": ({"w": 0}, {"w": ocp.Transform(("list", "1"))}, CheckpointRefused, "expected keys joined by slashes"),
    "no expression": ({"w": 0}, {"(": Transform()}, CheckpointRefused, "is no regular expression"),
    "an abstract default": (
        {"w": jax.ShapeDtypeStruct((3,), np.float32)},
        {"w": Transform(use_fallback=True)},
        CheckpointMismatch,
        "leaf 'w': expected float32",
    ),
}


@pytest.mark.parametrize(("like", "transforms", "kind", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_transformed_is_refused_in_words(
    saved: dict[str, Path], like: Any, transforms: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        restored(saved["Gracepoint's"], like, transforms)


def test_keys_are_renamed_and_not_computed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"key": jax.random.key(3)})
    like = {"new": jax.random.key(0)}
    assert_same(restored(tmp_path / "a", like, {"new": Transform("key")}), {"new": jax.random.key(3)})
    with pytest.raises(CheckpointRefused, match="typed PRNG keys have no value_fn"):
        restored(tmp_path / "a", like, {"new": Transform("key", value_fn=doubled)})


def test_leaves_that_no_leaf_asks_for_are_an_error_without_partial_restore(saved: dict[str, Path]) -> None:
    with pytest.raises(CheckpointMismatch, match=r"leaf 'layers.a.b': expected nothing"):
        restored(saved["Gracepoint's"], {"w": array(0)}, {"w": Transform("layers/a/w")}, partial_restore=False)


def test_transformations_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(SettingsError, match="use_fallback keeps the value of like"):
        Transform("a", use_fallback=True)
