"""The chunks, the shards and the plan of one process's part of a save. Loads no JAX: a worker process needs them."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping

from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.storage.checksum import crc32


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
