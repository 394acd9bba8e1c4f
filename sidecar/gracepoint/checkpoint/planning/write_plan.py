"""Which process writes which chunk.

Every process computes the same plan from the shardings alone, without communication. Chunks are assigned largest
first. If several processes hold a chunk, the one with the fewest bytes so far writes it, so that replicated arrays are
spread over all processes.

A leaf that is local to each process (a numpy array, a number, an array on local devices) counts as replicated. One
process writes it. The others record the checksum of their copy: if copies differ, the save fails, and no value is lost
silently.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gracepoint.checkpoint.format.array_spec import Index, chunks_within
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.errors import CheckpointRefused

if TYPE_CHECKING:
    from gracepoint.checkpoint.format import pytree


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of the leaf ``leaves[leaf]`` that this process holds.

    Attributes:
        leaf: Index of the leaf.
        file: Path below the item's folder. In OCDBT, the key.
        index: Start and stop of the chunk in each axis of the array.
        mine: True if this process writes the chunk. If False, this process only records its checksum.
        bytes: Size of the chunk's values in the stored type.
    """

    leaf: int
    file: str
    index: Index
    mine: bool
    bytes: int


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
        owners: For each leaf, a checksum of the assignment of its chunks to processes. It is equal in all processes
            that compute the same plan.
    """

    shards: tuple[Shard, ...]
    arrays: tuple[int, ...]
    total_bytes: int
    owners: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks of all shards."""
        return tuple(chunk for shard in self.shards for chunk in shard.chunks)

    @functools.cached_property
    def mine_by_leaf(self) -> collections.Counter[int]:
        """The number of chunks of each leaf that this process writes."""
        return collections.Counter(chunk.leaf for chunk in self.chunks if chunk.mine)


def make_plan(
    leaves: Sequence[pytree.Leaf],
    process_index: int,
    process_count: int,
    processes: Sequence[int] | None = None,
    *,
    max_replicas: int | None = None,
) -> WritePlan:
    """Returns what process ``process_index`` of ``process_count`` writes of ``leaves``.

    Args:
        leaves: The leaves with the specs that are stored.
        process_index: Index of this process, 0 to ``process_count - 1``.
        process_count: Number of processes that save together.
        processes: ``jax.process_index()`` of each of these processes. None if they are 0 to ``process_count - 1``.
        max_replicas: Upper bound on the number of processes that write chunks of one shard. None: no bound.

    Raises:
        CheckpointError: The shards of a leaf cannot be stored. The message names the leaf.
    """
    held = [
        (leaf_index, index, shard, tuple(sorted(holders)))
        for leaf_index, leaf in enumerate(leaves)
        if leaf.spec is not None
        for shard, holders in holders_of(leaf, process_count, processes).items()
        for index in chunks_within(shard, leaf.spec.chunk)
    ]
    chunk_bytes = {i: leaf.spec.chunk_bytes for i, leaf in enumerate(leaves) if leaf.spec is not None}
    load = [0] * process_count
    owners: dict[tuple[int, Index], int] = {}
    owners_of: dict[int, array.array[int]] = {}
    writers_of: dict[tuple[int, Index], Sequence[int]] = {}
    # Chunks that only one process holds come first, then the largest first. The later choices then balance the load.
    for leaf_index, index, shard, holders in sorted(
        held, key=lambda h: (len(h[3]) > 1, -chunk_bytes[h[0]], h[0], h[1])
    ):
        if len(holders) > 1:
            if max_replicas is not None:
                by_load = sorted(holders, key=lambda process: (load[process], process))
                holders = tuple(writers_of.setdefault((leaf_index, shard), by_load[:max_replicas]))
            owner = min(holders, key=lambda process: (load[process], process))
        else:
            owner = holders[0]
        load[owner] += chunk_bytes[leaf_index]
        owners[leaf_index, index] = owner
        owners_of.setdefault(leaf_index, array.array("I")).append(owner)
    shards: dict[tuple[int, Index], list[Chunk]] = {}
    writers: dict[int, int] = {}  # of metadata, by leaf: the writer of the first chunk, or process 0
    for leaf_index, index, shard, _ in held:
        owner = owners[leaf_index, index]
        leaf = leaves[leaf_index]
        assert leaf.spec is not None
        writers.setdefault(leaf_index, owner)
        if owner == process_index or not leaf.is_global:
            chunk = Chunk(
                leaf_index, leaf.spec.chunk_file(index), index, owner == process_index, chunk_bytes[leaf_index]
            )
            shards.setdefault((leaf_index, shard), []).append(chunk)
    arrays = tuple(leaf_index for leaf_index in chunk_bytes if writers.get(leaf_index, 0) == process_index)
    positions = {leaf_index: _local_positions(leaves[leaf_index].data) for leaf_index, _ in shards}
    whole = tuple(
        Shard(leaf_index, shard, _shard_bytes(leaves[leaf_index], shard), positions[leaf_index][shard], tuple(chunks))
        for (leaf_index, shard), chunks in shards.items()
    )
    checksums = {leaf_index: crc32(memoryview(found).cast("B")) for leaf_index, found in owners_of.items()}
    return WritePlan(whole, arrays, sum(load), checksums)


def holders_of(
    leaf: pytree.Leaf, process_count: int, processes: Sequence[int] | None = None
) -> Mapping[Index, set[int]]:
    """Returns the shards of a leaf by index, each with the processes that hold it. Empty if the leaf has no elements.

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
        return {}
    if not leaf.is_global:
        return {index: set(range(process_count)) for index in local_shards(data)}
    ranks = {process: rank for rank, process in enumerate(processes or range(process_count))}
    _check_not_of_one_process(leaf, ranks)
    holders: dict[Index, set[int]] = {}
    shard_shape = data.sharding.shard_shape(spec.shape)
    for device, slices in data.sharding.devices_indices_map(spec.shape).items():
        index = normal_index(slices, spec.shape)
        if any(stop - start != size for (start, stop), size in zip(index, shard_shape, strict=True)):
            raise CheckpointRefused(f"leaf {leaf.name!r}: shards of different shapes cannot be saved ({data.sharding})")
        found = holders.setdefault(index, set())
        if device.process_index in ranks:  # other holders do not take part in the save
            found.add(ranks[device.process_index])
    if lost := [index for index, found in holders.items() if not found]:
        raise CheckpointRefused(
            f"leaf {leaf.name!r}: no process of those that save, {', '.join(map(str, ranks))}, holds its shard at "
            f"{list(lost[0])} ({data.sharding}): all that hold a part of the state alone must save it"
        )
    return holders


def _check_not_of_one_process(leaf: pytree.Leaf, ranks: Mapping[int, int]) -> None:
    """Raises CheckpointError if the array is on the devices of one other process alone.

    To that process the array looks like a copy that every process has. The processes would compute different plans.
    """
    found = {device.process_index for device in leaf.data.sharding.device_set}
    if len(found) == 1 and len(ranks) > 1 and found <= set(ranks):
        (process,) = found
        raise CheckpointRefused(
            f"leaf {leaf.name!r}: expected an array over devices of all processes, or a copy in each, found one on the "
            f"devices of process {process} alone ({leaf.data.sharding}): replicate it over all processes, or keep it "
            "in process-local host state (host_state)"
        )


def normal_index(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    return tuple(slc.indices(size)[:2] for slc, size in zip(slices, shape, strict=True))


def local_shards(data: Any) -> dict[Index, Any]:
    """Returns this process's distinct shards of ``data`` by index: JAX arrays of one device, or a numpy array."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): data}
    return {index: data.addressable_data(position) for index, position in _local_positions(data).items()}


def _local_positions(data: Any) -> dict[Index, int]:
    """Returns the first position of each distinct shard among this process's shards of ``data``, by index."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): 0}
    positions: dict[Index, int] = {}
    for position, shard in enumerate(data.addressable_shards):
        positions.setdefault(normal_index(shard.index, data.shape), position)
    return positions


def _shard_bytes(leaf: pytree.Leaf, shard: Index) -> int:
    return math.prod(stop - start for start, stop in shard) * int(leaf.data.dtype.itemsize)
