"""Which process writes which chunk.

Every process computes the same plan from the shardings alone, without communication; see ``chunk_owners``. Only its own
part becomes objects: the whole plan may have millions of chunks.

A leaf that is local to each process (a numpy array, a number, an array on local devices) counts as replicated. Each of
its chunks is written by one process. The others record the checksum of their copy. If copies differ, the save fails, so
no value is lost silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.planning import chunk_owners
from gracepoint.checkpoint.planning.chunk_owners import LeafOwners
from gracepoint.checkpoint.planning.chunks import Chunk, Shard, WritePlan
from gracepoint.checkpoint.planning.local_shards import local_positions


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
        max_replicas: As in ``chunk_owners.assign``.

    Raises:
        CheckpointError: As ``chunk_owners.assign``.
    """
    owners = chunk_owners.assign(leaves, process_count, max_replicas=max_replicas)
    return part_of(owners, leaves, process_index)


def part_of(owners: Mapping[int, LeafOwners], leaves: Sequence[pytree.Leaf], process_index: int) -> WritePlan:
    """Returns the part of a process of a plan whose chunks are assigned."""
    shards = [shard for position, found in owners.items() for shard in _shards(leaves, position, found, process_index)]
    arrays = tuple(position for position, found in owners.items() if _metadata_writer(position, found) == process_index)
    return WritePlan(
        tuple(shards),
        arrays,
        sum(found.owners.size * found.chunk_bytes for found in owners.values()),
        sum(found.owners.size for found in owners.values()),
        {position: found.checksum for position, found in owners.items() if found.owners.size},
        frozenset(position for position in owners if not leaves[position].is_global),
    )


def _metadata_writer(position: int, found: LeafOwners) -> int:
    """Returns the process that writes the metadata of an array: the writer of one of its chunks.

    It is another chunk for each array, so that the processes share the work.
    """
    return int(found.owners.flat[position % found.owners.size]) if found.owners.size else 0


def _shards(leaves: Sequence[pytree.Leaf], position: int, found: LeafOwners, process_index: int) -> list[Shard]:
    """Returns the shards of one leaf of which a process needs chunks."""
    leaf = leaves[position]
    assert leaf.spec is not None
    needed = found.owners == process_index if leaf.is_global else np.ones(found.owners.shape, bool)
    shards = []
    positions: dict[Index, int] | None = None
    for number in np.flatnonzero(needed.any(axis=1)):
        index = found.shards.index(int(number))
        if positions is None:
            positions = local_positions(leaf.data)
        chunks = []
        for at in np.flatnonzero(needed[number]):
            place = np.unravel_index(at, found.grid)
            inside = tuple(
                (start + int(step) * size, min(start + int(step) * size + size, stop))
                for (start, stop), step, size in zip(index, place, leaf.spec.chunk, strict=True)
            )
            mine = bool(found.owners[number, at] == process_index)
            chunks.append(Chunk(position, leaf.spec.chunk_file(inside), inside, mine, found.chunk_bytes))
        shards.append(Shard(position, index, _shard_bytes(leaf, index), positions[index], tuple(chunks)))
    return shards


def _shard_bytes(leaf: pytree.Leaf, shard: Index) -> int:
    return math.prod(stop - start for start, stop in shard) * int(leaf.data.dtype.itemsize)
