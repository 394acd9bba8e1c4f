"""Copies chunks from devices to host memory, and holds them there while training continues.

Each save has one ``Transfer``. The training thread makes it. In doing so it copies into the buffers of the
``HostSnapshot`` what must be in host memory before training continues. The thread that writes consumes the transfer.
The remaining values (in a save that streams, all of them) are copied from the devices when the writer asks for them.

Transfers run ahead of the writer up to ``device_host_max_bytes``, or up to ``AHEAD_BYTES`` if that is not set. Bytes
count from the start of their transfer until they are written; the writer's threads report this. Values that are in
host memory anyway count only if ``device_host_max_bytes`` is set.

The buffers of the snapshot are reserved and touched once: the first touch of memory is an order of magnitude slower
than a copy into it.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from gracepoint.checkpoint.format.array_spec import ArraySpec
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.memory.aligned_memory import JAX_ALIGNMENT_BYTES, aligned_empty
from gracepoint.checkpoint.memory.byte_limiter import ByteLimiter
from gracepoint.checkpoint.memory.parallel_copy import Copies, copy
from gracepoint.checkpoint.memory.shared_arena import SharedArena
from gracepoint.checkpoint.options import TransferPriority, WriteOptions
from gracepoint.checkpoint.orbax_objects import priority_of
from gracepoint.checkpoint.planning.write_plan import Chunk, Shard, WritePlan
from gracepoint.checkpoint.storage.direct_io import ALIGNMENT_BYTES
from gracepoint.checkpoint.transfer.device_to_host import (
    AHEAD_BYTES,
    Pull,
    in_place,
    is_far,
    pulls_of,
    start,
    values_of,
    whole,
)
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

Specs = Sequence[ArraySpec | None]
#: Priorities by the index of the leaf. Leaves that are not in it are copied before the save returns.
Priorities = Mapping[int, TransferPriority]

# Chunks of at least this size are aligned for direct I/O, so that they are written without a copy. The padding is
# small compared to their size.
_ALIGNED_BYTES = 1 << 18
# Bound on the number of pending transfers. Transfers of small leaves hardly count in bytes, but each takes time.
_MOST_AHEAD = 256


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
        for shard in _by_priority(plan, priorities)[TransferPriority.SYNCHRONOUS]:
            spec = specs[shard.leaf]
            assert spec is not None
            for chunk in shard.chunks:
                alignment_bytes = _alignment_of(chunk)
                buffer = empty(spec.chunk, spec.numpy_dtype, alignment_bytes)
                buffer.fill(0)  # numpy.zeros would leave the first touch to the first copy
                self._buffers[chunk.file] = buffer

    def buffer(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Returns the memory for the values of ``chunk``, in the type that is stored."""
        return self._buffers[chunk.file]


@dataclasses.dataclass
class _Taken:
    """Bytes of one transfer. They count against the limit until the last of its chunks is written."""

    bytes: int
    unwritten: int


class Transfer:
    """The chunks of one save with their values, in the order in which they reach host memory."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        specs: Specs,
        plan: WritePlan,
        options: WriteOptions,
        snapshot: HostSnapshot | None,
    ) -> None:
        """Copies into ``snapshot`` what the options ask for. After that, these leaves may be donated.

        Args:
            leaves: The leaves with their data.
            specs: What is stored of each leaf.
            plan: The plan of the save.
            options: The options of the save.
            snapshot: Memory that was reserved for the same form of state and plan, and for the priorities of this
                save. None: everything stays on the devices until it is written.
        """
        self._specs = specs
        self._paths = [leaf.path for leaf in leaves]
        self._options = options
        self._callback = options.callback
        self._limit = ByteLimiter(options.device_host_max_bytes or AHEAD_BYTES)
        self._to_transfer = plan.mine_by_leaf.copy()
        self._to_write = plan.mine_by_leaf.copy()
        self._lock = threading.Lock()  # protects what ``written`` changes
        self._taken: dict[str, _Taken] = {}  # by the chunk's file: what counts against the limit
        self._data = [leaf.data for leaf in leaves]
        self._far = {i for i in {shard.leaf for shard in plan.shards} if is_far(leaves[i].data, options)}
        self._copied: list[tuple[Chunk, npt.NDArray[Any]]] = []
        if snapshot is None:
            self._left = list(plan.shards)
            return
        by_priority = _by_priority(plan, snapshot.priorities)
        self._copy(by_priority[TransferPriority.SYNCHRONOUS], snapshot)
        self._left = [shard for priority in _LATER for shard in by_priority[priority]]
        left = {shard.leaf for shard in self._left}
        if options.device_host_max_bytes is not None:
            logger.info(
                "%d of %d leaves are copied from their devices in the background, at most %d bytes of them at once, "
                "which may make the save slower",
                len(left),
                len({shard.leaf for shard in plan.shards}),
                options.device_host_max_bytes,
            )
        self._data = [data if index in left else None for index, data in enumerate(self._data)]  # frees the others

    @property
    def copied(self) -> Sequence[tuple[Chunk, npt.NDArray[Any]]] | None:
        """The chunks in the snapshot, before ``chunks`` is called. None if they are not all of the state."""
        return None if self._left else tuple(self._copied)

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields every chunk once, in the type of the state or the stored type. The caller passes each to ``written``.

        The arrays may be views of JAX's own memory, in any memory order. They are valid until the state is donated.

        Raises:
            SaveFailed: The yielded chunks were not written in time to make room for more.
        """
        yield from self._copied
        self._copied = []

        def has_room(pull: Pull, wait: bool) -> bool:
            return self._take(pull, deadline if wait else None)

        if self._far or self._options.device_host_max_bytes is not None:
            transfers = self._transfers(self._left, has_room)
        else:
            transfers = ((whole(shard), in_place(shard, self._data[shard.leaf])) for shard in self._left)
        for pull, started in transfers:
            for chunk, values in values_of(started, pull.region, pull.chunks):
                self._transferred(chunk)
                yield chunk, values
            del started, values  # before the next transfer is taken

    def written(self, chunk: Chunk) -> None:
        """Reports that the chunk's values are no longer needed. May be called from any thread."""
        with self._lock:
            taken = self._taken.pop(chunk.file, None)
            if taken is not None:
                taken.unwritten -= 1
            if chunk.mine:
                self._to_write[chunk.leaf] -= 1
            is_leaf_written = chunk.mine and self._to_write[chunk.leaf] == 0
        if is_leaf_written:
            self._callback.on_write_end(self._paths[chunk.leaf])
        if taken is not None and taken.unwritten == 0:
            self._limit.give_back(taken.bytes)  # last, as this lets the next transfer start

    def _take(self, pull: Pull, deadline: Deadline | None) -> bool:
        """Counts ``pull`` against the limit; returns False if there is no room. With a deadline, waits for room."""
        if self._options.device_host_max_bytes is None and pull.shard.leaf not in self._far:
            return True
        if deadline is None:
            if not self._limit.take_if_room(pull.bytes):
                return False
        elif not self._limit.take(pull.bytes, deadline):
            raise SaveFailed(
                f"{pull.chunks[0].file} was not copied from its device {deadline.ended}: "
                f"device_host_max_bytes ({self._limit.max_bytes}) leaves no room until what was copied is written"
            )
        taken = _Taken(pull.bytes, len(pull.chunks))
        with self._lock:
            self._taken.update((chunk.file, taken) for chunk in pull.chunks)
        return True

    def _copy(self, shards: Sequence[Shard], snapshot: HostSnapshot) -> None:
        far = [shard for shard in shards if shard.leaf in self._far]
        if len(far) < len(shards):
            with Copies() as copies:
                for shard in shards:
                    if shard.leaf in self._far:
                        continue
                    for chunk, values in values_of(in_place(shard, self._data[shard.leaf]), shard.index, shard.chunks):
                        buffer = snapshot.buffer(chunk)
                        copies.add(values, buffer)
                        self._copied.append((chunk, buffer))
            for chunk, _ in self._copied:
                self._transferred(chunk)
        ahead = ByteLimiter(AHEAD_BYTES)
        for pull, started in self._transfers(far, lambda pull, wait: ahead.take_if_room(pull.bytes)):
            for chunk, values in values_of(started, pull.region, pull.chunks):
                buffer = snapshot.buffer(chunk)
                copy(values, buffer)
                self._copied.append((chunk, buffer))
                self._transferred(chunk)
            ahead.give_back(pull.bytes)

    def _transfers(self, shards: Sequence[Shard], has_room: Callable[[Pull, bool], bool]) -> Iterator[tuple[Pull, Any]]:
        """Yields the transfers in order. As many are started ahead as ``has_room`` allows.

        The second argument of ``has_room`` says whether it may wait: only if no other transfer is under way.
        """
        waiting = collections.deque(shards)
        pulls, started = collections.deque[Pull](), collections.deque[tuple[Pull, Any]]()
        while waiting or pulls or started:
            while (waiting or pulls) and len(started) < _MOST_AHEAD:
                if not pulls:
                    shard = waiting.popleft()
                    pulls.extend(pulls_of(shard, self._data[shard.leaf], self._options))
                if not has_room(pulls[0], not started):
                    break
                pull = pulls.popleft()
                started.append((pull, start(pull, self._data[pull.shard.leaf], self._options)))
            yield started.popleft()

    def _transferred(self, chunk: Chunk) -> None:
        if not chunk.mine:
            return
        self._to_transfer[chunk.leaf] -= 1
        if self._to_transfer[chunk.leaf] == 0:
            self._callback.on_transfer_end(self._paths[chunk.leaf])


def ask_priorities(leaves: Sequence[Leaf], plan: WritePlan, options: WriteOptions) -> Priorities:
    """Returns the answers of ``key_priority``. Called once for each save.

    Raises:
        CheckpointRefused: An answer is no priority; names the leaf.
    """
    if options.device_host_max_bytes is None:
        return {}
    return {
        index: priority_of(options.callback.key_priority(leaves[index].path), leaves[index].name)
        for index in dict.fromkeys(shard.leaf for shard in plan.shards)
    }


def snapshot_bytes(plan: WritePlan, priorities: Priorities) -> int:
    """Returns the size of the snapshot's buffers in bytes."""
    shards = _by_priority(plan, priorities)[TransferPriority.SYNCHRONOUS]
    return sum(chunk.bytes for shard in shards for chunk in shard.chunks)


def _arena_bytes(plan: WritePlan, priorities: Priorities) -> int:
    shards = _by_priority(plan, priorities)[TransferPriority.SYNCHRONOUS]
    return sum(SharedArena.room_for(chunk.bytes, _alignment_of(chunk)) for shard in shards for chunk in shard.chunks)


def _alignment_of(chunk: Chunk) -> int:
    return ALIGNMENT_BYTES if chunk.bytes >= _ALIGNED_BYTES else JAX_ALIGNMENT_BYTES


_LATER = (TransferPriority.ASYNCHRONOUS_PRIORITIZED, TransferPriority.ASYNCHRONOUS_DEPRIORITIZED)


def _by_priority(plan: WritePlan, priorities: Priorities) -> dict[TransferPriority, list[Shard]]:
    found: dict[TransferPriority, list[Shard]] = {priority: [] for priority in TransferPriority}
    for shard in plan.shards:
        found[priorities.get(shard.leaf, TransferPriority.SYNCHRONOUS)].append(shard)
    return found
