"""Copies values from device memory to host memory: whole shards, or slices of them where that copies less.

If several processes hold a shard, each copies only the chunks that it writes. A large shard is copied chunk by chunk,
so that little host memory is needed at once. A small compiled program makes each slice, one program for each device
and pair of shapes. ``compile_slices`` compiles these programs before they are needed. A slice takes as much device
memory as its values until it is copied.

JAX keeps the host copy of an array as long as the array lives. So the state's own arrays are never copied to the host
themselves. A slice, a copy in pinned memory, or another array of the same buffer is copied instead, and is released
together with its values. Arrays on CPU devices whose memory layout is not the usual row-major one are read as numpy
views (``as_it_lies``): JAX would copy such an array as a whole into row-major order, and keep the copy.

Several copies from one device are in progress at once, and their values are taken in order. Threads:

* One for each device, so that the values of all devices are on their way to the host at once. Each advances one
  iterator, and the calling thread yields the values of all of them, in the order in which they come. If there is only
  one iterator, the calling thread advances it. The threads start when the first value is asked for. They end with their
  iterators, with the first error of one of them, when the caller stops, or when the deadline passes. A thread that
  waits for a device cannot be interrupted. If a signal handler's exception leaves the calling thread's wait, threads
  may still run. So whoever lends them memory hears of them before they start (``lend``), and asks them whether they
  have ended.
* Up to ``_COMPILING_THREADS`` ("gracepoint-compiles") run ``compile_slices`` together with its caller, which waits for
  them. They share no state, and have ended when it returns or raises. A compilation in progress cannot be interrupted.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import numpy as np
import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint.format.array_spec import Chunk, Index
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.memory import MemoryUser
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning.chunks import Shard, WritePlan, local_shard
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.jax_isolation import isolated, jit, to_numpy
from gracepoint.threads import DaemonThread, NoThread

# Arrays up to this size may be copied: the cost does not matter.
_SMALL_BYTES = 1 << 20
#: What devices fail with. Collectives on CPUs fail with a ValueError.
_DEVICE_ERRORS = (jax.errors.JaxRuntimeError, ValueError)


class NotComputed(SaveFailed):
    """A state is not saved because devices have failed to compute it, as when a process of a collective dies.

    Nothing is wrong with what saves it.

    Attributes:
        devices: What the devices of this process failed with. None: those of another one have.
    """

    def __init__(self, message: str, devices: Exception | None = None) -> None:
        super().__init__(message)
        self.devices = devices


@contextlib.contextmanager
def knowing_devices(state: Any) -> Iterator[None]:
    """Raises NotComputed in place of an error that leaves the block because devices have failed.

    Whoever uses that state next gets the devices' error, too. An array that was deleted or donated is no failure of the
    devices.
    """
    try:
        yield
    except _DEVICE_ERRORS:
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        try:
            jax.block_until_ready(arrays)
        except _DEVICE_ERRORS as failed:
            if not any(array.is_deleted() for array in arrays):
                raise NotComputed(f"the devices have failed to compute the state: {failed}", failed) from failed
        raise


def as_it_lies(array: jax.Array) -> Any:
    """Returns a read-only view of ``array``, which must be on one CPU device.

    Returns ``array`` itself if JAX can view it without a copy, or if it is small.
    """
    if array.ndim < 2 or array.nbytes <= _SMALL_BYTES:
        return array
    layout = cast(Any, array).format.layout  # not among what JAX's types say of arrays
    order = tuple(range(array.ndim)) if layout is None else tuple(layout.major_to_minor)
    if layout is None or order == tuple(range(array.ndim)) or layout.tiling or layout.sub_byte_element_size_in_bits:
        return array
    itemsize = array.dtype.itemsize
    strides, step = [0] * array.ndim, itemsize
    for axis in reversed(order):
        strides[axis], step = step, step * array.shape[axis]
    return np.asarray(_Memory(jax.block_until_ready(array), tuple(strides))).view(array.dtype)


class _Memory:
    """Keeps an array's memory from being freed or donated while a numpy view of it lives."""

    def __init__(self, array: jax.Array, strides: tuple[int, ...]) -> None:
        self._array = array
        self._hold = array.__dlpack__()
        # numpy does not take types such as bfloat16 by DLPack, so the memory is described as a type of the same size.
        self.__array_interface__ = {
            "version": 3,
            "data": (array.unsafe_buffer_pointer(), True),
            "shape": array.shape,
            "strides": strides,
            "typestr": _typestr(array.dtype.itemsize),
        }


def _typestr(itemsize: int) -> str:
    return f"<u{itemsize}" if itemsize in (1, 2, 4, 8) else "<c16"


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
    programs: dict[Any, tuple[Pull, Any]] = {}  # by everything that a program depends on
    for shard in plan.shards:
        data = leaves[shard.leaf].data
        for pull in pulls_of(shard, data, options):
            if pull.region == shard.index:
                break
            values = local_shard(data, shard.position)
            programs.setdefault((values.sharding, values.shape, values.dtype, _shape(pull.region)), (pull, data))
    if programs:
        started_s = time.monotonic()
        with ThreadPoolExecutor(min(_COMPILING_THREADS, machine.all_cores()), "gracepoint-compiles") as threads:
            list(threads.map(lambda one: jax.block_until_ready(start(one[0], one[1], options)), programs.values()))
        logger.info("%d slices of shards were compiled in %.3f s", len(programs), time.monotonic() - started_s)


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


#: Default bound on the bytes in transfer from one or two devices at once. It is enough to keep the links busy.
AHEAD_BYTES = 256 << 20
# Bound on the number of pending transfers. Transfers of small leaves hardly count in bytes, but each takes time.
_MOST_AHEAD = 256

#: Takes room for a transfer; returns False if there is none. The second argument says whether it may wait for room.
HasRoom = Callable[[Pull, bool], bool]


def transfers(
    shards: Sequence[Shard], data: Sequence[Any], options: WriteOptions, has_room: HasRoom
) -> Iterator[tuple[Pull, Any]]:
    """Yields the transfers of ``shards`` in order. As many are started ahead as ``has_room`` allows.

    ``has_room`` may wait only if no other transfer of these shards is in progress. Otherwise it could wait for the room
    of a transfer that is not yielded yet.
    """
    waiting = collections.deque(shards)
    pulls, started = collections.deque[Pull](), collections.deque[tuple[Pull, Any]]()
    while waiting or pulls or started:
        while (waiting or pulls) and len(started) < _MOST_AHEAD:
            if not pulls:
                shard = waiting.popleft()
                pulls.extend(pulls_of(shard, data[shard.leaf], options))
            if not has_room(pulls[0], not started):
                break
            pull = pulls.popleft()
            started.append((pull, start(pull, data[pull.shard.leaf], options)))
        yield started.popleft()


class Devices:
    """Knows the device of each shard."""

    def __init__(self, data: Sequence[Any], far: Collection[int]) -> None:
        """``far`` are the indices of the leaves that are not in host memory."""
        self._data = data
        self._far = far
        self._known: dict[Any, Any] = {}  # device by sharding and position: there are few of them, and many leaves

    def split(self, shards: Sequence[Shard]) -> list[list[Shard]]:
        """Returns the shards by device. Shards in host memory are a separate group."""
        groups: dict[Any, list[Shard]] = {}
        for shard in shards:
            groups.setdefault(self._device_of(shard), []).append(shard)
        return list(groups.values())

    def ahead_bytes(self, shards: Sequence[Shard]) -> int:
        """Returns the default bound on the bytes of ``shards`` that are in transfer at once.

        Each device has room for two of the largest transfers: one is on its way while the other is copied or written.
        """
        devices = {self._device_of(shard) for shard in shards} - {None}
        return AHEAD_BYTES * max(2, len(devices)) // 2

    def _device_of(self, shard: Shard) -> Any:
        if shard.leaf not in self._far:
            return None
        data = self._data[shard.leaf]
        key = (data.sharding, shard.position)
        if key not in self._known:
            self._known[key] = device_of(shard, data)
        return self._known[key]


T = TypeVar("T")

#: Makes an iterator. Its waits must end with the deadline that it gets.
Make = Callable[[Deadline], Iterator[T]]


def merged(
    makes: Sequence[Make[T]], deadline: Deadline, lend: Callable[[MemoryUser], object] | None = None
) -> Generator[T, None, None]:
    """Yields what all iterators yield.

    Args:
        makes: One function for each device.
        deadline: When all must have ended.
        lend: Called with the threads before they start. Needed if they write to memory that is used again. They are
            then waited for, even if the iteration fails or stops. The wait has no timeout: a thread that must stop
            waits for nothing but its device.

    Raises:
        SaveFailed: The deadline passed, or was cancelled.
        BaseException: The first error of an iterator.
    """
    if len(makes) == 1:
        yield from makes[0](deadline)
        return
    merging = _Merging[T](makes, deadline)
    if lend is not None:
        lend(merging)
    try:
        started = merging.begin()
        if started < len(makes):
            for make in makes[started:]:
                yield from make(merging.deadline)
        yield from merging.values(started)
    finally:
        merging.stop()
        if lend is not None:
            # A deadline here would let a thread write to memory that is used again. Each thread ends with the transfer
            # in progress. If the device hangs, only the end of the process ends the wait.
            merging.end(None)


class _Merging(Generic[T]):
    """The threads of one call, and what they have in common. A ``MemoryUser``.

    Attributes:
        deadline: Ends with the caller's deadline, or when the threads must stop.
    """

    def __init__(self, makes: Sequence[Make[T]], deadline: Deadline) -> None:
        self._threads = [
            DaemonThread(functools.partial(self.advance, make), f"gracepoint: device {number}")
            for number, make in enumerate(makes)
        ]
        self.deadline = Deadline.following(deadline.remaining_s, deadline.clock)
        self._callers = deadline
        self._values: collections.deque[T] = collections.deque()
        self._ended = 0
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # protects the three above
        self._changed = threading.Condition(self._lock)

    def begin(self) -> int:
        """Starts the threads. Returns how many the system allows."""
        for number, thread in enumerate(self._threads):
            try:
                thread.start()
            except NoThread as error:  # a limit on threads, or no memory for their stacks
                missing = len(self._threads) - number
                logger.warning("values of %d devices are copied by one thread: %s", missing, error)
                return number
        return len(self._threads)

    def end(self, timeout_s: float | None) -> bool:
        """As ``MemoryUser``."""
        self.stop()
        return all(thread.wait(timeout_s) for thread in self._threads)

    def advance(self, make: Make[T]) -> None:
        """Runs in each thread."""
        error = None
        try:
            for value in make(self.deadline):
                with self._lock:
                    if self.deadline.cancelled:
                        return
                    self._values.append(value)
                    self._changed.notify()
                del value  # it may hold much memory, and the next one may have to wait for room
        except BaseException as raised:  # noqa: BLE001 - raised by the calling thread
            error = raised
        finally:
            with self._lock:
                self._error = self._error or error
                self._ended += 1
                self._changed.notify()

    def values(self, threads: int) -> Iterator[T]:
        """Yields the values until all threads have ended."""
        while True:
            with self._lock:
                in_time = self._callers.wait_for(
                    self._changed, lambda: bool(self._values) or self._error is not None or self._ended == threads
                )
                if self._error is not None:
                    raise self._error
                if not in_time:
                    missing = threads - self._ended
                    raise SaveFailed(f"the values of {missing} devices were not copied {self._callers.ended}")
                if not self._values:
                    return
                value = self._values.popleft()
            yield value
            del value

    def stop(self) -> None:
        self.deadline.cancel("the save continues without them, or has failed")
