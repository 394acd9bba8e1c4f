"""Makes Orbax's metadata files from the leaves of a state as they are stored."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec, Format
from gracepoint.checkpoint.format.pytree import STRING, Leaf

_NO_CUSTOM_METADATA = b"null}"
# The devices of larger meshes are not listed, as every array would list them all. Orbax then takes ``jax.devices()``.
_LISTED_DEVICES = 1024


def metadata_files(
    leaves: Sequence[Leaf], *, store_sharding: bool = True, store_array_metadata: bool = True
) -> dict[str, bytes]:
    """Returns the contents of Orbax's metadata files, by path below the item's folder."""
    files = {layout.TREE_METADATA: _tree_metadata(leaves)}
    if store_array_metadata:
        files[layout.array_metadata(0)] = array_metadata(leaves)
    if store_sharding:
        files[layout.SHARDING] = sharding(leaves)
    return files


def with_custom_metadata(tree_metadata: bytes, custom_metadata: Mapping[str, Any]) -> bytes:
    """Returns the contents of the file of tree metadata with ``custom_metadata`` in it."""
    assert tree_metadata.endswith(_NO_CUSTOM_METADATA)
    return tree_metadata.removesuffix(_NO_CUSTOM_METADATA) + json.dumps(custom_metadata).encode() + b"}"


def more_metadata(custom_metadata: Mapping[str, Any], item_handlers: Mapping[str, str]) -> bytes:
    """Returns the contents of ``layout.MORE_METADATA``: custom metadata, and the handlers of further items."""
    return json.dumps({"item_handlers": item_handlers, "custom_metadata": custom_metadata}).encode()


def array_metadata(leaves: Sequence[Leaf]) -> bytes:
    """Returns the array metadata: write shapes, chunk shapes, and implementations of typed keys."""
    entries = [
        {
            "array_metadata": {
                "param_name": spec.name,
                "write_shape": spec.write_shape or spec.chunk,
                "chunk_shape": spec.chunk,
                "ext_metadata": {"random_key_impl": spec.key_impl} if spec.key_impl else None,
            }
        }
        for spec in (leaf.spec for leaf in leaves)
        if _is_jax_array(spec)
    ]
    return json.dumps({"array_metadatas": entries}).encode()


def sharding(leaves: Sequence[Leaf]) -> bytes:
    """Returns the shardings of all arrays as JSON, by their encoded names."""
    texts: dict[Any, str | None] = {}  # by sharding, which many leaves have in common
    shardings = {}
    for leaf in leaves:
        if isinstance(leaf.data, jax.Array):
            if leaf.data.sharding not in texts:
                texts[leaf.data.sharding] = _sharding_json(leaf.data.sharding)
            if text := texts[leaf.data.sharding]:
                shardings[base64.urlsafe_b64encode(leaf.name.encode()).decode()] = text
    return json.dumps(shardings).encode()


def strings(leaves: Sequence[Leaf]) -> bytes | None:
    """Returns the values of the leaves that are strings as JSON. None if there are none.

    Orbax finds each value by its name as a JSON pointer: a slash in the name separates the levels of nested objects.
    """
    tree: dict[str, Any] = {}
    for leaf in leaves:
        if leaf.value_type == STRING:
            *above, key = (part.replace("~1", "/").replace("~0", "~") for part in leaf.name.split("/"))
            place = tree
            for part in above:
                place = place.setdefault(part, {})
            place[key] = leaf.data
    return json.dumps(tree).encode() if tree else None


def _tree_metadata(leaves: Sequence[Leaf]) -> bytes:
    form = next((leaf.spec.format for leaf in leaves if leaf.spec), Format())
    tree = {
        str(tuple(key for key, _ in leaf.keys)): {
            "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in leaf.keys],
            "value_metadata": {
                "value_type": leaf.value_type,
                "skip_deserialize": leaf.is_empty,
                **({"write_shape": spec.write_shape or spec.chunk} if _is_jax_array(spec := leaf.spec) else {}),
            },
        }
        for leaf in leaves
    }
    metadata = {
        "tree_metadata": tree,
        "use_ocdbt": form.ocdbt,
        "use_zarr3": form.zarr == 3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,  # the last entry, see ``with_custom_metadata``
    }
    return json.dumps(metadata).encode()


def _is_jax_array(spec: ArraySpec | None) -> TypeGuard[ArraySpec]:
    return spec is not None and spec.kind in ("array", "key")


def _sharding_json(sharding: Any) -> str | None:
    """Returns ``sharding`` as Orbax writes it. None for kinds that Orbax does not know."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        device = next(iter(sharding.device_set))
        return json.dumps(
            {"sharding_type": "SingleDeviceSharding", "device_str": str(device), "platform": device.platform}
        )
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = sharding.mesh
    devices = {}
    if mesh.size <= _LISTED_DEVICES:
        ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices).tolist()
        devices["device_mesh"] = {"mesh": _devices(ids)}
    return json.dumps(
        {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.shape.values()),
            "axis_names": list(mesh.axis_names),
            "axis_types": [str(axis_type) for axis_type in mesh.axis_types],
            "partition_spec": list(sharding.spec),
            **devices,
            "platform": next(iter(sharding.device_set)).platform,  # Orbax ignores it
        }
    )


def _devices(ids: Any) -> Any:
    return [_devices(inner) for inner in ids] if isinstance(ids, list) else {"id": ids}
