"""Compares what a checkpoint was saved on with what it is restored on: processes, devices, mesh. Reads no file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from gracepoint.checkpoint.reading.stored_tree import StoredTree


@dataclasses.dataclass(frozen=True)
class Form:
    """What a gang trains on. None for each part that is not known.

    Attributes:
        processes: Number of processes.
        mesh: Names and sizes of the axes of the largest mesh.
    """

    processes: int | None
    mesh: tuple[tuple[str, int], ...] | None

    def changes(self, now: Form) -> tuple[str, ...]:
        """Returns what is different now, in words. Parts that are not known are left out."""
        found = []
        if self.processes is not None and now.processes is not None and self.processes != now.processes:
            found.append(f"processes: {self.processes} -> {now.processes}")
        if self.mesh is not None and now.mesh is not None and self.mesh != now.mesh:
            if _devices(self.mesh) != _devices(now.mesh):
                found.append(f"devices: {_devices(self.mesh)} -> {_devices(now.mesh)}")
            found.append(f"mesh: {_in_words(self.mesh)} -> {_in_words(now.mesh)}")
        return tuple(found)


def form_of_stored(stored: StoredTree) -> Form:
    """Returns what a checkpoint was saved on, as far as it is recorded."""
    meshes = [
        tuple((str(name), int(size)) for name, size in zip(recorded["axis_names"], recorded["shape"], strict=True))
        for recorded in (leaf.sharding for leaf in stored.leaves.values())
        if recorded is not None and recorded.get("sharding_type") == "NamedSharding"
    ]
    return Form(None if stored.manifest is None else stored.manifest.process_count, _largest(meshes))


def form_of_state(state: Any, processes: int) -> Form:
    """Returns what a state, or its form, is placed on."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state))
    meshes = [tuple(each.mesh.shape.items()) for each in shardings if isinstance(each, jax.sharding.NamedSharding)]
    return Form(processes, _largest(meshes))


def _largest(meshes: Iterable[tuple[tuple[str, int], ...]]) -> tuple[tuple[str, int], ...] | None:
    return max(meshes, key=_devices, default=None)


def _devices(mesh: tuple[tuple[str, int], ...]) -> int:
    return math.prod(size for _, size in mesh)


def _in_words(mesh: tuple[tuple[str, int], ...]) -> str:
    return "x".join(f"{name}={size}" for name, size in mesh) or "no axes"
