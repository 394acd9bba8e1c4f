"""Restoring into the memory of ``like``, where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gracepoint.checkpoint import RestoreOptions
from gracepoint.checkpoint.async_checkpointer import restore, save
from gracepoint.checkpoint.restoring import transforms
from gracepoint.errors import CheckpointCorrupt, CheckpointError
from tests.unit.checkpoint.fakes.engine import assert_same, rich_state, small_state

DONATE = RestoreOptions(donate=True)


def arrays(state: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]


def test_a_path_is_restored_without_touching_like(tmp_path: Path) -> None:
    save(tmp_path / "a", small_state(2.0))
    like = small_state(1.0)
    restore(tmp_path / "a", like)
    assert not any(array.is_deleted() for array in arrays(like))


def test_leaves_of_every_kind_are_restored_into_the_memory_of_like(tmp_path: Path) -> None:
    save(tmp_path / "a", rich_state())
    like = rich_state()
    found = restore(tmp_path / "a", like, options=DONATE)
    assert_same(found, rich_state())
    assert all(array.is_deleted() for array in arrays(like))
    for leaf, expected in zip(arrays(found), arrays(rich_state()), strict=True):
        assert (leaf.sharding, leaf.committed) == (expected.sharding, expected.committed)


def test_leaves_that_are_not_restored_keep_their_arrays(tmp_path: Path) -> None:
    save(tmp_path / "a", small_state(2.0))
    like = small_state(1.0) | {"new": jnp.ones(3), "b": ...}
    found = restore(tmp_path / "a", like, options=RestoreOptions(donate=True, keep_missing=True))
    assert float(found["new"].sum()) == 3.0
    assert found["b"] is ...
    assert like["w"].is_deleted()


def test_array_both_kept_and_replaced_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path / "a", small_state(2.0))
    like = small_state(1.0)
    like["ema"] = like["w"]
    with pytest.raises(CheckpointError, match="leaf 'ema' is not in the checkpoint and keeps its array, and leaf 'w'"):
        restore(tmp_path / "a", like, options=RestoreOptions(donate=True, keep_missing=True))
    assert not any(array.is_deleted() for array in arrays(like))


def test_an_error_after_like_was_given_up_says_so(tmp_path: Path) -> None:
    save(tmp_path / "a", small_state(2.0))
    for path in (tmp_path / "a").rglob("*"):
        if path.is_file() and path.parent.name == "w" and not path.name.startswith("."):
            path.write_bytes(b"")
    like = small_state(1.0)
    with pytest.raises(CheckpointCorrupt) as caught:
        restore(tmp_path / "a", like, options=DONATE)
    assert all(array.is_deleted() for array in arrays(like))
    assert "make the state again" in caught.value.__notes__[0]


def test_a_kept_leaf_whose_array_is_gone_is_refused_by_name() -> None:
    array = jnp.zeros(3)
    (leaf,) = jax.tree.leaves(transforms.marked({"b": array}))
    array.delete()  # as for a newer step, which then could not be read
    with pytest.raises(CheckpointError, match="leaf 'b' is not in the checkpoint and keeps its array, which was"):
        transforms.take([], [("b", leaf)])
