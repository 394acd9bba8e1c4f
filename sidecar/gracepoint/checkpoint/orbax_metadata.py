"""Orbax's metadata files, made from the leaves of a state."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint import layout
from gracepoint.checkpoint.tree import Leaf


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
