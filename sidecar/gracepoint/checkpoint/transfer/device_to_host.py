"""How values get from the memory of devices into the host's: shards as wholes, or slices where that is less.

Of a shard that several processes hold, each takes only the chunks that it writes, and a large shard is taken chunk by
chunk, so that little host memory is needed at once. A slice is a small program for each device and pair of shapes;
``compile_slices`` has them compiled before they are needed. It takes as much memory of the device until it is copied.

JAX keeps the host's copy of an array as long as the array lives. So none of the state's own is ever copied: a slice,
a copy in pinned memory, or another array of the same buffer is, and is let go with its values.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning.write_plan import Chunk, Shard, WritePlan
from gracepoint.checkpoint.transfer.array_view import as_it_lies

logger = logging.getLogger(__name__)

#: So much is on its way from devices at once, unless told otherwise: enough to keep the link busy.
AHEAD_BYTES = 256 << 20
# Up to here a shard that is needed as a whole goes as one.
_WHOLE_BYTES = AHEAD_BYTES // 4
_PINNED = "pinned_host"
_MAX_LENGTH = 2**31 - 1  # of an axis: where a slice begins is an int32
_COMPILING_THREADS = 4


class Pull(NamedTuple):
    """What is copied at once.

    Attributes:
        shard: That it is of.
        chunks: That it brings.
        region: Of what is copied, in the array.
        bytes: Its size on the device.
    """

    shard: Shard
    chunks: tuple[Chunk, ...]
    region: Index
    bytes: int


def is_far(data: Any, options: WriteOptions) -> bool:
    """True if values come to be in host memory by a copy only: those of accelerators, and all that shall be pinned."""
    if isinstance(data, np.ndarray):
        return False
    return options.pinned_host_transfer or next(iter(data.sharding.device_set)).platform != "cpu"


def whole(shard: Shard) -> Pull:
    """Returns all of a shard at once, as it is taken from host memory."""
    return Pull(shard, shard.chunks, shard.index, shard.bytes)


def pulls_of(shard: Shard, data: Any, options: WriteOptions) -> Iterator[Pull]:
    """Yields how a shard of ``data`` is copied."""
    if not is_far(data, options) or not _is_sliced(shard, data):
        yield whole(shard)
        return
    for chunk in shard.chunks:
        yield Pull(shard, (chunk,), chunk.index, math.prod(_shape(chunk.index)) * data.dtype.itemsize)


def in_place(shard: Shard, data: Any) -> Any:
    """Returns the values of a shard that are in host memory, where they are; ``values_of`` takes them as they are."""
    # Its public list of shards takes longer to make than a small leaf to copy.
    return data if isinstance(data, np.ndarray) else as_it_lies(data.addressable_data(shard.position))


def start(pull: Pull, data: Any, options: WriteOptions) -> Any:
    """Starts to copy values of ``data`` to host memory; returns what ``values_of`` takes."""
    if not is_far(data, options):
        return in_place(pull.shard, data)
    values = data.addressable_data(pull.shard.position)
    if pull.region != pull.shard.index:
        try:
            values = _slice(values, _starts(pull.region, pull.shard.index), _shape(pull.region))
        except jax.errors.JaxRuntimeError as error:
            logger.warning("all of a shard is copied to the host for a slice of it, as its device could not: %s", error)
            return np.asarray(_another(values))[_within(pull.region, pull.shard.index)].copy()
    if options.pinned_host_transfer is not False and has_pinned_memory(values.device) and not _is_pinned(values):
        return jax.device_put(values, jax.sharding.SingleDeviceSharding(values.device, memory_kind=_PINNED))
    if pull.region == pull.shard.index:
        values = _another(values)
    values.copy_to_host_async()
    return values


def values_of(started: Any, region: Index, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
    """Waits for the values of ``region``, and yields those of ``chunks`` in it, as the type that the state has."""
    values = np.asarray(started)
    for chunk in chunks:
        part = values
        if chunk.index != region:
            part = values[_within(chunk.index, region)]
        yield chunk, part


def compile_slices(leaves: Sequence[Leaf], plan: WritePlan, options: WriteOptions) -> None:
    """Compiles what ``start`` will need for ``plan``, unless that was done.

    Args:
        leaves: With their data, of which slices are made and let go.
        plan: Of the save.
        options: Of the save.
    """
    wanted: dict[Any, tuple[Pull, Any]] = {}  # by what makes a program another one
    for shard in plan.shards:
        data = leaves[shard.leaf].data
        for pull in pulls_of(shard, data, options):
            if pull.region == shard.index:
                break
            values = data.addressable_data(shard.position)
            wanted.setdefault((values.sharding, values.shape, values.dtype, _shape(pull.region)), (pull, data))
    if wanted:
        started_s = time.monotonic()
        with ThreadPoolExecutor(min(_COMPILING_THREADS, machine.all_cores()), "gracepoint-compiles") as threads:
            list(threads.map(lambda one: jax.block_until_ready(start(one[0], one[1], options)), wanted.values()))
        logger.info("%d slices of shards were compiled in %.3f s", len(wanted), time.monotonic() - started_s)


def has_pinned_memory(device: jax.Device) -> bool:
    """True if ``device`` copies to and from pinned host memory; CPU devices have memory of that name, too."""
    return any(memory.kind == _PINNED for memory in device.addressable_memories())


def _is_sliced(shard: Shard, data: Any) -> bool:
    """True if the chunks are copied one by one: they are not all of the shard, or that is large."""
    if shard.chunks[0].index == shard.index or max(_shape(shard.index)) > _MAX_LENGTH:
        return False
    if data.sharding.memory_kind not in (None, next(iter(data.sharding.device_set)).default_memory().kind):
        return False  # in host memory that the devices see: a program on them would bring it there first
    needed_bytes = sum(math.prod(_shape(chunk.index)) for chunk in shard.chunks) * data.dtype.itemsize
    return needed_bytes < shard.bytes or shard.bytes > _WHOLE_BYTES


def _another(values: jax.Array) -> jax.Array:
    """Returns an array of the same buffer on the device."""
    return jax.make_array_from_single_device_arrays(values.shape, values.sharding, [values])


def _is_pinned(values: Any) -> bool:
    return bool(values.sharding.memory_kind == _PINNED)


def _shape(index: Index) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in index)


def _within(index: Index, region: Index) -> tuple[slice, ...]:
    inside = zip(index, region, strict=True)
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in inside)


def _starts(index: Index, within: Index) -> tuple[np.int32, ...]:
    return tuple(np.int32(start - first) for (start, _), (first, _) in zip(index, within, strict=True))


@functools.partial(jax.jit, static_argnums=2)
def _slice(values: jax.Array, starts: Iterable[Any], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(values, tuple(starts), shape)
