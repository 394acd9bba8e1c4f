"""How chunks get from devices to host memory, and the host memory that holds them while training goes on.

A ``Transfer`` is one save's: made by the training thread, which copies what must be in host memory before training
goes on into the ``Snapshot``'s buffers, and used up by the thread that writes. What is left then (everything, in a
save that streams) comes from the devices when the writer asks for it, ahead of it only as far as
``device_host_max_bytes`` allows: bytes count from the start of their transfer until they are written, of which
the writer's threads tell.

The snapshot's buffers are reserved and touched once: the first touch of memory is an order of magnitude slower than
a copy into it.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.byte_limit import ByteLimit
from gracepoint.checkpoint.copying import Copies, copy
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.options import TransferPriority, WriteOptions
from gracepoint.checkpoint.plan import Chunk, Plan, Shard
from gracepoint.checkpoint.spec import ArraySpec, Index
from gracepoint.checkpoint.tree import Leaf
from gracepoint.errors import SaveFailed

Specs = Sequence[ArraySpec | None]

_PINNED = "pinned_host"
# So much is on its way from devices at once while a snapshot is taken: enough to keep the link busy.
_AHEAD_BYTES = 256 << 20


class Snapshot:
    """One reserved buffer for each chunk that is copied before a save returns; holds one state at a time."""

    def __init__(self, leaves: Sequence[Leaf], specs: Specs, plan: Plan, options: WriteOptions) -> None:
        """Reserves memory; arguments as in ``Transfer``."""
        self._buffers = {}
        for shard in _by_priority(leaves, plan, options)[TransferPriority.SYNCHRONOUS]:
            spec = specs[shard.leaf]
            assert spec is not None
            for chunk in shard.chunks:
                buffer = np.empty(spec.chunk, spec.numpy_dtype)
                buffer.fill(0)  # numpy.zeros would leave the touching to the first copy
                self._buffers[chunk.file] = buffer

    def buffer(self, chunk: Chunk) -> npt.NDArray[Any]:
        """Returns the memory for the values of ``chunk``, as the type that is stored."""
        return self._buffers[chunk.file]


class Transfer:
    """The chunks of one save with their values, in the order in which they get to host memory."""

    def __init__(
        self,
        leaves: Sequence[Leaf],
        specs: Specs,
        plan: Plan,
        options: WriteOptions,
        snapshot: Snapshot | None,
    ) -> None:
        """Copies what the options ask for into ``snapshot``; on return, those leaves may be donated.

        Args:
            leaves: With their data.
            specs: Of what is stored of each.
            plan: Of the save.
            options: Of the save.
            snapshot: Was made for this form of state, plan and options; None: everything is left on the devices until
                it is written.
        """
        self._specs = specs
        self._paths = [leaf.path for leaf in leaves]
        self._callback = options.callback
        pinned = options.pinned_host_transfer
        self._has_accelerator = jax.default_backend() != "cpu"
        self._pinned = self._has_accelerator if pinned is None else pinned
        self._limit = None if options.device_host_max_bytes is None else ByteLimit(options.device_host_max_bytes)
        self._to_transfer = plan.mine_by_leaf.copy()
        self._to_write = plan.mine_by_leaf.copy()
        self._lock = threading.Lock()  # of what ``written`` changes
        self._shard_of: dict[str, Shard] = {}  # by chunk's file: shards that count against the limit
        self._unwritten: dict[tuple[int, Index], int] = {}  # their chunks, by leaf and index
        self._data = [leaf.data for leaf in leaves]
        self._copied: list[tuple[Chunk, npt.NDArray[Any]]] = []
        if snapshot is None:
            self._left = list(plan.shards)
            return
        by_priority = _by_priority(leaves, plan, options)
        self._copy(by_priority[TransferPriority.SYNCHRONOUS], snapshot)
        self._left = [shard for priority in _LATER for shard in by_priority[priority]]
        left = {shard.leaf for shard in self._left}
        self._data = [data if index in left else None for index, data in enumerate(self._data)]  # the others may go

    @property
    def copied(self) -> Sequence[tuple[Chunk, npt.NDArray[Any]]] | None:
        """What lies in the snapshot, before ``chunks`` is asked for; None where that is not all of the state."""
        return None if self._left else tuple(self._copied)

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields every chunk once, as the type that is stored. Each must be given to ``written``.

        The arrays may be JAX's own memory: they are good until the state is donated.

        Raises:
            SaveFailed: What was yielded was not written in time to make room for more.
        """
        yield from self._copied
        self._copied = []
        ahead = ByteLimit(_AHEAD_BYTES)

        def has_room(shard: Shard, wait: bool) -> bool:
            if self._limit is None:
                return ahead.take_if_room(shard.bytes)
            return self._take(self._limit, shard, deadline if wait else None)

        for shard, transfer in self._transfers(self._left, has_room):
            spec = self._specs[shard.leaf]
            assert spec is not None
            for chunk, values in self._values(shard, transfer):
                self._transferred(chunk)
                yield chunk, stored_values(values, spec.numpy_dtype)
            if self._limit is None:
                ahead.give_back(shard.bytes)

    def written(self, chunk: Chunk) -> None:
        """Tells that the chunk's values are needed no longer; from any thread."""
        with self._lock:
            shard = self._shard_of.pop(chunk.file, None)
            is_shard_written = False
            if shard is not None:
                self._unwritten[shard.leaf, shard.index] -= 1
                is_shard_written = self._unwritten[shard.leaf, shard.index] == 0
            if chunk.mine:
                self._to_write[chunk.leaf] -= 1
            is_leaf_written = chunk.mine and self._to_write[chunk.leaf] == 0
        if is_leaf_written:
            self._callback.on_write_end(self._paths[chunk.leaf])
        if self._limit is not None and shard is not None and is_shard_written:
            self._limit.give_back(shard.bytes)  # last, as it lets the next transfer begin

    def _take(self, limit: ByteLimit, shard: Shard, deadline: Deadline | None) -> bool:
        """Counts a shard against the limit; waits for room with a deadline."""
        if deadline is None:
            if not limit.take_if_room(shard.bytes):
                return False
        elif not limit.take(shard.bytes, deadline):
            raise SaveFailed(
                f"{shard.chunks[0].file} was not copied from its device {deadline.ended}: "
                "device_host_max_bytes leaves no room until what was copied is written"
            )
        with self._lock:
            self._unwritten[shard.leaf, shard.index] = len(shard.chunks)
            self._shard_of.update((chunk.file, shard) for chunk in shard.chunks)
        return True

    def _copy(self, shards: Sequence[Shard], snapshot: Snapshot) -> None:
        if self._has_accelerator or self._pinned:
            self._copy_from_devices(shards, snapshot)
            return
        with Copies() as copies:  # all of it is in host memory already
            for shard in shards:
                for chunk, values in self._values(shard, self._start(shard)):
                    buffer = snapshot.buffer(chunk)
                    copies.add(values, buffer)
                    self._copied.append((chunk, buffer))
        for chunk, _ in self._copied:
            self._transferred(chunk)

    def _copy_from_devices(self, shards: Sequence[Shard], snapshot: Snapshot) -> None:
        ahead = ByteLimit(_AHEAD_BYTES)
        for shard, transfer in self._transfers(shards, lambda shard, wait: ahead.take_if_room(shard.bytes)):
            for chunk, values in self._values(shard, transfer):
                buffer = snapshot.buffer(chunk)
                copy(values, buffer)
                self._copied.append((chunk, buffer))
                self._transferred(chunk)
            ahead.give_back(shard.bytes)

    def _transfers(
        self, shards: Sequence[Shard], has_room: Callable[[Shard, bool], bool]
    ) -> Iterator[tuple[Shard, Any]]:
        """Yields shards whose transfer is under way; as many are begun ahead as ``has_room`` allows.

        It is told whether it may wait, as nothing else is under way.
        """
        waiting, started = collections.deque(shards), collections.deque[tuple[Shard, Any]]()
        while waiting or started:
            while waiting and has_room(waiting[0], not started):
                shard = waiting.popleft()
                started.append((shard, self._start(shard)))
            yield started.popleft()

    def _start(self, shard: Shard) -> Any:
        """Starts to copy a shard to host memory."""
        data = self._data[shard.leaf]
        if isinstance(data, np.ndarray):
            return data
        # Its public list of shards takes longer to make than a small leaf to copy.
        data = data.addressable_data(shard.position)
        if self._pinned and data.sharding.memory_kind != _PINNED and has_pinned_memory(data.device):
            return jax.device_put(data, jax.sharding.SingleDeviceSharding(data.device, memory_kind=_PINNED))
        if self._has_accelerator:
            data.copy_to_host_async()
        return data

    def _values(self, shard: Shard, transfer: Any) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields the chunks of a shard as the type that the state has."""
        values = np.asarray(transfer)
        for chunk in shard.chunks:
            part = values
            if chunk.index != shard.index:
                inside = zip(chunk.index, shard.index, strict=True)
                part = values[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in inside)]
            yield chunk, part

    def _transferred(self, chunk: Chunk) -> None:
        if not chunk.mine:
            return
        self._to_transfer[chunk.leaf] -= 1
        if self._to_transfer[chunk.leaf] == 0:
            self._callback.on_transfer_end(self._paths[chunk.leaf])


def snapshot_bytes(leaves: Sequence[Leaf], plan: Plan, options: WriteOptions) -> int:
    """Returns the size of the snapshot's buffers."""
    shards = _by_priority(leaves, plan, options)[TransferPriority.SYNCHRONOUS]
    return sum(chunk.bytes for shard in shards for chunk in shard.chunks)


def has_pinned_memory(device: jax.Device) -> bool:
    """True if ``device`` copies to and from pinned host memory; CPU devices have memory of that name, too."""
    return any(memory.kind == _PINNED for memory in device.addressable_memories())


def stored_values(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns ``values`` as ``dtype`` in C order: themselves where they are that.

    Arrays with a transposed device layout come as strided views, whose raw bytes would be in another order.
    """
    if values.dtype == dtype:
        return np.asarray(values, order="C")
    cast = np.empty(values.shape, dtype)
    copy(values, cast)
    return cast


_LATER = (TransferPriority.ASYNCHRONOUS_PRIORITIZED, TransferPriority.ASYNCHRONOUS_DEPRIORITIZED)


def _by_priority(leaves: Sequence[Leaf], plan: Plan, options: WriteOptions) -> dict[TransferPriority, list[Shard]]:
    found: dict[TransferPriority, list[Shard]] = {priority: [] for priority in TransferPriority}
    if options.device_host_max_bytes is None:
        return found | {TransferPriority.SYNCHRONOUS: list(plan.shards)}
    asked: dict[int, TransferPriority] = {}
    for shard in plan.shards:
        if shard.leaf not in asked:
            asked[shard.leaf] = options.callback.key_priority(leaves[shard.leaf].path)
        found[asked[shard.leaf]].append(shard)
    return found
