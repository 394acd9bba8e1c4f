"""The memory of a snapshot: one buffer for each chunk, in memory of this process or in memory that others can map.

The buffers are reserved and touched once: the first touch of memory is an order of magnitude slower than a copy into
it. The training thread reserves them.

Whoever uses the memory says by itself when it does not any more: a save's thread, threads that copy, a worker process
(``MemoryUser``). An exception of a signal handler can leave any of them behind, and the memory is not filled again
before they have ended. And each filling has a number, the snapshot's **generation**. A save notes the generation whose
values it writes, and fails if it finds another one when it begins, or when it has written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import ArraySpec
from gracepoint.checkpoint.memory.aligned_memory import JAX_ALIGNMENT_BYTES, aligned_empty
from gracepoint.checkpoint.memory.parallel_copy import Copies, MemoryUser
from gracepoint.checkpoint.memory.shared_arena import SharedArena
from gracepoint.checkpoint.options import TransferPriority
from gracepoint.checkpoint.planning.chunks import Chunk, Shard, WritePlan
from gracepoint.checkpoint.storage.direct_io import ALIGNMENT_BYTES
from gracepoint.errors import SaveFailed

Specs = Sequence[ArraySpec | None]
#: Priorities by the index of the leaf. Leaves that are not in it are copied before the save returns.
Priorities = Mapping[int, TransferPriority]
#: The priorities of leaves that are copied after the save has returned, in the order of the copies.
LATER = (TransferPriority.ASYNCHRONOUS_PRIORITIZED, TransferPriority.ASYNCHRONOUS_DEPRIORITIZED)

# Chunks of at least this size are aligned for direct I/O, so that they are written without a copy. The padding is
# small compared to their size.
_ALIGNED_BYTES = 1 << 18
# Seconds for those to end that an interrupted save has left in the memory.
_LEFT_END_S = 10.0
#: How the generation is stored.
GENERATION = np.dtype(np.int64)


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
        self._users: list[MemoryUser] = []
        empty = aligned_empty if self.arena is None else self.arena.empty
        self._generation = empty((1,), GENERATION)  # where a worker process reads it, too
        self._generation[0] = 0
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

    def lend(self, user: MemoryUser) -> None:
        """Notes that ``user`` is about to use the memory. Called before it begins: what follows may be interrupted."""
        self._users.append(user)

    def is_free(self) -> bool:
        """Returns whether nothing uses the memory. Ends what interrupted saves have left behind, within seconds."""
        self._users = [user for user in self._users if not user.end(_LEFT_END_S)]
        return not self._users

    def fill(self) -> Filling:
        """Begins the next generation: after this, the caller fills the memory.

        Raises:
            SaveFailed: Something that an interrupted save has left behind still uses the memory.
        """
        if not self.is_free():
            raise SaveFailed(
                "the snapshot's memory is still used by an earlier save that was interrupted, and did not end within "
                f"{_LEFT_END_S:g} s: nothing is saved from it before that ends"
            )
        self._generation[0] += 1
        return Filling(self)

    @property
    def generation(self) -> int:
        """How often the memory was filled."""
        return int(self._generation[0])

    @property
    def generation_at(self) -> int:
        """Where the generation is in the shared memory."""
        assert self.arena is not None
        return self.arena.offset_of(self._generation)


class Filling:
    """What one save has filled the memory with.

    Attributes:
        snapshot: The memory.
        generation: The generation of the values.
    """

    def __init__(self, snapshot: HostSnapshot) -> None:
        self.snapshot = snapshot
        self.generation = snapshot.generation

    def check_unchanged(self) -> None:
        """Raises SaveFailed if the memory was filled again."""
        check_generation(self.generation, self.snapshot.generation)


def check_generation(expected: int, found: int) -> None:
    """Raises SaveFailed if a save finds another generation in the memory than the one whose values it writes."""
    if found != expected:
        raise SaveFailed(
            f"the snapshot's memory has generation {found}, and this save writes generation {expected}: the memory was "
            "filled again meanwhile, and what was written may be of both. It is not committed. This is a defect of "
            "Gracepoint: please report it"
        )


def snapshot_bytes(plan: WritePlan, priorities: Priorities) -> int:
    """Returns the size of the snapshot's buffers in bytes."""
    shards = by_priority(plan, priorities)[TransferPriority.SYNCHRONOUS]
    return sum(chunk.bytes for shard in shards for chunk in shard.chunks)


def _arena_bytes(plan: WritePlan, priorities: Priorities) -> int:
    shards = by_priority(plan, priorities)[TransferPriority.SYNCHRONOUS]
    chunks = [chunk for shard in shards for chunk in shard.chunks]
    return SharedArena.room_for(GENERATION.itemsize) + sum(
        SharedArena.room_for(chunk.bytes, _alignment_of(chunk)) for chunk in chunks
    )


def _alignment_of(chunk: Chunk) -> int:
    return ALIGNMENT_BYTES if chunk.bytes >= _ALIGNED_BYTES else JAX_ALIGNMENT_BYTES


def by_priority(plan: WritePlan, priorities: Priorities) -> dict[TransferPriority, list[Shard]]:
    """Returns the shards of a plan by the priority of their leaves."""
    found: dict[TransferPriority, list[Shard]] = {priority: [] for priority in TransferPriority}
    for shard in plan.shards:
        found[priorities.get(shard.leaf, TransferPriority.SYNCHRONOUS)].append(shard)
    return found
