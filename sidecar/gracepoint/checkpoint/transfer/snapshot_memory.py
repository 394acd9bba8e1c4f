"""The memory of a snapshot: one buffer for each chunk, in memory of this process or in memory that others can map.

The buffers are reserved and touched once: the first touch of memory is an order of magnitude slower than a copy into
it. The training thread reserves them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import ArraySpec
from gracepoint.checkpoint.memory.aligned_memory import JAX_ALIGNMENT_BYTES, aligned_empty
from gracepoint.checkpoint.memory.parallel_copy import Copies
from gracepoint.checkpoint.memory.shared_arena import SharedArena
from gracepoint.checkpoint.options import TransferPriority
from gracepoint.checkpoint.planning.chunks import Chunk, Shard, WritePlan
from gracepoint.checkpoint.storage.direct_io import ALIGNMENT_BYTES

Specs = Sequence[ArraySpec | None]
#: Priorities by the index of the leaf. Leaves that are not in it are copied before the save returns.
Priorities = Mapping[int, TransferPriority]
#: The priorities of leaves that are copied after the save has returned, in the order of the copies.
LATER = (TransferPriority.ASYNCHRONOUS_PRIORITIZED, TransferPriority.ASYNCHRONOUS_DEPRIORITIZED)

# Chunks of at least this size are aligned for direct I/O, so that they are written without a copy. The padding is
# small compared to their size.
_ALIGNED_BYTES = 1 << 18


class HostSnapshot:
    """One reserved buffer for each chunk that is copied before a save returns. It holds one state at a time.

    Attributes:
        priorities: The priorities that the buffers were reserved for.
        arena: The shared memory of the buffers. None: they are in memory of this process.
    """

    def __init__(self, specs: Specs, plan: WritePlan, priorities: Priorities, *, shared: bool = False) -> None:
        """Reserves memory. ``specs`` and ``plan`` are those of ``Transfer``.

        With ``shared``, a worker process can map the memory.
        """
        self.priorities = priorities
        self.arena = SharedArena(_arena_bytes(plan, priorities)) if shared else None
        empty = aligned_empty if self.arena is None else self.arena.empty
        self._buffers = {}
        for shard in by_priority(plan, priorities)[TransferPriority.SYNCHRONOUS]:
            spec = specs[shard.leaf]
            assert spec is not None
            for chunk in shard.chunks:
                buffer = empty(spec.chunk, spec.numpy_dtype, _alignment_of(chunk))
                self._buffers[chunk.file] = buffer
        with Copies(machine.available_cores()) as copies:  # numpy.zeros would leave the first touch to the first copy
            for buffer in self._buffers.values():
                copies.zero(buffer)

    def buffer(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Returns the memory for the values of ``chunk``, in the type that is stored."""
        return self._buffers[chunk.file]


def snapshot_bytes(plan: WritePlan, priorities: Priorities) -> int:
    """Returns the size of the snapshot's buffers in bytes."""
    shards = by_priority(plan, priorities)[TransferPriority.SYNCHRONOUS]
    return sum(chunk.bytes for shard in shards for chunk in shard.chunks)


def _arena_bytes(plan: WritePlan, priorities: Priorities) -> int:
    shards = by_priority(plan, priorities)[TransferPriority.SYNCHRONOUS]
    return sum(SharedArena.room_for(chunk.bytes, _alignment_of(chunk)) for shard in shards for chunk in shard.chunks)


def _alignment_of(chunk: Chunk) -> int:
    return ALIGNMENT_BYTES if chunk.bytes >= _ALIGNED_BYTES else JAX_ALIGNMENT_BYTES


def by_priority(plan: WritePlan, priorities: Priorities) -> dict[TransferPriority, list[Shard]]:
    """Returns the shards of a plan by the priority of their leaves."""
    found: dict[TransferPriority, list[Shard]] = {priority: [] for priority in TransferPriority}
    for shard in plan.shards:
        found[priorities.get(shard.leaf, TransferPriority.SYNCHRONOUS)].append(shard)
    return found
