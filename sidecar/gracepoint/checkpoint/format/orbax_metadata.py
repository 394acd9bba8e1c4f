"""Orbax's metadata files: makes them from the leaves of a state, and reads the shardings that ``_sharding`` records.

Shardings are recorded in terms of device ids. On another topology the same ids may refer to other devices, or to none:
a restore that uses the file logs a warning.
"""

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
from gracepoint.errors import CheckpointCorrupt, CheckpointError, CheckpointRefused

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
    device: Any = next(iter(sharding.device_set), None) if isinstance(sharding, jax.sharding.Sharding) else None
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
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
            "platform": device.platform,  # Orbax ignores it
        }
    )


def _devices(ids: Any) -> Any:
    return [_devices(inner) for inner in ids] if isinstance(ids, list) else {"id": ids}


def recorded_shardings(contents: Mapping[str, str], where: str) -> dict[str, dict[str, Any]]:
    """Returns what is recorded of each sharding, by the name of the leaf.

    Raises:
        CheckpointCorrupt: The contents are not in the form that Orbax and Gracepoint write.
    """
    try:
        return {base64.urlsafe_b64decode(name).decode(): json.loads(text) for name, text in contents.items() if text}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{where} cannot be read: {error!r}") from error


def to_jax_sharding(recorded: Mapping[str, Any], where: str) -> jax.sharding.Sharding:
    """Returns the sharding that was recorded.

    If an array was saved on a single device, and this process does not have that device (each process had its own
    copy), the result is the first device of this process.

    Raises:
        CheckpointError: The devices do not exist, or the kind of sharding is unknown. The message says what to pass
            instead.
    """
    match recorded.get("sharding_type"):
        case "NamedSharding":
            return _named(recorded, where)
        case "SingleDeviceSharding":
            # JAX 0.10 names CPU devices differently from earlier versions.
            device_name = recorded["device_str"].replace("TFRT_CPU_", "cpu:")
            local = jax.local_devices()
            named = [device for device in local if str(device).replace("TFRT_CPU_", "cpu:") == device_name]
            return jax.sharding.SingleDeviceSharding((named or local)[0])
        case unknown:
            raise CheckpointRefused(f"{where} was saved with a sharding of kind {unknown!r}: give one to restore with")


def without_last_axis(sharding: jax.sharding.Sharding, ndim: int) -> jax.sharding.Sharding | None:
    """Returns the sharding of typed keys, given the sharding of their data with ``ndim`` axes. None if none fits."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    if len(sharding.spec) == ndim and sharding.spec[-1] is not None:
        return None
    spec = jax.sharding.PartitionSpec(*sharding.spec[: ndim - 1])
    return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def platform_of(recorded: Mapping[str, Any]) -> str | None:
    """Returns the platform of the devices of a recorded sharding: ``cpu``, ``gpu``, ``tpu``. None if nothing says it.

    Orbax, and older versions of Gracepoint, record it of single devices only, as a part of the device's name.
    """
    if (platform := recorded.get("platform")) is not None:
        return str(platform)
    name = str(recorded.get("device_str", "")).lower()
    platforms = {"cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu", "cpu": "cpu", "tfrt_cpu": "cpu"}
    return next((platform for start, platform in platforms.items() if name.startswith(start)), None)


def sharding_fits(recorded: Mapping[str, Any] | None) -> bool:
    """True if an array was saved with a ``NamedSharding`` whose devices all exist."""
    if recorded is None or recorded.get("sharding_type") != "NamedSharding":
        return False
    try:
        _named(recorded, "")
    except CheckpointError:
        return False
    return True


def describe_sharding(sharding: Any) -> str:
    """Returns a description of a sharding, which is JAX's or a recorded one. Empty for None."""
    if sharding is None:
        return ""
    if isinstance(sharding, Mapping):
        if sharding.get("sharding_type") != "NamedSharding":
            return f"on {sharding.get('device_str', 'unknown devices')}"
        axes = zip(sharding["axis_names"], sharding["shape"], strict=True)
        return _in_words(sharding["partition_spec"], axes)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _in_words(tuple(sharding.spec), sharding.mesh.shape.items())
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return f"on {next(iter(sharding.device_set))}"
    return str(sharding)


def _named(recorded: Mapping[str, Any], where: str) -> jax.sharding.NamedSharding:
    by_id = {device.id: device for device in jax.devices()}
    ids = [device["id"] for device in _flat((recorded.get("device_mesh") or {}).get("mesh", []))]
    if not ids:
        ids = list(by_id)  # as Orbax does
    if missing := [device_id for device_id in ids if device_id not in by_id]:
        raise CheckpointRefused(
            f"{where} was saved {describe_sharding(recorded)} on devices {ids}, of which {missing} are not here (found "
            f"{list(by_id)}): give a sharding to restore with"
        )
    shape = recorded["shape"]
    if len(ids) != int(np.prod(shape)):
        raise CheckpointRefused(
            f"{where} was saved {describe_sharding(recorded)}, and here are {len(ids)} devices: give a sharding to "
            "restore with"
        )
    devices = np.array([by_id[device_id] for device_id in ids], object).reshape(shape)
    types = {str(axis_type): axis_type for axis_type in jax.sharding.AxisType}
    mesh = jax.sharding.Mesh(
        devices,
        tuple(recorded["axis_names"]),
        axis_types=tuple(types[name] for name in recorded["axis_types"]) if recorded.get("axis_types") else None,
    )
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*_spec(recorded["partition_spec"])))


def _flat(mesh: Any) -> list[Any]:
    return [device for inner in mesh for device in _flat(inner)] if isinstance(mesh, list) else [mesh]


def _spec(entries: Sequence[Any]) -> list[Any]:
    return [tuple(entry) if isinstance(entry, list) else entry for entry in entries]


def _in_words(spec: Sequence[Any], axes: Any) -> str:
    axes = tuple(axes)
    if all(size == 1 for _, size in axes):
        return "on one device"
    over = ", ".join(f"{name}={size}" for name, size in axes)
    if not any(spec):
        return f"replicated over {over}"
    return f"sharded ({', '.join(str(entry) for entry in _spec(list(spec)))}) over {over}"
