"""Compares what a job was saved on, or was given, with what it runs on: processes, devices, mesh. Reads no file."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax

from gracepoint.checkpoint.format import sharding_file
from gracepoint.checkpoint.reading.stored_tree import StoredTree
from gracepoint.errors import CheckpointRefused, SettingsError


@dataclasses.dataclass(frozen=True)
class Form:
    """What a gang trains on. None for each part that is not known.

    Attributes:
        processes: Number of processes.
        mesh: Names and sizes of the axes of the largest mesh.
        platform: JAX's name of the kind of devices: ``cpu``, ``gpu``, ``tpu``. If there are several, not the CPU.
    """

    processes: int | None
    mesh: tuple[tuple[str, int], ...] | None
    platform: str | None = None

    @property
    def devices(self) -> int:
        """Number of devices. If there is no mesh, each process has used one."""
        return _devices(self.mesh) if self.mesh is not None else self.processes or 1

    def changes(self, now: Form) -> tuple[str, ...]:
        """Returns what is different now, in words. Parts that are not known are left out."""
        found = []
        if self.processes is not None and now.processes is not None and self.processes != now.processes:
            found.append(f"processes: {self.processes} -> {now.processes}")
        if None not in (self.platform, now.platform) and self.platform != now.platform:
            found.append(f"devices: {self.devices} {self.platform} -> {now.devices} {now.platform}")
        elif self.mesh is not None and now.mesh is not None and self.devices != now.devices:
            found.append(f"devices: {self.devices} -> {now.devices}")
        if self.mesh is not None and now.mesh is not None and self.mesh != now.mesh:
            found.append(f"mesh: {_in_words(self.mesh)} -> {_in_words(now.mesh)}")
        return tuple(found)


def form_of_stored(stored: StoredTree) -> Form:
    """Returns what a checkpoint was saved on, as far as it is recorded."""
    shardings = [leaf.sharding for leaf in stored.leaves.values() if leaf.sharding is not None]
    meshes = [
        tuple((str(name), int(size)) for name, size in zip(recorded["axis_names"], recorded["shape"], strict=True))
        for recorded in shardings
        if recorded.get("sharding_type") == "NamedSharding"
    ]
    processes = None if stored.manifest is None else stored.manifest.process_count
    return Form(processes, _largest(meshes), _platform(map(sharding_file.platform_of, shardings)))


def form_of_state(state: Any, processes: int) -> Form:
    """Returns what a state, or its form, is placed on."""
    shardings = [sharding for leaf in jax.tree.leaves(state) if (sharding := getattr(leaf, "sharding", None))]
    meshes = [tuple(each.mesh.shape.items()) for each in shardings if isinstance(each, jax.sharding.NamedSharding)]
    devices = (device for each in shardings for device in list(getattr(each, "device_set", ()))[:1])
    return Form(processes, _largest(meshes), _platform(device.platform for device in devices))


def check_devices(stored: StoredTree) -> None:
    """To be called before a job goes on from a checkpoint of its own.

    Raises:
        CheckpointRefused: It was saved on accelerators, and JAX has taken the CPU here without being told to.
    """
    before = form_of_stored(stored)
    if before.platform in (None, "cpu") or not cpu_by_fallback():
        return
    raise CheckpointRefused(
        f"{stored.folder} was saved on {before.devices} {before.platform}, and JAX finds {jax.device_count()} cpu: "
        f"{before.devices} {before.platform} -> {jax.device_count()} cpu. {FALLBACK}"
    )


def check_accelerators_of_container(environ: Mapping[str, str]) -> None:
    """To be called at a start, of which no checkpoint may say what the job computed on before.

    Only what the device plugins of Kubernetes set counts: images set ``NVIDIA_VISIBLE_DEVICES=all`` without any device.

    Raises:
        SettingsError: The container was given accelerators, and JAX has taken the CPU without being told to.
    """
    given = {name: value for name in _GIVEN if _GIVEN[name].match(value := environ.get(name, ""))}
    if given and cpu_by_fallback():
        shown = ", ".join(f"{name}={value}" for name, value in given.items())
        raise SettingsError(f"{shown} gives this container accelerators, and JAX finds cpu alone. {FALLBACK}")


# Environment variable -> what its value begins with if a device plugin has set it.
_GIVEN = {
    "NVIDIA_VISIBLE_DEVICES": re.compile("GPU-|MIG-"),
    "TPU_WORKER_HOSTNAMES": re.compile("."),
    "TPU_ACCELERATOR_TYPE": re.compile("."),
}
FALLBACK = (
    "The driver is not ready, or JAX's package for these devices is missing; JAX then takes the CPU without an error. "
    "Start again when jax.devices() shows the devices: with JAX_PLATFORMS=cuda (or tpu), JAX itself raises until then. "
    "If training is to go on on the CPU, set JAX_PLATFORMS=cpu"
)


def cpu_by_fallback() -> bool:
    """Returns whether JAX computes on the CPU though nobody has told it to (``JAX_PLATFORMS``, ``jax_platforms``)."""
    chosen = jax.config.jax_platforms or getattr(jax.config, "jax_platform_name", None)
    return jax.default_backend() == "cpu" and not chosen


def _largest(meshes: Iterable[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...] | None:
    return max(meshes, key=_devices, default=None)


def _platform(platforms: Iterable[str | None]) -> str | None:
    found = {platform for platform in platforms if platform is not None}
    return min(found - {"cpu"}, default="cpu" if found else None)


def _devices(mesh: tuple[tuple[str, int], ...]) -> int:
    return math.prod(size for _, size in mesh)


def _in_words(mesh: tuple[tuple[str, int], ...]) -> str:
    return "x".join(f"{name}={size}" for name, size in mesh) or "no axes"
