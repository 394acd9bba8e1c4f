"""Which processes hold which shards of a leaf, as arrays of numpy.

An array over thousands of processes has thousands of shards, and a state has hundreds of such arrays. So no shard is
looked at alone: the shards of a ``NamedSharding`` follow from the axes of its mesh, and shards that the same processes
hold form a group. What was found for a sharding is kept for other arrays with that sharding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.errors import CheckpointRefused

Shape = tuple[int, ...]
Numbers = npt.NDArray[np.int64]

# Number of shardings whose result is kept. A state has few different ones.
_KEPT = 256


@dataclasses.dataclass(frozen=True, eq=False)
class HolderGroups:
    """Groups of shards. All groups have the same number of shards, and the same number of holders.

    Attributes:
        shards: Numbers of shards in C order of the grid of shards. One row for each group.
        holders: The processes that hold all shards of the group, in ascending order. One row for each group.
    """

    shards: Numbers
    holders: Numbers


@dataclasses.dataclass(frozen=True, eq=False)
class ShardHolders:
    """The shards of one leaf.

    Attributes:
        grid: How many shards the leaf has along each axis.
        shard_shape: Shape of a shard.
        groups: The shards by holders. Each shard is in one group.
    """

    grid: Shape
    shard_shape: Shape
    groups: tuple[HolderGroups, ...]

    @property
    def count(self) -> int:
        """Number of shards."""
        return math.prod(self.grid)

    @property
    def fewest(self) -> int:
        """The number of processes that hold the shard with the fewest holders. 1 if there are no shards."""
        return min((groups.holders.shape[1] for groups in self.groups), default=1)

    def index(self, number: int) -> Index:
        """Returns the index of a shard."""
        place = np.unravel_index(number, self.grid)
        return tuple((int(at) * size, int(at) * size + size) for at, size in zip(place, self.shard_shape, strict=True))


def holders_of(leaf: pytree.Leaf, process_count: int, processes: Sequence[int] | None = None) -> ShardHolders:
    """Returns the shards of a leaf and the processes that hold them. Without groups if the leaf has no elements.

    Processes are counted from 0 to ``process_count - 1``.

    Args:
        leaf: The leaf with its data.
        process_count: Number of processes that save together.
        processes: ``jax.process_index()`` of each of these processes. None if they are 0 to ``process_count - 1``.

    Raises:
        CheckpointError: The shards have different shapes, or a shard is held only by processes that do not take part
            in the save. The message names the leaf.
    """
    spec, data = leaf.spec, leaf.data
    assert spec is not None
    if 0 in spec.shape:
        return ShardHolders((0,) * len(spec.shape), spec.shape, ())
    if not leaf.is_global:
        return _copies(spec.shape, data, process_count)
    ranks = None if processes is None else tuple(processes)
    _check_not_of_one_process(leaf, process_count, ranks)
    shard_shape = tuple(data.sharding.shard_shape(spec.shape))
    grid = tuple(length // size for length, size in zip(spec.shape, shard_shape, strict=True))
    named = _partitions(data.sharding, grid)
    if named is None:
        found = _of_any_sharding(data.sharding, spec.shape, process_count, ranks)
        if found is None:
            raise CheckpointRefused(f"leaf {leaf.name!r}: shards of different shapes cannot be saved ({data.sharding})")
    else:
        found = _of_mesh(data.sharding.mesh, named, process_count, ranks)
    whole = ShardHolders(grid, shard_shape, found.groups)
    if found.lost is not None:
        raise CheckpointRefused(
            f"leaf {leaf.name!r}: no process of those that save, {_listed(process_count, ranks)}, holds its shard at "
            f"{list(whole.index(found.lost))} ({data.sharding}): all that hold a part of the state alone must save it"
        )
    return whole


@functools.lru_cache(maxsize=_KEPT)
def processes_with(sharding: Any) -> frozenset[int]:
    """Returns ``process_index`` of all processes that have devices of a sharding."""
    return frozenset(int(device.process_index) for device in sharding.device_set)


@dataclasses.dataclass(frozen=True, eq=False)
class _Found:
    """The holders of the shards of a sharding.

    Attributes:
        groups: See ``ShardHolders``.
        lost: Number of a shard that no process of the save holds. None if there is none.
    """

    groups: tuple[HolderGroups, ...]
    lost: int | None


def _copies(shape: Shape, data: Any, process_count: int) -> ShardHolders:
    """Returns the shards of a leaf that each process has a copy of."""
    shard_shape = shape if isinstance(data, np.ndarray) else tuple(data.sharding.shard_shape(shape))
    grid = tuple(length // size for length, size in zip(shape, shard_shape, strict=True))
    shards, holders = np.arange(math.prod(grid))[None], np.arange(process_count)[None]
    return ShardHolders(grid, shard_shape, (HolderGroups(shards, holders),))


def _partitions(sharding: Any, grid: Shape) -> tuple[tuple[str, ...], ...] | None:
    """Returns the mesh axes over which each array axis is partitioned. None if they do not describe the sharding."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = sharding.spec
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None
    axes: list[tuple[str, ...]] = []
    for entry in spec:
        if entry is None:
            axes.append(())
        elif isinstance(entry, str):
            axes.append((entry,))
        elif isinstance(entry, tuple) and all(isinstance(name, str) for name in entry):
            axes.append(entry)
        else:
            return None
    axes += [()] * (len(grid) - len(axes))
    sizes = sharding.mesh.shape
    if grid != tuple(math.prod(sizes[name] for name in names) for names in axes):
        return None
    return tuple(axes)


@functools.lru_cache(maxsize=_KEPT)
def _of_mesh(
    mesh: Any, axes: tuple[tuple[str, ...], ...], process_count: int, processes: tuple[int, ...] | None
) -> _Found:
    """Groups the shards of an array whose axes are partitioned over ``axes`` of a mesh."""
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    numbers = np.zeros(mesh.devices.shape, np.int64)
    for name in (name for names in axes for name in names):  # C order: the last name varies fastest
        place = [1] * mesh.devices.ndim
        place[mesh.axis_names.index(name)] = sizes[name]
        numbers = numbers * sizes[name] + np.arange(sizes[name]).reshape(place)
    count = math.prod(sizes[name] for names in axes for name in names)
    return _grouped(numbers.ravel(), _processes_of(mesh), count, process_count, processes)


@functools.lru_cache(maxsize=_KEPT)
def _processes_of(mesh: Any) -> Numbers:
    return np.fromiter((device.process_index for device in mesh.devices.flat), np.int64, mesh.devices.size)


@functools.lru_cache(maxsize=_KEPT)
def _of_any_sharding(
    sharding: Any, shape: Shape, process_count: int, processes: tuple[int, ...] | None
) -> _Found | None:
    """Groups the shards by the index that JAX gives for each device. None if the shards have different shapes."""
    shard_shape = sharding.shard_shape(shape)
    grid = tuple(length // size for length, size in zip(shape, shard_shape, strict=True))
    numbers, indices = [], []
    for device, slices in sharding.devices_indices_map(shape).items():
        index = normal_index(slices, shape)
        if any(stop - start != size for (start, stop), size in zip(index, shard_shape, strict=True)):
            return None
        place = [start // size for (start, _), size in zip(index, shard_shape, strict=True)]
        numbers.append(int(np.ravel_multi_index(place, grid)) if grid else 0)
        indices.append(device.process_index)
    return _grouped(
        np.asarray(numbers, np.int64), np.asarray(indices, np.int64), math.prod(grid), process_count, processes
    )


def _grouped(
    shards: Numbers, indices: Numbers, count: int, process_count: int, processes: tuple[int, ...] | None
) -> _Found:
    """Groups ``count`` shards by their holders.

    Args:
        shards: For each device, the number of the shard that it holds.
        indices: For each device, ``jax.process_index()`` of its process.
        count: Number of shards.
        process_count: Number of processes that save together.
        processes: Their ``jax.process_index()``. None if they are 0 to ``process_count - 1``.
    """
    ranks = np.full(max(int(indices.max(initial=0)), max(processes or (0,)), process_count - 1) + 1, -1)
    ranks[np.arange(process_count) if processes is None else np.asarray(processes)] = np.arange(process_count)
    saves = ranks[indices] >= 0  # other holders do not take part in the save
    pairs = np.unique(shards[saves] * process_count + ranks[indices[saves]])
    held, holders = np.divmod(pairs, process_count)
    holder_counts = np.bincount(held, minlength=count)
    if not holder_counts.all():
        return _Found((), int(np.flatnonzero(holder_counts == 0)[0]))
    groups = []
    for holder_count in np.unique(holder_counts):
        numbers = np.flatnonzero(holder_counts == holder_count)
        rows = holders[np.isin(held, numbers)].reshape(-1, holder_count)
        sets, group_of = np.unique(rows, axis=0, return_inverse=True)
        group_of = group_of.reshape(-1)
        sizes = np.bincount(group_of)
        in_groups = numbers[np.argsort(group_of, kind="stable")]
        starts = np.cumsum(sizes) - sizes
        for size in np.unique(sizes):
            chosen = np.flatnonzero(sizes == size)
            groups.append(HolderGroups(in_groups[starts[chosen][:, None] + np.arange(size)], sets[chosen]))
    return _Found(tuple(groups), None)


def _check_not_of_one_process(leaf: pytree.Leaf, process_count: int, processes: tuple[int, ...] | None) -> None:
    """Raises CheckpointError if the array is on the devices of one other process alone.

    To that process the array looks like a copy that every process has. The processes would compute different plans.
    """
    found = processes_with(leaf.data.sharding)
    if len(found) > 1 or process_count == 1:
        return
    (process,) = found
    if process in (range(process_count) if processes is None else processes):
        raise CheckpointRefused(
            f"leaf {leaf.name!r}: expected an array over devices of all processes, or a copy in each, found one on the "
            f"devices of process {process} alone ({leaf.data.sharding}): replicate it over all processes, or keep it "
            "in process-local host state (host_state)"
        )


def _listed(process_count: int, processes: tuple[int, ...] | None) -> str:
    return ", ".join(map(str, range(process_count) if processes is None else processes))


def normal_index(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    """Returns the index that JAX gives as slices."""
    return tuple(slc.indices(size)[:2] for slc, size in zip(slices, shape, strict=True))
