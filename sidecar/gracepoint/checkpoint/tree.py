"""The train state as named leaves, the way Orbax names them, and Orbax's metadata files made from them.

A leaf's name is its keys joined by dots (``params.w``); it is also its folder below ``default/``. Containers
are told apart only as mappings (dict, dataclass, namedtuple: by name) and sequences (list, tuple: by
position), as in Orbax; empty containers and None have a name and no data.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint import layout
from gracepoint.errors import CheckpointError

Kind = Literal["array", "key", "numpy", "scalar", "empty"]

# Orbax's own words for the kinds, in _METADATA.
_VALUE_TYPES: Mapping[Kind, str] = {
    "array": "jax.Array",
    "key": "jax.Array",
    "numpy": "np.ndarray",
    "scalar": "scalar",
}
_SEQUENCE, _MAPPING = 1, 2
_MAX_NAME_BYTES = 255  # of one part of a path, on the usual file systems


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """What is stored of a leaf: the same in all processes, and enough to open its chunks."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str  # of zarr2: "<f4", "bfloat16"
    chunk: tuple[int, ...]  # shape of one chunk
    key_impl: str | None = None  # of a typed PRNG key, whose data is uint32 with one more axis

    def to_json(self) -> list[Any]:
        return [self.name, self.kind, self.shape, self.dtype, self.chunk, self.key_impl]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> ArraySpec:
        name, kind, shape, dtype, chunk, key_impl = value
        return cls(name, kind, tuple(shape), dtype, tuple(chunk), key_impl)

    @property
    def zarray(self) -> dict[str, Any]:
        """The array's metadata in zarr2, as Orbax writes it."""
        return {
            "chunks": [max(1, size) for size in self.chunk],
            "compressor": None,
            "dimension_separator": ".",
            "dtype": self.dtype,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(self.shape),
            "zarr_format": 2,
        }


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of the state with its data; ``spec`` is None for an empty container or None."""

    name: str
    keys: tuple[tuple[str, int], ...]  # each key with Orbax's key type
    value_type: str
    spec: ArraySpec | None
    data: Any = None  # jax.Array (of a typed key: its uint32 data) or numpy.ndarray

    @property
    def is_global(self) -> bool:
        """True if the data is one array over all processes, False if each process has its own copy."""
        return isinstance(self.data, jax.Array) and not self.data.is_fully_addressable


def path_of(keys: Sequence[Any]) -> tuple[tuple[str, int], ...]:
    """Returns JAX's key path as (key, Orbax's key type) pairs."""
    found = []
    for key in keys:
        match key:
            case jax.tree_util.SequenceKey(idx=name) | jax.tree_util.FlattenedIndexKey(key=name):
                found.append((str(name), _SEQUENCE))
            case jax.tree_util.DictKey(key=name) | jax.tree_util.GetAttrKey(name=name):
                found.append((str(name), _MAPPING))
            case _:
                raise CheckpointError(f"state{jax.tree_util.keystr(tuple(keys))}: unknown kind of key {key!r}")
    return tuple(found)


def name_of(keys: Sequence[tuple[str, int]]) -> str:
    return ".".join(key for key, _ in keys)


def is_empty_or_leaf(node: Any) -> bool:
    """True for leaves, and for None and containers without anything in them."""
    children = jax.tree_util.tree_leaves(node, is_leaf=lambda child: child is not node)
    return not children or children[0] is node


def flatten(state: Any) -> list[Leaf]:
    """Returns the leaves of ``state``, empty ones included, in JAX's order.

    Raises:
        CheckpointError: A leaf cannot be saved, or two leaves have one name; the message names the path.
    """
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_empty_or_leaf)
    leaves = [_leaf(path, value) for path, value in nodes]
    if not any(leaf.spec for leaf in leaves):
        raise CheckpointError("the state has no arrays: expected a dict, dataclass, list or tuple with some")
    _check_names(leaves)
    return leaves


def specs_of(leaves: Sequence[Leaf]) -> list[ArraySpec]:
    return [leaf.spec for leaf in leaves if leaf.spec is not None]


def digest(specs: Sequence[ArraySpec]) -> str:
    """Returns what must be equal in all processes for their files to be of one tree."""
    return hashlib.sha256(json.dumps([spec.to_json() for spec in specs]).encode()).hexdigest()


def zarr_dtype(dtype: np.dtype[Any]) -> str | None:
    """Returns zarr2's name of ``dtype``, or None if it has none."""
    if dtype.type.__module__ == "ml_dtypes":
        return dtype.name
    if (
        dtype.kind in "biu"
        or (dtype.kind == "f" and dtype.itemsize <= 8)
        or (dtype.kind == "c" and dtype.itemsize <= 16)
    ):
        return dtype.newbyteorder("<").str
    return None


def is_typed_key(value: Any) -> bool:
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(
        value.dtype, jax.dtypes.prng_key
    )


def _leaf(path: Sequence[Any], value: Any) -> Leaf:
    keys = path_of(path)
    where = f"state{jax.tree_util.keystr(tuple(path))}"
    name = name_of(keys)
    key_impl, data = None, value
    kind: Kind
    if is_typed_key(value):
        kind, key_impl, data = "key", str(jax.random.key_impl(value)), jax.random.key_data(value)
    elif isinstance(value, jax.Array):
        kind = "array"
    elif isinstance(value, np.ndarray):
        kind = "numpy"
    elif isinstance(value, np.generic | bool | int | float):
        kind, data = "scalar", np.asarray(value)
    elif not jax.tree_util.tree_leaves(value):
        return Leaf(name, keys, _empty_value_type(value), None)
    else:
        raise CheckpointError(
            f"{where}: cannot save a {type(value).__qualname__}; expected a jax.Array, numpy array or number "
            "(per-process values that are no arrays belong into the host state)"
        )
    dtype = zarr_dtype(np.dtype(data.dtype))
    if dtype is None:
        raise CheckpointError(f"{where}: cannot save arrays of dtype {data.dtype}")
    if isinstance(data, np.ndarray):
        order = "<" if data.dtype.byteorder == ">" else "="  # files are little-endian, as all of JAX's hosts
        data = np.asarray(data, data.dtype.newbyteorder(order), order="C")
    shape = tuple(data.shape)
    spec = ArraySpec(name, kind, shape, dtype, _chunk_shape(where, data, shape), key_impl)
    return Leaf(name, keys, _VALUE_TYPES[kind], spec, data)


def _chunk_shape(where: str, data: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(data, np.ndarray):
        return shape
    try:
        return tuple(data.sharding.shard_shape(shape))
    except ValueError as error:
        raise CheckpointError(f"{where}: shards of different shapes cannot be saved: {error}") from error


def _empty_value_type(value: Any) -> str:
    # Orbax restores an empty namedtuple and other empty nodes as None.
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return "Tuple"
    if isinstance(value, list):
        return "List"
    return "Dict" if isinstance(value, Mapping) else "None"


def _check_names(leaves: Sequence[Leaf]) -> None:
    seen: set[str] = set()
    for leaf in leaves:
        parts = leaf.name.split("/")
        if leaf.name in seen:
            raise CheckpointError(f"two leaves of the state are named {leaf.name!r}: rename one of them")
        if any(part in ("", ".", "..") or len(part.encode()) > _MAX_NAME_BYTES for part in parts):
            raise CheckpointError(
                f"a leaf of the state is named {leaf.name!r}: each part of it between slashes becomes a folder, so "
                f"must not be empty, '.' or '..' and have at most {_MAX_NAME_BYTES} bytes"
            )
        if parts[0] in layout.RESERVED_LEAF_NAMES or "\0" in leaf.name:
            raise CheckpointError(f"a leaf of the state is named {leaf.name!r}: the name is reserved")
        seen.add(leaf.name)
    for name in seen:
        parts = name.split("/")
        for inside in ("/".join(parts[:count]) for count in range(1, len(parts))):
            if inside in seen:
                raise CheckpointError(f"leaves {inside!r} and {name!r}: one's folder lies in the other's; rename one")


def metadata_files(leaves: Sequence[Leaf]) -> dict[str, bytes]:
    """Returns Orbax's metadata files below ``default/`` by name."""
    tree = {
        str(tuple(key for key, _ in leaf.keys)): {
            "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in leaf.keys],
            "value_metadata": {
                "value_type": leaf.value_type,
                "skip_deserialize": leaf.spec is None,
                **({"write_shape": leaf.spec.chunk} if leaf.spec and leaf.spec.kind in ("array", "key") else {}),
            },
        }
        for leaf in leaves
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    array_metadatas = [
        {
            "array_metadata": {
                "param_name": leaf.name,
                "write_shape": leaf.spec.chunk,
                "chunk_shape": leaf.spec.chunk,
                "ext_metadata": {"random_key_impl": leaf.spec.key_impl} if leaf.spec.key_impl else None,
            }
        }
        for leaf in leaves
        if leaf.spec and leaf.spec.kind in ("array", "key")
    ]
    shardings = {
        base64.b64encode(leaf.name.encode()).decode(): sharding
        for leaf in leaves
        if isinstance(leaf.data, jax.Array) and (sharding := _sharding_json(leaf.data.sharding))
    }
    return {
        layout.TREE_METADATA: json.dumps(metadata).encode(),
        layout.ARRAY_METADATA: json.dumps({"array_metadatas": array_metadatas}).encode(),
        layout.SHARDING: json.dumps(shardings).encode(),
    }


def _sharding_json(sharding: Any) -> str | None:
    """Returns Orbax's text of ``sharding``; None for kinds that it does not know either."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        device = next(iter(sharding.device_set))
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(device)})
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = sharding.mesh
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices).tolist()
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.shape.values()),
            "axis_names": list(mesh.axis_names),
            "axis_types": [str(axis_type) for axis_type in mesh.axis_types],
            "partition_spec": list(sharding.spec),
            "device_mesh": {"mesh": _devices(ids)},
        }
    )


def _devices(ids: Any) -> Any:
    return [_devices(inner) for inner in ids] if isinstance(ids, list) else {"id": ids}


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Returns the bytes of ``array`` in C order, without a copy where they are so already."""
    flat = np.asarray(array, order="C").reshape(-1)
    return flat.view(np.uint8).data
