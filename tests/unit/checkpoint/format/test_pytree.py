"""Names of leaves, and what is refused before anything is written."""

from __future__ import annotations

import collections
import enum
import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from gracepoint.checkpoint.format import host_state, pytree
from gracepoint.checkpoint.format.array_spec import as_bytes, tree_digest
from gracepoint.checkpoint.planning.chunks import make_plan
from gracepoint.checkpoint.planning.grid import TreeSignature
from gracepoint.errors import CheckpointCorrupt, CheckpointError
from tests.unit.checkpoint.fakes.engine import Moments, Params, rich_state, sharding, small_state


def test_leaves_are_named_by_their_keys_joined_with_dots() -> None:
    state = {"a": Params(w=[1, (2,)], b=Moments(3, None)), "e": {}}
    assert [leaf.name for leaf in pytree.flatten(state)] == ["a.w.0", "a.w.1.0", "a.b.mu", "a.b.nu", "e"]


REFUSED: list[tuple[Any, str]] = [
    ({"a": b"text"}, "state['a']: cannot save a value of type bytes"),
    ({"a": np.zeros(1, ml_dtypes.uint4)}, "state['a']: cannot save arrays of dtype uint4"),
    ({"a": {"b": object()}}, "state['a']['b']: cannot save a value of type object"),
    ({"a": np.asarray(["x"])}, "state['a']: cannot save arrays of dtype <U1"),
    ({"a": 2**80}, "state['a']: cannot save arrays of dtype object"),
    ({"a": np.zeros(1, np.longdouble)}, "state['a']: cannot save arrays of dtype"),
    ({"a": {"b": 1}, "a.b": 2}, "two leaves of the state are named 'a.b'"),
    ({"a/../b": 1}, "named 'a/../b'"),
    ({"": 1}, "named ''"),
    ({"_METADATA": 1}, "named '_METADATA': the name is reserved"),
    ({"ocdbt.process_0": 1}, "named 'ocdbt.process_0': the name is reserved"),
    ({"x" * 300: 1}, "at most 255 bytes"),
    ({"a": 1, "a/b": 2}, "leaves 'a' and 'a/b'"),
    ({}, "the state is an empty dict: expected a leaf, or a dict, dataclass, list or tuple"),
    ([], "the state is an empty list"),
    (None, "the state is None"),
]


@pytest.mark.parametrize(("state", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_unsavable_state_is_refused_with_the_leaf_path(state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        pytree.flatten(state)


@pytest.mark.parametrize("leaf", [jnp.ones(3), jax.random.key(1)], ids=["array", "key"])
def test_abstract_arrays_are_refused_by_leaf_path(leaf: jax.Array) -> None:
    state = {"a": {"w": leaf}}
    known = TreeSignature(state, pytree.flatten(state))

    def traced(state: Any) -> Any:
        for take in (pytree.flatten, known.leaves_of):
            with pytest.raises(CheckpointError, match=re.escape("state['a']['w']: a tracer has no values")):
                take(state)
        return state

    jax.jit(traced)(state)
    leaf.delete()
    for take in (pytree.flatten, known.leaves_of):
        with pytest.raises(CheckpointError, match=re.escape("state['a']['w']: the array was deleted")):
            take(state)


def test_big_endian_arrays_are_stored_little_endian() -> None:
    (leaf,) = pytree.flatten({"a": np.asarray([1, 2], ">i4")})
    assert leaf.spec is not None
    assert (leaf.spec.dtype, bytes(as_bytes(leaf.data))) == ("<i4", b"\1\0\0\0\2\0\0\0")


def test_all_processes_make_the_same_plan_and_each_chunk_has_one_writer() -> None:
    leaves = pytree.flatten(rich_state())
    plans = [make_plan(leaves, process, 3) for process in range(3)]
    written = [chunk.file for plan in plans for chunk in plan.chunks if chunk.mine]
    assert len(written) == len(set(written))
    assert {chunk.file for chunk in plans[0].chunks} == set(written)
    assert len({plan.total_bytes for plan in plans}) == 1
    arrays = sorted(index for plan in plans for index in plan.arrays)
    assert arrays == [i for i, leaf in enumerate(leaves) if leaf.spec]


def test_replicated_bytes_are_spread_evenly() -> None:
    leaves = pytree.flatten({f"l{i}": jnp.zeros(size) for i, size in enumerate([1000, 600, 500, 100, 100, 100])})
    loads = [
        sum(leaves[chunk.leaf].data.nbytes for chunk in make_plan(leaves, process, 2).chunks if chunk.mine)
        for process in range(2)
    ]
    assert loads == [1200 * 4, 1200 * 4]


def test_the_digest_distinguishes_forms() -> None:
    def digest(state: Any) -> str:
        return tree_digest(pytree.specs_of(pytree.flatten(state)))

    assert digest(small_state(1)) == digest(small_state(2))
    assert digest({"a": jnp.ones(2)}) != digest({"a": jnp.ones(3)})
    assert digest({"a": jnp.ones(2)}) != digest({"a": jnp.ones(2, jnp.int32)})


class Colour(enum.IntEnum):
    RED = 1


VALUES: list[Any] = [
    None, True, -1, 2**200, 0.1, float("inf"), "text\0é", b"\x00\xff", [], (), {}, [1, (2, [b""])],
    {"a": {"b": (1,)}}, {"__gracepoint__": "tuple", "items": [1]}, np.float32(0.5), np.int64(-3), np.bool_(True),
    np.arange(6, dtype=np.uint8).reshape(2, 3), np.zeros((0, 2)), np.asarray(3.0),
    np.asarray([1, 2], jnp.bfloat16), np.random.default_rng(1).bit_generator.state,
    np.random.RandomState(1).get_state(), 1 + 2j, bytearray(b"\x00"), {1: "a", (2, "b"): {None: 3.0}, b"c": True},
    collections.OrderedDict(z=1, a=[2]), collections.Counter("aab"), collections.deque([1, (2,)], maxlen=3),
    {1, "a"}, frozenset({(1, 2)}), np.asarray(["x", "yz"]), np.datetime64("2020-01-01"), np.arange(3, dtype=">i4"),
    np.str_("text"), jnp.arange(3.0), jnp.asarray(1e-3), jax.random.key(3),
    jax.random.split(jax.random.key(1, impl="rbg"), 2),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=[f"{type(value).__name__}-{i}" for i, value in enumerate(VALUES)])
def test_host_state_comes_back_with_its_exact_types(value: Any) -> None:
    found = host_state.decode(host_state.encode({"x": value}))["x"]
    _assert_identical(found, value)


def _assert_identical(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, jax.Array) and jnp.issubdtype(expected.dtype, jax.dtypes.prng_key):
        assert found.dtype == expected.dtype
        found, expected = jax.random.key_data(found), jax.random.key_data(expected)
    if isinstance(expected, jax.Array):
        assert found.weak_type == expected.weak_type
        found, expected = np.asarray(found), np.asarray(expected)
    if isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _assert_identical(found[key], expected[key])
    elif isinstance(expected, list | tuple | collections.deque):
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _assert_identical(one, other)
    else:
        assert found == expected


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED_HOST_STATE: list[tuple[Any, str]] = [
    ({"rng": [1, {"x": object()}]}, "host_state['rng'][1]['x']: cannot save a value of type object"),
    ({"rng": Colour.RED}, "host_state['rng']: cannot save a value of type Colour"),
    ({"rng": {Colour.RED: 1}}, "host_state['rng']: the key <Colour.RED: 1>: cannot save a value of type Colour"),
    ({"rng": {1: {object()}}}, "host_state['rng'][1][0]: cannot save a value of type object"),
    ({"rng": np.asarray([object()])}, "host_state['rng']: cannot save numpy values of dtype object"),
    ({"rng": np.zeros(1, [("a", "f4")])}, "host_state['rng']: cannot save numpy values of dtype [('a', '<f4')]"),
    ({"rng": np.zeros(1, np.longdouble)}, "host_state['rng']: cannot save numpy values of dtype"),
    ({"rng": np.ma.masked_array([1], [True])}, "type MaskedArray; give .data and .mask, each by itself"),
    ({"rng": np.ones((1, 1)).view(np.matrix)}, "host_state['rng']: cannot save a value of type matrix"),
    ({"rng": np.random.default_rng(1)}, "type Generator; give its .bit_generator.state"),
    ({"rng": collections.defaultdict(int)}, "type defaultdict; give dict(...) of it"),
    ({"rng": Moments(1, 2)}, "host_state['rng']: cannot save a value of type Moments"),
    ({"rng": jax.device_put(jnp.ones(4), sharding("x"))}, "host_state['rng']: expected a JAX array on one device"),
    ({"rng": [1, 10**5000]}, "host_state['rng']: cannot be written as JSON: Exceeds the limit"),
    ({"rng": CYCLE}, "host_state['rng']: expected values that do not contain themselves"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED_HOST_STATE, ids=[m for _, m in REFUSED_HOST_STATE])
def test_host_state_of_other_types_is_refused_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        host_state.encode(value)


def test_host_state_that_cannot_be_read_is_corrupt() -> None:
    for data in (b"{", b"[]", b'{"x": {"__gracepoint__": "no such kind"}}', b'{"x": {"__gracepoint__": 1}}'):
        with pytest.raises(CheckpointCorrupt):
            host_state.decode(data)
