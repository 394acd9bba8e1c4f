"""Which process writes which chunk.

Every process computes the same plan from the shardings alone, without a message. A chunk that several
processes hold is written by the one with the fewest bytes so far, largest chunks first, so that replicated
arrays are spread over all. A leaf that is local to each process (a numpy array, a number, an array on local
devices) counts as replicated: one process writes it, and the others record their copy's checksum, so that
copies that differ fail the save instead of being lost silently.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import Index, chunks_within
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.errors import CheckpointRefused


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of the leaf ``leaves[leaf]`` that this process holds.

    Attributes:
        leaf: Index of the leaf.
        file: Path below the item's folder; in OCDBT, key.
        index: Of the chunk in the array.
        mine: This process writes it; else only its checksum is recorded.
        bytes: Size of its values as they are stored.
    """

    leaf: int
    file: str
    index: Index
    mine: bool
    bytes: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard of the leaf ``leaves[leaf]``: it is copied from its device as a whole.

    Attributes:
        leaf: Index of the leaf.
        index: Of the shard in the array.
        bytes: Size of its values on the device.
        position: Of a device that has it, among those of this process (``jax.Array.addressable_data``); 0 of a numpy
            array.
        chunks: That this process needs of it.
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
        shards: What it reads from devices: the chunks that it writes, and copies to compare.
        arrays: Leaves (by index) whose own metadata it writes.
        total_bytes: Size of the state's data, counted once, over all processes.
        owners: Checksum, by leaf, of which process writes which chunk: equal in all processes that plan alike.
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
        """How many chunks this process writes of each leaf."""
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
        leaves: As they are stored.
        process_index: 0 to ``process_count - 1``.
        process_count: How many processes save together.
        processes: ``jax.process_index()`` of each of them; None where the two are the same.
        max_replicas: At most so many processes write the chunks of one shard.

    Raises:
        CheckpointError: A leaf's shards cannot be stored; names it.
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
    # First what leaves no choice, then the largest first: the remaining choices then even out the load.
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
    writers: dict[int, int] = {}  # of metadata, by leaf: who writes the first chunk; process 0 where there is none
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
    """Returns the shards of a leaf by index, each with the processes that hold it; none if it has no elements.

    Args:
        leaf: With its data.
        process_count: As in ``make_plan``, which processes are counted as there.
        processes: As in ``make_plan``.

    Raises:
        CheckpointError: They have several shapes, or only processes that do not take part hold one; names the leaf.
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
        if device.process_index in ranks:  # others hold it, too, and do not take part
            found.add(ranks[device.process_index])
    if lost := [index for index, found in holders.items() if not found]:
        raise CheckpointRefused(
            f"leaf {leaf.name!r}: no process of those that save, {', '.join(map(str, ranks))}, holds its shard at "
            f"{list(lost[0])} ({data.sharding}): all that hold a part of the state alone must save it"
        )
    return holders


def _check_not_of_one_process(leaf: pytree.Leaf, ranks: Mapping[int, int]) -> None:
    """Raises CheckpointError if the array is on one process's devices, which is another one.

    There it looks like a copy that each process has, so that this process and that one would plan differently.
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
    """Returns this process's distinct shards of ``data`` by index: JAX arrays of one device, or a numpy
    array."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): data}
    return {index: data.addressable_data(position) for index, position in _local_positions(data).items()}


def _local_positions(data: Any) -> dict[Index, int]:
    """Returns where, among this process's shards of ``data``, each distinct one is first, by index."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): 0}
    positions: dict[Index, int] = {}
    for position, shard in enumerate(data.addressable_shards):
        positions.setdefault(normal_index(shard.index, data.shape), position)
    return positions


def _shard_bytes(leaf: pytree.Leaf, shard: Index) -> int:
    return math.prod(stop - start for start, stop in shard) * int(leaf.data.dtype.itemsize)
