"""Orbax's ``_sharding`` file: the shardings with which arrays were saved, in terms of device ids.

On another topology the same ids may refer to other devices, or to none. A restore that uses the file logs a warning.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gracepoint.errors import CheckpointCorrupt, CheckpointError, CheckpointRefused


def parse(contents: Mapping[str, str], where: str) -> dict[str, dict[str, Any]]:
    """Returns what is recorded of each sharding, by the name of the leaf.

    Raises:
        CheckpointCorrupt: The contents are not in the form that Orbax and Gracepoint write.
    """
    try:
        return {base64.urlsafe_b64decode(name).decode(): json.loads(text) for name, text in contents.items() if text}
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{where} cannot be read: {error!r}") from error


def to_jax(recorded: Mapping[str, Any], where: str) -> jax.sharding.Sharding:
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
            wanted = recorded["device_str"].replace("TFRT_CPU_", "cpu:")
            local = jax.local_devices()
            named = [device for device in local if str(device).replace("TFRT_CPU_", "cpu:") == wanted]
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
    known = {"cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu", "cpu": "cpu", "tfrt_cpu": "cpu"}
    return next((platform for start, platform in known.items() if name.startswith(start)), None)


def fits(recorded: Mapping[str, Any] | None) -> bool:
    """True if an array was saved with a ``NamedSharding`` whose devices all exist."""
    if recorded is None or recorded.get("sharding_type") != "NamedSharding":
        return False
    try:
        _named(recorded, "")
    except CheckpointError:
        return False
    return True


def describe(sharding: Any) -> str:
    """Returns a description of a sharding, which is JAX's or a recorded one. Empty for None."""
    if sharding is None:
        return ""
    if isinstance(sharding, Mapping):
        if sharding.get("sharding_type") != "NamedSharding":
            return f"on {sharding.get('device_str', 'unknown devices')}"
        axes = zip(sharding["axis_names"], sharding["shape"], strict=True)
        return _in_words(sharding["partition_spec"], axes)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return _in_words(sharding.spec, sharding.mesh.shape.items())
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
            f"{where} was saved {describe(recorded)} on devices {ids}, of which {missing} are not here (found "
            f"{list(by_id)}): give a sharding to restore with"
        )
    shape = recorded["shape"]
    if len(ids) != int(np.prod(shape)):
        raise CheckpointRefused(
            f"{where} was saved {describe(recorded)}, and here are {len(ids)} devices: give a sharding to restore with"
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
