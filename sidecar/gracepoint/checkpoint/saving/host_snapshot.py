"""Copies chunks from devices to host memory, and holds them there while training continues.

Each save has one ``Transfer``. The training thread makes it. In doing so it copies into the buffers of the
``HostSnapshot`` what must be in host memory before training continues. The thread that writes consumes the transfer.
The remaining values (in a save that streams, all of them) are copied from the devices when the writer asks for them.

The values of each accelerator are copied by a separate thread (``device_copy``), through pinned memory where the
device has it. So all devices are copied from at once. The values of CPU devices are in host memory already. Several
threads copy them into the snapshot (``memory.Copies``), or the writer reads them in place.

Transfers run ahead of the writer up to ``device_host_max_bytes``, or up to ``Devices.ahead_bytes`` if that is not set.
Bytes count from the start of their transfer until they are written; the writer's threads report this. Values that are
in host memory anyway count only if ``device_host_max_bytes`` is set. The limit is for all devices together.

The memory of a snapshot is one buffer for each chunk, in memory of this process or in memory that others can map. The
training thread reserves and touches the buffers once: the first touch of memory is an order of magnitude slower than a
copy into it. Whoever uses the memory reports by itself when it does not any more: a save's thread, threads that copy, a
worker process (``MemoryUser``). An exception of a signal handler can leave any of them behind, and the memory is not
filled again before they have ended. And each filling has a number, the snapshot's **generation**. A save notes the
generation whose values it writes, and fails if it finds another one when it begins, or when it has written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.memory import (
    GENERATION,
    JAX_ALIGNMENT_BYTES,
    ByteLimiter,
    Copies,
    MemoryUser,
    SharedArena,
    aligned_empty,
    check_generation,
    copy,
)
from gracepoint.checkpoint.options import TransferPriority, WriteOptions
from gracepoint.checkpoint.orbax import priority_of
from gracepoint.checkpoint.planning.chunks import Shard, WritePlan, local_shard
from gracepoint.checkpoint.saving.device_copy import Devices, Pull, in_place, is_far, merged, transfers, values_of
from gracepoint.checkpoint.storage.buffers import ALIGNMENT_BYTES
from gracepoint.deadline import Deadline
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
    groups: dict[TransferPriority, list[Shard]] = {priority: [] for priority in TransferPriority}
    for shard in plan.shards:
        groups[priorities.get(shard.leaf, TransferPriority.SYNCHRONOUS)].append(shard)
    return groups


logger = logging.getLogger(__name__)


# Seconds for the copies from devices before a save returns. In this time a link of 1 GB/s copies the memory of eight
# devices.
_COPY_TIMEOUT_S = 900.0

_Piece = tuple[Chunk, npt.NDArray[Any]]


@dataclasses.dataclass
class _Taken:
    """Bytes of one transfer. They count against the limit until the last of its chunks is written."""

    bytes: int
    unwritten: int


class Transfer:
    """The chunks of one save with their values, in the order in which they reach host memory.

    Attributes:
        filled: The snapshot as this save has filled it. None: there is no snapshot.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        specs: Specs,
        plan: WritePlan,
        options: WriteOptions,
        snapshot: HostSnapshot | None,
        deadline: Deadline | None = None,
    ) -> None:
        """Copies into ``snapshot`` what the options ask for. After that, these leaves may be donated.

        Args:
            leaves: The leaves with their data.
            specs: What is stored of each leaf.
            plan: The plan of the save.
            options: The options of the save.
            snapshot: Memory that was reserved for the same form of state and plan, and for the priorities of this
                save. None: everything stays on the devices until it is written.
            deadline: When the copies into ``snapshot`` must have ended. None: ``_COPY_TIMEOUT_S`` seconds from now.
        """
        self._specs = specs
        self._paths = [leaf.path for leaf in leaves]
        self._options = options
        self._callback = options.callback
        self._to_transfer = plan.mine_by_leaf.copy()
        self._to_write = plan.mine_by_leaf.copy()
        # Leaves of which this process writes nothing, as others do: these are transferred at once.
        self._only_elsewhere = [i for i, spec in enumerate(specs) if spec is not None and not self._to_write[i]]
        for index in self._only_elsewhere:
            self._callback.on_transfer_end(self._paths[index])
        self._lock = threading.Lock()  # protects what ``written`` changes
        self._taken: dict[str, _Taken] = {}  # by the chunk's file: what counts against the limit
        self._data = [leaf.data for leaf in leaves]
        self._far = {i for i in {shard.leaf for shard in plan.shards} if is_far(leaves[i].data, options)}
        self._devices = Devices(self._data, self._far)
        ahead_bytes = self._devices.ahead_bytes(plan.shards)
        self._limit = ByteLimiter(options.device_host_max_bytes or ahead_bytes)
        self._copied: list[_Piece] = []
        self.filled = None if snapshot is None else snapshot.fill()
        if snapshot is None:
            self._left = [list(plan.shards)]
            return
        shards_of = by_priority(plan, snapshot.priorities)
        self._copy(shards_of[TransferPriority.SYNCHRONOUS], snapshot, ByteLimiter(ahead_bytes), deadline)
        self._left = [shards_of[priority] for priority in LATER if shards_of[priority]]
        needed = {shard.leaf for shards in self._left for shard in shards}
        # JAX makes the list of an array's shards at the first request, and two threads must not make it at once
        # (``planning.chunks``). Here the training waits. Later its threads may ask for shards of these arrays, too.
        for index in needed:
            if not isinstance(self._data[index], np.ndarray):
                local_shard(self._data[index], 0)
        if options.device_host_max_bytes is not None:
            logger.info(
                "%d of %d leaves are copied from their devices in the background, at most %d bytes of them at once, "
                "which may make the save slower",
                len(needed),
                len({shard.leaf for shard in plan.shards}),
                options.device_host_max_bytes,
            )
        self._data = [data if index in needed else None for index, data in enumerate(self._data)]  # frees the others

    @property
    def copied(self) -> Sequence[tuple[Chunk, npt.NDArray[Any]]] | None:
        """The chunks in the snapshot, before ``chunks`` is called. None if they are not all of the state."""
        return None if self._left else tuple(self._copied)

    def check_unchanged(self) -> None:
        """Raises SaveFailed if the snapshot was filled again."""
        if self.filled is not None:
            self.filled.check_unchanged()

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields every chunk once, in the type of the state or the stored type. The caller passes each to ``written``.

        The arrays may be views of JAX's own memory, in any memory order. They are valid until the state is donated.

        Raises:
            SaveFailed: The chunks were not copied in time, or the yielded ones were not written in time to make room
                for more.
        """
        yield from self._copied
        self._copied = []

        for shards in self._left:
            makes = [functools.partial(self._pulled, own) for own in self._devices.split(shards)]
            with contextlib.closing(merged(makes, deadline)) as pulled:
                for pieces in pulled:
                    for chunk, values in pieces:
                        self._transferred(chunk)
                        yield chunk, values
                    del pieces, values  # before the next transfer is taken
        self._tell_only_elsewhere()

    def written_elsewhere(self) -> None:
        for index, unwritten in self._to_write.items():
            if unwritten > 0:
                self._callback.on_write_end(self._paths[index])
        self._to_write.clear()
        self._tell_only_elsewhere()

    def _tell_only_elsewhere(self) -> None:
        while self._only_elsewhere:
            self._callback.on_write_end(self._paths[self._only_elsewhere.pop()])

    def _pulled(self, shards: Sequence[Shard], deadline: Deadline) -> Iterator[list[_Piece]]:
        """Yields the values of each transfer. Runs in the thread of a device."""
        if not self._far and self._options.device_host_max_bytes is None:  # nothing is copied, and no room is needed
            for shard in shards:
                yield list(values_of(in_place(shard, self._data[shard.leaf]), shard.index, shard.chunks))
            return

        def has_room(pull: Pull, wait: bool) -> bool:
            return self._take(pull, deadline if wait else None)

        for pull, started in transfers(shards, self._data, self._options, has_room):
            yield list(values_of(started, pull.region, pull.chunks))
            del started

    def written(self, chunk: Chunk) -> None:
        """Reports that the chunk's values are no longer needed. May be called from any thread."""
        with self._lock:
            transfer = self._taken.pop(chunk.file, None)
            if transfer is not None:
                transfer.unwritten -= 1
            if chunk.mine:
                self._to_write[chunk.leaf] -= 1
            is_leaf_written = chunk.mine and self._to_write[chunk.leaf] == 0
        if is_leaf_written:
            self._callback.on_write_end(self._paths[chunk.leaf])
        if transfer is not None and transfer.unwritten == 0:
            self._limit.give_back(transfer.bytes)  # last, as this lets the next transfer start

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
        transfer = _Taken(pull.bytes, len(pull.chunks))
        with self._lock:
            self._taken.update((chunk.file, transfer) for chunk in pull.chunks)
        return True

    def _copy(
        self, shards: Sequence[Shard], snapshot: HostSnapshot, limit: ByteLimiter, deadline: Deadline | None
    ) -> None:
        far = [shard for shard in shards if shard.leaf in self._far]
        if len(far) < len(shards):
            copies = Copies()
            snapshot.lend(copies)
            with copies:
                for shard in shards:
                    if shard.leaf in self._far:
                        continue
                    for chunk, values in values_of(in_place(shard, self._data[shard.leaf]), shard.index, shard.chunks):
                        buffer = snapshot.buffer(chunk)
                        copies.add(values, buffer)
                        self._copied.append((chunk, buffer))
            for chunk, _ in self._copied:
                self._transferred(chunk)
        if far:
            makes = [functools.partial(self._copied_from, own, snapshot, limit) for own in self._devices.split(far)]
            deadline = deadline or Deadline.after(_COPY_TIMEOUT_S, time.monotonic)
            # Lent, as the threads write to the snapshot, which the next save fills again.
            with contextlib.closing(merged(makes, deadline, snapshot.lend)) as pieces:
                for chunk, buffer in pieces:
                    self._copied.append((chunk, buffer))
                    self._transferred(chunk)

    def _copied_from(
        self, shards: Sequence[Shard], snapshot: HostSnapshot, limit: ByteLimiter, deadline: Deadline
    ) -> Iterator[_Piece]:
        """Copies the shards of one device into the snapshot, and yields its buffers. Runs in the device's thread."""

        def has_room(pull: Pull, wait: bool) -> bool:
            if not wait:
                return limit.take_if_room(pull.bytes)
            if not limit.take(pull.bytes, deadline):
                raise SaveFailed(f"{pull.chunks[0].file} was not copied from its device {deadline.ended}")
            return True

        for pull, started in transfers(shards, self._data, self._options, has_room):
            for chunk, values in values_of(started, pull.region, pull.chunks):
                buffer = snapshot.buffer(chunk)
                copy(values, buffer)
                yield chunk, buffer
            del started, values
            limit.give_back(pull.bytes)

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
