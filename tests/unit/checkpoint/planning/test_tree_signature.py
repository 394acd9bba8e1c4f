"""States of one form are not looked at again: what a form tells apart, and that it keeps no state alive."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.planning.grid import TreeSignature
from gracepoint.errors import CheckpointError
from tests.unit.checkpoint.fakes.engine import rich_state, sharding


def base() -> dict[str, Any]:
    return {
        "w": jax.device_put(jnp.zeros((4, 4)), sharding("x", "y")),
        "numpy": np.zeros(4, np.int32),
        "number": 1,
        "text": "a",
        "key": jax.random.key(1),
        "none": None,
        "empty": {},
    }


CHANGES: dict[str, dict[str, Any]] = {
    "another shape": {"w": jax.device_put(jnp.zeros((4, 8)), sharding("x", "y"))},
    "another type": {"w": jax.device_put(jnp.zeros((4, 4), jnp.int32), sharding("x", "y"))},
    "another sharding": {"w": jax.device_put(jnp.zeros((4, 4)), sharding("y", "x"))},
    "an array of another library": {"w": np.zeros((4, 4), np.float32)},
    "another type of a numpy array": {"numpy": np.zeros(4, np.int64)},
    "a number of another type": {"number": 1.0},
    "a string for a number": {"number": "1"},
    "a number for a string": {"text": 1},
    "keys of another implementation": {"key": jax.random.key(1, impl="rbg")},
    "their data for keys": {"key": jax.random.key_data(jax.random.key(1))},
    "a leaf for None": {"none": 1},
    "another empty container": {"empty": []},
    "a new leaf": {"new": 1},
}


def test_a_state_of_the_same_form_has_the_leaves_that_flattening_gives() -> None:
    state = rich_state() | {"text": "a"}
    form = TreeSignature(state, pytree.flatten(state))
    other = jax.tree.map(lambda leaf: leaf, rich_state()) | {"text": "b"}
    found, expected = form.leaves_of(other), pytree.flatten(other)
    assert found is not None
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.name, ours.keys, ours.value_type, ours.spec) == (
            theirs.name,
            theirs.keys,
            theirs.value_type,
            theirs.spec,
        )
        np.testing.assert_array_equal(ours.data, theirs.data)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_differs_is_another_form(change: dict[str, Any]) -> None:
    state = base()
    form = TreeSignature(state, pytree.flatten(state))
    assert form.leaves_of(base()) is not None
    assert form.leaves_of(base() | change) is None


def test_a_value_that_cannot_be_saved_is_an_error_here_too() -> None:
    state = base()
    form = TreeSignature(state, pytree.flatten(state))
    with pytest.raises(CheckpointError, match=r"state\['number'\]: cannot save a value of type object"):
        form.leaves_of(base() | {"number": object()})


@functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["static"])
@dataclasses.dataclass
class WithStaticField:
    w: Any
    static: Any


@pytest.mark.parametrize(
    "static",
    [
        pytest.param(lambda: np.arange(3), id="an array"),
        pytest.param(lambda: float("nan"), id="not a number"),
        pytest.param(lambda: lambda x: x, id="a function that is made anew"),
    ],
)
def test_static_fields_that_have_no_equality_are_no_other_form(static: Callable[[], Any]) -> None:
    first = WithStaticField({"w": jnp.zeros(3), "f": jnp.tanh}, static())
    form = TreeSignature(first, pytree.flatten(first))
    found = form.leaves_of(WithStaticField({"w": jnp.ones(3), "f": jnp.sin}, static()))
    assert found is not None
    assert [leaf.name for leaf in found] == ["w.f", "w.w"]
    np.testing.assert_array_equal(found[1].data, np.ones(3))
    assert form.leaves_of(WithStaticField({"w": jnp.ones(4), "f": jnp.sin}, static())) is None


def test_a_form_keeps_no_array_alive() -> None:
    state = base()
    form = TreeSignature(state, pytree.flatten(state))
    array = weakref.ref(state["w"])
    del state
    gc.collect()
    assert array() is None
    assert form.leaves_of(base()) is not None
