"""Copies values from device memory to host memory: whole shards, or slices of them where that copies less.

If several processes hold a shard, each copies only the chunks that it writes. A large shard is copied chunk by chunk,
so that little host memory is needed at once. A small compiled program makes each slice, one program for each device
and pair of shapes. ``compile_slices`` compiles these programs before they are needed. A slice takes as much device
memory as its values until it is copied.

JAX keeps the host copy of an array as long as the array lives. So the state's own arrays are never copied to the host
themselves. A slice, a copy in pinned memory, or another array of the same buffer is copied instead, and is released
together with its values.

Up to ``_COMPILING_THREADS`` threads ("gracepoint-compiles") run ``compile_slices`` beside its caller, which waits for
them. They share no state, and have ended when it returns or raises. A compilation under way cannot be interrupted.
"""

from __future__ import annotations

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
from gracepoint.checkpoint.planning.chunks import Chunk, Shard, WritePlan
from gracepoint.checkpoint.planning.local_shards import local_shard
from gracepoint.checkpoint.transfer.array_view import as_it_lies
from gracepoint.jax_isolation import isolated, jit, to_numpy

if jax.__version_info__ < (0, 10):
    raise ImportError(
        f"gracepoint needs JAX 0.10 or newer, found {jax.__version__}: older versions copy an array of another memory "
        "layout to pinned host memory with wrong values"
    )

logger = logging.getLogger(__name__)

# A shard up to this size that is needed as a whole is copied in one transfer. Each device has room for two of them.
_WHOLE_BYTES = 64 << 20
_PINNED = "pinned_host"
_MAX_LENGTH = 2**31 - 1  # of an axis: the start of a slice is an int32
_COMPILING_THREADS = 4


class Pull(NamedTuple):
    """A part of a shard that is copied in one transfer.

    Attributes:
        shard: The shard that it is a part of.
        chunks: The chunks whose values it contains.
        region: The region that is copied, in coordinates of the array.
        bytes: Size of the region's values on the device.
    """

    shard: Shard
    chunks: tuple[Chunk, ...]
    region: Index
    bytes: int


def is_far(data: Any, options: WriteOptions) -> bool:
    """True if the values must be copied to be in host memory.

    This is so for arrays on accelerators, and for all JAX arrays if ``pinned_host_transfer`` is set.
    """
    if isinstance(data, np.ndarray):
        return False
    return options.pinned_host_transfer or next(iter(data.sharding.device_set)).platform != "cpu"


def whole(shard: Shard) -> Pull:
    """Returns the transfer of a whole shard."""
    return Pull(shard, shard.chunks, shard.index, shard.bytes)


def pulls_of(shard: Shard, data: Any, options: WriteOptions) -> Iterator[Pull]:
    """Yields the transfers that copy a shard of ``data``."""
    if not is_far(data, options) or not _is_sliced(shard, data):
        yield whole(shard)
        return
    for chunk in shard.chunks:
        yield Pull(shard, (chunk,), chunk.index, math.prod(_shape(chunk.index)) * data.dtype.itemsize)


def in_place(shard: Shard, data: Any) -> Any:
    """Returns the values of a shard that is in host memory, without a copy. ``values_of`` accepts them."""
    # Building the public list of shards takes longer than copying a small leaf.
    return data if isinstance(data, np.ndarray) else as_it_lies(local_shard(data, shard.position))


def device_of(shard: Shard, data: Any) -> Any:
    """Returns the device that holds the shard of ``data``, an array that ``is_far``."""
    return local_shard(data, shard.position).device


def start(pull: Pull, data: Any, options: WriteOptions) -> Any:
    """Starts to copy values of ``data`` to host memory. Returns the argument for ``values_of``."""
    return _started(pull, data, options) if is_far(data, options) else in_place(pull.shard, data)


@isolated()
def _started(pull: Pull, data: Any, options: WriteOptions) -> Any:
    values = local_shard(data, pull.shard.position)
    if pull.region != pull.shard.index:
        try:
            values = _slice(values, _starts(pull.region, pull.shard.index), _shape(pull.region))
        except jax.errors.JaxRuntimeError as error:
            logger.warning("all of a shard is copied to the host for a slice of it, as its device could not: %s", error)
            return to_numpy(_another(values))[_within(pull.region, pull.shard.index)].copy()
    if options.pinned_host_transfer is not False and has_pinned_memory(values.device) and not _is_pinned(values):
        return jax.device_put(values, jax.sharding.SingleDeviceSharding(values.device, memory_kind=_PINNED))
    if pull.region == pull.shard.index:
        values = _another(values)
    values.copy_to_host_async()
    return values


def values_of(started: Any, region: Index, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
    """Waits for the values of ``region``, and yields each of ``chunks`` with its values, in the type of the state."""
    values = started if isinstance(started, np.ndarray) else to_numpy(started)
    for chunk in chunks:
        part = values
        if chunk.index != region:
            part = values[_within(chunk.index, region)]
        yield chunk, part


def compile_slices(leaves: Sequence[Leaf], plan: WritePlan, options: WriteOptions) -> None:
    """Compiles the programs that ``start`` will need for ``plan``, unless they are compiled already.

    Args:
        leaves: The leaves with their data. Slices of the data are made and released.
        plan: The plan of the save.
        options: The options of the save.
    """
    wanted: dict[Any, tuple[Pull, Any]] = {}  # by everything that a program depends on
    for shard in plan.shards:
        data = leaves[shard.leaf].data
        for pull in pulls_of(shard, data, options):
            if pull.region == shard.index:
                break
            values = local_shard(data, shard.position)
            wanted.setdefault((values.sharding, values.shape, values.dtype, _shape(pull.region)), (pull, data))
    if wanted:
        started_s = time.monotonic()
        with ThreadPoolExecutor(min(_COMPILING_THREADS, machine.all_cores()), "gracepoint-compiles") as threads:
            list(threads.map(lambda one: jax.block_until_ready(start(one[0], one[1], options)), wanted.values()))
        logger.info("%d slices of shards were compiled in %.3f s", len(wanted), time.monotonic() - started_s)


def has_pinned_memory(device: jax.Device) -> bool:
    """True if ``device`` can copy to and from pinned host memory. CPU devices have memory of that name, too."""
    return any(memory.kind == _PINNED for memory in device.addressable_memories())


def _is_sliced(shard: Shard, data: Any) -> bool:
    """True if the chunks are copied one by one: they are only a part of the shard, or the shard is large."""
    if shard.chunks[0].index == shard.index or max(_shape(shard.index)) > _MAX_LENGTH:
        return False
    if data.sharding.memory_kind not in (None, next(iter(data.sharding.device_set)).default_memory().kind):
        return False  # in host memory that devices access: a program would first copy it to the device
    needed_bytes = sum(math.prod(_shape(chunk.index)) for chunk in shard.chunks) * data.dtype.itemsize
    return needed_bytes < shard.bytes or shard.bytes > _WHOLE_BYTES


@isolated()
def _another(values: jax.Array) -> jax.Array:
    """Returns a new array that shares the buffer on the device."""
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


def _part(values: jax.Array, starts: Iterable[Any], shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(values, tuple(starts), shape)


_slice = jit(_part, static_argnums=2)
