"""Which process writes which chunk, and the part of that plan which this process writes.

Every process computes the same plan from the shardings alone, without communication, with arrays of numpy, leaf by
leaf. A chunk that only one process holds is written by that process. The other chunks are assigned after these, leaves
with the largest chunks first: the holders of a group of shards share out the chunks of the group, and each next chunk
goes to the holder with the fewest bytes. How many chunks each holder gets is computed at once, not chunk by chunk. Only
a process's own part becomes objects: the whole plan may have millions of chunks.

A leaf that is local to each process (a numpy array, a number, an array on local devices) counts as replicated. Each of
its chunks is written by one process. The others record the checksum of their copy. If copies differ, the save fails, so
no value is lost silently.

Loads no JAX: a worker process needs the plan. The only state is a lock: JAX makes the list of an array's shards when a
shard is asked for the first time. If several threads ask at once, the list can lack shards, or have some of them twice,
and the array keeps it. This was seen with JAX 0.10.2, and ``tests/unit/checkpoint/planning/test_local_shards.py`` shows
it without the lock. So all threads of the checkpoint engine ask ``local_shards``, one after the other.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import Chunk, Index
from gracepoint.checkpoint.planning.grid import HolderGroups, Numbers, Shape, ShardHolders, holders_of, normal_index
from gracepoint.checksum import crc32


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard of the leaf ``leaves[leaf]`` of which this process needs chunks.

    Attributes:
        leaf: Index of the leaf.
        index: Start and stop of the shard in each axis of the array.
        bytes: Size of the shard's values on the device.
        position: Position of the shard in ``jax.Array.addressable_data``. 0 for a numpy array.
        chunks: The chunks of the shard that this process needs.
    """

    leaf: int
    index: Index
    bytes: int
    position: int
    chunks: tuple[Chunk, ...]


@dataclasses.dataclass(frozen=True)
class WritePlan:
    """This process's part of a save.

    Attributes:
        shards: What this process reads from devices: the chunks that it writes, and the copies that it compares.
        arrays: Indices of the leaves whose own metadata this process writes.
        total_bytes: Size of the state's data over all processes, with each chunk counted once.
        total_chunks: Number of chunks over all processes, each counted once.
        owners: For each leaf, a checksum of the assignment of its chunks to processes. It is equal in all processes
            that compute the same plan.
        copied: Indices of the leaves that each process has a copy of.
    """

    shards: tuple[Shard, ...]
    arrays: tuple[int, ...]
    total_bytes: int
    total_chunks: int = 0
    owners: Mapping[int, int] = dataclasses.field(default_factory=dict)
    copied: frozenset[int] = frozenset()

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all shards."""
        return tuple(chunk for shard in self.shards for chunk in shard.chunks)

    @functools.cached_property
    def checksum(self) -> int:
        """A checksum of the assignment of all chunks to processes."""
        return crc32(repr(sorted(self.owners.items())).encode())

    @functools.cached_property
    def mine_by_leaf(self) -> collections.Counter[int]:
        """The number of chunks of each leaf that this process writes."""
        return collections.Counter(chunk.leaf for chunk in self.chunks if chunk.mine)


_asking = threading.Lock()  # held for microseconds: no values are copied


def local_shard(array: Any, position: int) -> Any:
    """Returns ``array.addressable_data(position)``, an array of one device. Any thread may ask."""
    with _asking:
        return array.addressable_data(position)


def local_shards(data: Any) -> dict[Index, Any]:
    """Returns this process's distinct shards of ``data`` by index: JAX arrays of one device, or a numpy array."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): data}
    return {index: local_shard(data, position) for index, position in local_positions(data).items()}


def local_positions(data: Any) -> dict[Index, int]:
    """Returns the first position of each distinct shard among this process's shards of ``data``, by index."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): 0}
    with _asking:
        shards = data.addressable_shards
    positions: dict[Index, int] = {}
    for position, shard in enumerate(shards):
        positions.setdefault(normal_index(shard.index, data.shape), position)
    return positions


Owners = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, eq=False)
class LeafOwners:
    """The chunks of one leaf.

    Attributes:
        shards: The shards of the leaf and their holders.
        grid: How many chunks a shard has along each axis.
        owners: The process that writes each chunk. One row for each shard, with its chunks. Shards and the chunks of a
            shard are in C order.
        chunk_bytes: Size of the values of a chunk.
    """

    shards: ShardHolders
    grid: Shape
    owners: Owners
    chunk_bytes: int

    @property
    def checksum(self) -> int:
        """Equal in all processes that compute the same owners."""
        return crc32(self.owners.tobytes())

    def in_grid_order(self) -> Owners:
        """Returns the owners in C order of the grid of all chunks of the leaf."""
        axes = len(self.grid)
        nested = self.owners.reshape((*self.shards.grid, *self.grid))
        return nested.transpose([axis + part for axis in range(axes) for part in (0, axes)]).reshape(-1)


def assign(
    leaves: Sequence[pytree.Leaf],
    process_count: int,
    processes: Sequence[int] | None = None,
    *,
    max_replicas: int | None = None,
) -> dict[int, LeafOwners]:
    """Returns the owners of the chunks of all leaves that are arrays, by index of the leaf.

    The result is the same in all processes.

    Args:
        leaves: The leaves with the specs that are stored.
        process_count: Number of processes that save together.
        processes: ``jax.process_index()`` of each of these processes. None if they are 0 to ``process_count - 1``.
        max_replicas: Upper bound on the number of processes that write chunks of one shard. None: no bound.

    Raises:
        CheckpointError: The shards of a leaf cannot be stored. The message names the leaf.
    """
    assigned = {}
    for position, leaf in enumerate(leaves):
        if leaf.spec is not None:
            shards = holders_of(leaf, process_count, processes)
            chunk = leaf.spec.chunk
            grid = tuple(-(-length // max(1, size)) for length, size in zip(shards.shard_shape, chunk, strict=True))
            owners = np.zeros((shards.count, _product(grid)), np.uint32)
            assigned[position] = LeafOwners(shards, grid, owners, leaf.spec.chunk_bytes)
    load = np.zeros(process_count, np.int64)
    for of_leaf in assigned.values():
        for group in of_leaf.shards.groups:
            if group.holders.shape[1] == 1:
                of_leaf.owners[group.shards] = group.holders[:, :, None]
                own_bytes = group.shards.shape[1] * of_leaf.owners.shape[1] * of_leaf.chunk_bytes
                np.add.at(load, group.holders[:, 0], own_bytes)
    for position in sorted(assigned, key=lambda position: (-assigned[position].chunk_bytes, position)):
        for group in assigned[position].shards.groups:
            if group.holders.shape[1] > 1:
                _share_out(assigned[position], group, load, max_replicas)
    return assigned


def fill(loads: Numbers, count: int, size: int) -> Numbers:
    """Returns how many of ``count`` items each holder of a group gets.

    Each next item goes to the holder with the smallest load; among equal ones, to the first.

    Args:
        loads: Load of each holder before. One row for each group.
        count: Number of items to share out in each group.
        size: What an item adds to the load. At least 1.
    """
    rows = np.arange(len(loads))
    counts: Numbers = np.zeros_like(loads)
    if count == 1:
        counts[rows, loads.argmin(axis=1)] = 1
        return counts
    # If items could be divided, the holders with the smallest loads would be filled up to one level. ``levels`` has
    # that level for each number of holders that are filled, and ``filled`` is the right number: the next holder is not
    # below the level. Whole items leave each of these holders at most one item short of the level. The items that are
    # left go to the smallest loads.
    ordered = np.sort(loads, axis=1)
    numbers = np.arange(1, loads.shape[1] + 1)
    levels = -(-(count * size + np.cumsum(ordered, axis=1)) // numbers)
    filled = np.maximum((levels > ordered).sum(axis=1), 1)
    # For up to ``filled`` holders, the level is above the load of the last one of them. For more holders it is not.
    level = levels[rows, filled - 1][:, None]
    counts = np.maximum(-((loads - level + size) // size), 0)
    remaining = count - counts.sum(axis=1)
    order = np.argsort(loads + counts * size, axis=1, kind="stable")
    chosen = np.arange(loads.shape[1]) < remaining[:, None]
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=1) + chosen, axis=1)
    return counts


def table(owners: Mapping[int, LeafOwners]) -> bytes:
    """Returns the owners of all chunks, compressed: array by array, each in C order of its grid of chunks."""
    parts = [leaf_owners.in_grid_order() for _, leaf_owners in sorted(owners.items())]
    return zlib.compress(b"".join(np.ascontiguousarray(part, "<u4").tobytes() for part in parts), level=1)


def from_table(data: bytes) -> Owners:
    """Returns the owners that ``table`` was made from, one after the other.

    Raises:
        ValueError: The data are not a table.
    """
    try:
        return np.frombuffer(zlib.decompress(data), "<u4")
    except zlib.error as error:
        raise ValueError(str(error)) from error


def _share_out(leaf: LeafOwners, group: HolderGroups, load: Numbers, max_replicas: int | None) -> None:
    """Assigns the chunks of the shards of a group, and adds their bytes to ``load``."""
    size = max(1, leaf.chunk_bytes)
    if max_replicas is None or max_replicas >= group.holders.shape[1]:
        _assign(leaf, group.shards, group.holders, load, size)
        return
    for column in range(group.shards.shape[1]):  # each shard has separate writers
        least = np.argsort(load[group.holders], axis=1, kind="stable")[:, :max_replicas]
        writers = np.sort(np.take_along_axis(group.holders, least, axis=1), axis=1)
        _assign(leaf, group.shards[:, column : column + 1], writers, load, size)


def _assign(leaf: LeafOwners, shards: Numbers, holders: Numbers, load: Numbers, size: int) -> None:
    each = leaf.owners.shape[1]
    counts = fill(load[holders], shards.shape[1] * each, size)
    owners = np.repeat(holders.ravel(), counts.ravel())  # neighbouring chunks have the same owner
    leaf.owners[shards] = owners.reshape(*shards.shape, each)
    np.add.at(load, holders.ravel(), counts.ravel() * size)


def _product(numbers: Shape) -> int:
    return int(np.prod(numbers, dtype=np.int64))


def make_plan(
    leaves: Sequence[pytree.Leaf],
    process_index: int,
    process_count: int,
    *,
    max_replicas: int | None = None,
) -> WritePlan:
    """Returns what process ``process_index`` of ``process_count`` writes of ``leaves``.

    Args:
        leaves: The leaves with the specs that are stored.
        process_index: Index of this process, 0 to ``process_count - 1``.
        process_count: Number of processes that save together.
        max_replicas: As in ``assign``.

    Raises:
        CheckpointError: As ``assign``.
    """
    owners = assign(leaves, process_count, max_replicas=max_replicas)
    return part_of(owners, leaves, process_index)


def part_of(owners: Mapping[int, LeafOwners], leaves: Sequence[pytree.Leaf], process_index: int) -> WritePlan:
    """Returns the part of a process of a plan whose chunks are assigned."""
    shards = [
        shard
        for position, leaf_owners in owners.items()
        for shard in _shards(leaves, position, leaf_owners, process_index)
    ]
    arrays = tuple(
        position for position, leaf_owners in owners.items() if _metadata_writer(position, leaf_owners) == process_index
    )
    return WritePlan(
        tuple(shards),
        arrays,
        sum(leaf_owners.owners.size * leaf_owners.chunk_bytes for leaf_owners in owners.values()),
        sum(leaf_owners.owners.size for leaf_owners in owners.values()),
        {position: leaf_owners.checksum for position, leaf_owners in owners.items() if leaf_owners.owners.size},
        frozenset(position for position in owners if not leaves[position].is_global),
    )


def _metadata_writer(position: int, owners_of_leaf: LeafOwners) -> int:
    """Returns the process that writes the metadata of an array: the writer of one of its chunks.

    It is another chunk for each array, so that the processes share the work.
    """
    return int(owners_of_leaf.owners.flat[position % owners_of_leaf.owners.size]) if owners_of_leaf.owners.size else 0


def _shards(
    leaves: Sequence[pytree.Leaf], position: int, owners_of_leaf: LeafOwners, process_index: int
) -> list[Shard]:
    """Returns the shards of one leaf of which a process needs chunks."""
    leaf = leaves[position]
    assert leaf.spec is not None
    needed = owners_of_leaf.owners == process_index if leaf.is_global else np.ones(owners_of_leaf.owners.shape, bool)
    shards = []
    positions: dict[Index, int] | None = None
    for number in np.flatnonzero(needed.any(axis=1)):
        index = owners_of_leaf.shards.index(int(number))
        if positions is None:
            positions = local_positions(leaf.data)
        chunks = []
        for at in np.flatnonzero(needed[number]):
            place = np.unravel_index(at, owners_of_leaf.grid)
            inside = tuple(
                (start + int(step) * size, min(start + int(step) * size + size, stop))
                for (start, stop), step, size in zip(index, place, leaf.spec.chunk, strict=True)
            )
            is_writer = bool(owners_of_leaf.owners[number, at] == process_index)
            chunks.append(Chunk(position, leaf.spec.chunk_file(inside), inside, is_writer, owners_of_leaf.chunk_bytes))
        shards.append(Shard(position, index, _shard_bytes(leaf, index), positions[index], tuple(chunks)))
    return shards


def _shard_bytes(leaf: pytree.Leaf, shard: Index) -> int:
    return math.prod(stop - start for start, stop in shard) * int(leaf.data.dtype.itemsize)
