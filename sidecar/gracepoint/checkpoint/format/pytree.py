"""Flattens the train state into named leaves. The names are those that Orbax gives.

The name of a leaf is its keys joined by dots (``params.w``). It is also the name of its folder below ``default/``. As
in Orbax there are only two kinds of containers: mappings (dict, dataclass, namedtuple), whose keys are names, and
sequences (list, tuple), whose keys are positions. Empty containers and None have a name and no data.

A function is code and no data: an activation of an Equinox module, say. It has the place of a None in the checkpoint,
and a restore takes it from ``like``.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.numpy import ufunc

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec, Kind, zarr_dtype
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.errors import CheckpointRefused
from gracepoint.jax_isolation import isolated

# Orbax's names for the kinds, in _METADATA.
_VALUE_TYPES: Mapping[Kind, str] = {
    "array": "jax.Array",
    "key": "jax.Array",
    "numpy": "np.ndarray",
    "scalar": "scalar",
}
#: Orbax's name for a string, which is not an array.
STRING = "string"
SEQUENCE, MAPPING = 1, 2
_MAX_NAME_BYTES = 255  # of one part of a path, on common file systems
# What JAX makes of functions (jit, custom_jvp, ...) has the function as ``__wrapped__``.
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, type, np.ufunc, ufunc)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the state with its data.

    Attributes:
        name: The keys, joined by dots.
        keys: Each key with Orbax's key type, ``SEQUENCE`` or ``MAPPING``.
        value_type: Orbax's name of the kind of value. If a type handler saves the leaf, the handler's ``typestr``.
        spec: What is stored. None if the leaf is not an array: an empty container, None, a string, or a leaf that a
            type handler saves.
        data: A ``jax.Array`` (of a typed key: its uint32 data), a numpy array or a string. If a type handler saves the
            leaf, the value itself. None if the leaf is empty, or if only its form is kept.
        path: JAX's key path.
        is_handled: True if a type handler saves the leaf.
        is_code: True if the leaf is a function, which is not saved.
    """

    name: str
    keys: tuple[tuple[str, int], ...]
    value_type: str
    spec: ArraySpec | None
    data: Any = None
    path: tuple[Any, ...] = ()
    is_handled: bool = False
    is_code: bool = False

    @property
    def is_empty(self) -> bool:
        """True if the leaf has no data: None, an empty container, or a function."""
        return self.spec is None and self.value_type != STRING and not self.is_handled

    @property
    def is_global(self) -> bool:
        """True if the data is one array over all processes. False if each process has its own copy."""
        return isinstance(self.data, jax.Array) and not self.data.is_fully_addressable


def path_of(keys: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Returns JAX's key path as (key, Orbax's key type) pairs."""
    path = []
    for key in keys:
        match key:
            case jax.tree_util.SequenceKey(idx=name) | jax.tree_util.FlattenedIndexKey(key=name):
                path.append((str(name), SEQUENCE))
            case jax.tree_util.DictKey(key=name) | jax.tree_util.GetAttrKey(name=name):
                path.append((str(name), MAPPING))
            case _:
                raise CheckpointRefused(f"state{jax.tree_util.keystr(tuple(keys))}: unknown kind of key {key!r}")
    return tuple(path)


def name_of(keys: Sequence[tuple[str, int]]) -> str:
    return ".".join(key for key, _ in keys)


def is_empty_or_leaf(node: Any) -> bool:
    """True for leaves, None and empty containers."""
    children = jax.tree_util.tree_leaves(node, is_leaf=lambda child: child is not node)
    return not children or children[0] is node


def leaf_test(handlers: HandlerRegistry | None) -> Callable[[Any], bool] | None:
    """Returns a test for nodes whose type has a handler. Such nodes are leaves, even if JAX would flatten them."""
    return None if handlers is None else lambda node: node is not None and handlers.has(type(node))


def flatten(state: Any, handlers: HandlerRegistry | None = None) -> list[Leaf]:
    """Returns the leaves of ``state``, empty ones included, in JAX's order.

    Args:
        state: The state.
        handlers: Handlers for types that cannot be saved without one. None: no handlers.

    Raises:
        CheckpointError: A leaf cannot be saved, or two leaves have one name; the message names the path.
    """
    is_handled = leaf_test(handlers) or (lambda node: False)
    nodes, _ = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda node: is_handled(node) or is_empty_or_leaf(node)
    )
    if not nodes[0][0] and not jax.tree_util.tree_leaves(state, is_leaf=is_handled):
        raise CheckpointRefused(
            f"the state is {'None' if state is None else f'an empty {type(state).__qualname__}'}: expected a leaf, or "
            f"a dict, dataclass, list or tuple"
        )
    leaves = [leaf_of(path, value, handlers) for path, value in nodes]
    _check_names(leaves)
    return leaves


def specs_of(leaves: Sequence[Leaf]) -> list[ArraySpec]:
    return [leaf.spec for leaf in leaves if leaf.spec is not None]


def is_typed_key(value: Any) -> bool:
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def leaf_of(path: Sequence[Any], value: Any, handlers: HandlerRegistry | None = None) -> Leaf:
    """Returns the leaf at JAX's key path ``path``.

    Raises:
        CheckpointError: The leaf cannot be saved. The message names the path.
    """
    keys = path_of(path)
    where = f"state{jax.tree_util.keystr(tuple(path))}"
    name = name_of(keys)
    key_impl, data = None, value
    check_there(path, value)
    kind: Kind
    if is_typed_key(value):
        with isolated():
            kind, key_impl, data = "key", str(jax.random.key_impl(value)), jax.random.key_data(value)
    elif isinstance(value, jax.Array):
        kind = "array"
    elif isinstance(value, np.ndarray):
        check_plain(where, value)
        kind = "numpy"
    elif isinstance(value, np.generic | bool | int | float | complex) and not isinstance(value, np.str_):
        kind, data = "scalar", np.asarray(value)
    elif isinstance(value, str):
        return Leaf(name, keys, STRING, None, value, tuple(path))
    elif handlers is not None and value is not None and handlers.has(type(value)):
        handler = handlers.get(type(value))
        return Leaf(name, keys, handler.typestr, None, value, tuple(path), is_handled=True)
    elif path and is_code(value):
        return Leaf(name, keys, _empty_value_type(None), None, path=tuple(path), is_code=True)
    elif not jax.tree_util.tree_leaves(value):
        return Leaf(name, keys, _empty_value_type(value), None)
    else:
        raise CheckpointRefused(
            f"{where}: cannot save a value of type {type(value).__qualname__}; expected a jax.Array, numpy array, "
            "number, string or function, or a type that handlers= has (per-process values belong into the host state)"
        )
    dtype = zarr_dtype(np.dtype(data.dtype))
    if dtype is None:
        raise CheckpointRefused(f"{where}: cannot save arrays of dtype {data.dtype}")
    if isinstance(data, np.ndarray):
        order = "<" if data.dtype.byteorder == ">" else "="  # files are little-endian, as are all of JAX's hosts
        data = np.asarray(data, data.dtype.newbyteorder(order), order="C")
    shape = tuple(data.shape)
    spec = ArraySpec(name, kind, shape, dtype, _chunk_shape(where, data, shape), key_impl)
    return Leaf(name, keys, _VALUE_TYPES[kind], spec, data, tuple(path))


def is_code(value: Any) -> bool:
    """Returns whether a leaf is a function or a class. Other objects that can be called may hold values."""
    if isinstance(value, functools.partial):
        bound = jax.tree_util.tree_leaves((value.args, value.keywords))
        return is_code(value.func) and not any(isinstance(each, jax.Array | np.ndarray) for each in bound)
    return isinstance(value, _CODE) or (callable(value) and is_code(getattr(value, "__wrapped__", None)))


def check_plain(where: str, value: np.ndarray[Any, Any]) -> None:
    """Raises CheckpointRefused for a numpy array that is more than its values: masked, with units, a matrix.

    ``where`` names the leaf.
    """
    kind = type(value)
    if kind is np.ndarray or kind is np.memmap or kind.__module__.startswith("jax."):  # a constant of JAX's
        return
    substitute = (
        "its .data and its .mask, as two leaves" if isinstance(value, np.ma.MaskedArray) else "np.asarray() of it"
    )
    raise CheckpointRefused(
        f"{where}: expected a plain numpy array, found a {kind.__qualname__}, which would come back as a plain one: "
        f"save {substitute}"
    )


def check_there(path: Sequence[Any], value: Any) -> None:
    """Raises CheckpointError if the leaf is a tracer or a deleted array. The message names the path."""
    if isinstance(value, jax.core.Tracer):
        raise CheckpointRefused(
            f"state{jax.tree_util.keystr(tuple(path))}: a tracer has no values: save outside of jit, grad and the like"
        )
    if isinstance(value, jax.Array) and value.is_deleted():
        raise CheckpointRefused(
            f"state{jax.tree_util.keystr(tuple(path))}: the array was deleted, as by a step that it was donated to: "
            "save what the step returned"
        )


def _chunk_shape(where: str, data: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(data, np.ndarray):
        return shape
    try:
        return tuple(data.sharding.shard_shape(shape))
    except ValueError as error:
        raise CheckpointRefused(f"{where}: shards of different shapes cannot be saved: {error}") from error


def _empty_value_type(value: Any) -> str:
    # Orbax restores an empty namedtuple and other empty nodes as None.
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return "Tuple"
    if isinstance(value, list):
        return "List"
    return "Dict" if isinstance(value, Mapping) else "None"


def _check_names(leaves: Sequence[Leaf]) -> None:
    names: set[str] = set()
    for leaf in leaves:
        if not leaf.keys:
            continue  # the state is one leaf, whose files are next to its metadata, as in Orbax
        parts = leaf.name.split("/")
        if leaf.name in names:
            raise CheckpointRefused(f"two leaves of the state are named {leaf.name!r}: rename one of them")
        if any(part in ("", ".", "..") or len(part.encode()) > _MAX_NAME_BYTES for part in parts):
            raise CheckpointRefused(
                f"a leaf of the state is named {leaf.name!r}: each part of it between slashes becomes a folder, so "
                f"must not be empty, '.' or '..' and have at most {_MAX_NAME_BYTES} bytes"
            )
        if layout.is_reserved(parts[0]) or "\0" in leaf.name:
            raise CheckpointRefused(f"a leaf of the state is named {leaf.name!r}: the name is reserved")
        names.add(leaf.name)
    for name in names:
        parts = name.split("/")
        for inside in ("/".join(parts[:count]) for count in range(1, len(parts))):
            if inside in names:
                raise CheckpointRefused(f"leaves {inside!r} and {name!r}: one's folder lies in the other's; rename one")
