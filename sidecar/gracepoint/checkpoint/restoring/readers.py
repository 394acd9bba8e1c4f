"""Which process reads an array that several processes need: one replica reads it for all, and the replicas take turns.

Without this, each process reads all that its devices hold. If a state is replicated over n replicas, n times its bytes
come from the store. Here each array is read by the processes of one replica (``placement.OnOneReplica``), and the
replicas read about equally many bytes. This is done for arrays that are replicated over processes, in object stores or
if ``RestoreOptions.read_once`` is True. It pays only if many bytes are saved, because the processes then meet twice,
and a program is compiled. All processes come to the same result, as all of it depends on the shardings and the stored
tree alone.

``damage_in_any`` exchanges whether each process could read, so that all of them continue in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint.options import RestoreOptions, SingleReplica
from gracepoint.checkpoint.restoring.leaves import LeafTarget
from gracepoint.checkpoint.restoring.placement import OnDevices, OnOneReplica, asks_one_replica, axes_of, limit_of
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import from_word, to_word
from gracepoint.process_group import ProcessGroup

#: Largest part of an array on one device that is sent. It bounds the memory that is needed beyond the arrays: twice
#: as much on each device.
LARGEST_BYTES = 256 << 20
#: Arrays with fewer bytes are read by every process.
LEAST_BYTES = 256 << 10
#: Replicas take turns only if each process then reads at least so many bytes fewer, on average.
WORTH_BYTES = 32 << 20


def may_be_taken(gang: ProcessGroup, folder: StoragePath, restore_args: Any, options: RestoreOptions) -> bool:
    """Returns whether arrays of a checkpoint may be read by turns. The same in all processes."""
    is_worthwhile = folder.is_far if options.read_once is None else options.read_once
    alone = gang.process_count == 1 or gang.process_count != jax.process_count()
    return is_worthwhile and not alone and not asks_one_replica(restore_args)


def limit_bytes() -> int:
    """Returns how many bytes of each device's part this process can send at once."""
    return min(LARGEST_BYTES, limit_of(SingleReplica()))


def taken(targets: Sequence[LeafTarget], largest_bytes: int) -> list[LeafTarget]:
    """Returns ``targets``. The placements of arrays that replicas read by turns are replaced by ``OnOneReplica``.

    Args:
        targets: The leaves to restore.
        largest_bytes: Largest part of an array on one device that may be sent.
    """
    placements: dict[int, tuple[OnDevices, Any, int]] = {}
    meshes: dict[Any, int] = {}  # how many bytes fewer are read in all, by mesh
    axis_of = functools.cache(_axis_of)  # cached, as many arrays have the same mesh and axes
    for position, target in enumerate(targets):
        placement = target.placement
        sharding = _sent_by(placement, largest_bytes) if isinstance(placement, OnDevices) else None
        if not isinstance(placement, OnDevices) or sharding is None:
            continue
        mesh = sharding.mesh
        axis = axis_of(mesh, frozenset(axes_of(tuple(sharding.spec))))
        if axis is None:
            continue
        placements[position] = placement, mesh, axis
        meshes[mesh] = meshes.get(mesh, 0) + placement.bytes * (mesh.devices.shape[axis] - 1)
    if not meshes:
        return list(targets)
    mesh = max(meshes, key=lambda mesh: meshes[mesh])  # one program sends them, so they are of one mesh
    if meshes[mesh] < WORTH_BYTES * jax.process_count():
        return list(targets)
    chosen = {position: (placement, axis) for position, (placement, of, axis) in placements.items() if of == mesh}
    replicas = turns(
        {position: (placement.bytes, axis) for position, (placement, axis) in chosen.items()}, mesh.devices.shape
    )
    result = list(targets)
    for position, (placement, axis) in chosen.items():
        replica = SingleReplica(axis, replicas[position])
        placed = OnOneReplica(placement.shape, placement.dtype, placement.sharding, replica)
        result[position] = dataclasses.replace(targets[position], placement=placed)
    return result


def turns(arrays: Mapping[int, tuple[int, int]], shape: Sequence[int]) -> dict[int, int]:
    """Returns which replica reads each array, so that all replicas read about equally many bytes.

    Args:
        arrays: The size in bytes of each array, and the axis of the mesh along which it is replicated.
        shape: Shape of the mesh.
    """
    replicas: dict[int, int] = {}
    read = [[0] * length for length in shape]  # bytes, by axis and replica
    for position in sorted(arrays, key=lambda position: (-arrays[position][0], position)):
        size_bytes, axis = arrays[position]
        replica = read[axis].index(min(read[axis]))
        read[axis][replica] += size_bytes
        replicas[position] = replica
    return replicas


def replicated_axis(processes: np.ndarray[Any, Any], is_sharded: Sequence[bool]) -> int | None:
    """Returns the longest axis of a mesh along which an array is replicated over processes. None if there is none.

    There is none either if the mesh does not have devices of all processes, as all of them run the program that sends.

    Args:
        processes: The process of each device of the mesh.
        is_sharded: Whether the array is sharded over each axis of the mesh.
    """
    if len(np.unique(processes)) < jax.process_count():
        return None
    crossing = [
        axis
        for axis, sharded in enumerate(is_sharded)
        if not sharded and (processes != np.take(processes, [0], axis=axis)).any()
    ]
    return max(crossing, key=lambda axis: processes.shape[axis], default=None)


def process_of(device: Any) -> int:
    """Returns the process that has a device."""
    return int(device.process_index)


def _axis_of(mesh: Any, sharded: frozenset[str]) -> int | None:
    processes = np.vectorize(process_of, otypes=[int])(mesh.devices)
    return replicated_axis(processes, [name in sharded for name in mesh.axis_names])


def _sent_by(placement: OnDevices, largest_bytes: int) -> jax.sharding.NamedSharding | None:
    """Returns the sharding over which an array may be sent. None if each process has to read it."""
    sharding = placement.sharding
    if not isinstance(sharding, jax.sharding.NamedSharding) or placement.layout is not None:
        return None
    if sharding.memory_kind not in (None, sharding.mesh.devices.flat[0].default_memory().kind):
        return None
    fits = placement.bytes >= LEAST_BYTES and placement.bytes_per_device <= largest_bytes
    return sharding if fits else None


# Most processes whose reports an error has, for each kind of error.
_SHOWN = 8
# Kinds of errors (``errors.to_word``) for which an older step is read.
_DAMAGE = ("corrupt", "not found")
# All other kinds end the restore. If the processes report different kinds, all raise the first in this order.
_RAISED_FIRST = (
    "error",
    "save failed",
    "exists",
    "invalid sharding",
    "refused",
    "too new",
    "mismatch",
    "host state lost",
)


def damage_in_any(subject: str, failure: Exception | None, *, gang: ProcessGroup, key: str, deadline: Deadline) -> str:
    """Tells all processes how this process's read went. Collective.

    Args:
        subject: What was read. Errors begin with it.
        failure: The error of this process's read. None if it succeeded.
        gang: The processes that read together.
        key: Key of their meeting.
        deadline: The deadline of the restore.

    Returns:
        A description of the damage that was found in some process, the same in all processes. Empty if all have read.

    Raises:
        CheckpointMismatch: This error was raised in some process; says what each process reported. ``HostStateLost`` is
            one.
        CheckpointTooNew: This error was raised in some process.
        CheckpointRefused: This error was raised in some process.
        InvalidSharding: This error was raised in some process.
        CheckpointError: Another error that is not damage was raised in some process.
    """
    message = json.dumps([] if failure is None else [to_word(failure), str(failure) or repr(failure)])
    # The report is the same in all processes, and small: thousands of processes may find the same damage.
    failures = json.loads(
        gang.reduce(key, message, functools.partial(_merged, subject), timeout_s=deadline.remaining_s())
    )
    damage = [text for kind in _DAMAGE for text in failures.pop(kind, ())]
    for kind in sorted(failures, key=_RAISED_FIRST.index):
        raise from_word(kind)(f"{subject} cannot be restored: {'; '.join(failures[kind])}") from failure
    return "; ".join(damage)


def _merged(subject: str, answers: list[str]) -> str:
    """Returns the reports of the processes that failed, by kind of error, as JSON."""
    failures: dict[str, list[str]] = {}
    for process, answer in enumerate(map(json.loads, answers)):
        if answer:
            kind, text = answer
            sender = "" if len(answers) == 1 else f"process {process}: "
            failures.setdefault(kind, []).append(sender + text.removeprefix(f"{subject}: "))  # the error names it once
    for texts in failures.values():
        if len(texts) > _SHOWN:
            texts[_SHOWN:] = [f"and {len(texts) - _SHOWN} more processes"]
    return json.dumps(failures)
