"""Host memory: aligned allocations, parallel copies, and bounds on how much is in use.

This is the lowest module of the checkpoint engine. It handles arrays and bytes, and knows nothing of checkpoints. All
packages of the engine may call it. It calls none of them, but modules of the library that several packages use, and the
shared memory of ``async_calls``.

* ``check_fits``: Linux kills a container that exceeds its memory limit without notice. So the available memory is
  checked before any is reserved. The page cache counts as used memory in a container, but Linux reclaims it on demand,
  so it counts as available here. Processes of the job that share a machine or a container share its memory, so they
  check it together.
* ``ArrayBytes``: the bytes of an array as they are stored, in C order and in the stored type, without a copy of the
  whole array. Arrays with a transposed device layout are strided views, whose memory is in another order, and
  ``SaveArgs`` may ask for another type. Such values are copied in parts, as large as the memory that the caller has.
* ``Copies`` copies in several threads, as one thread alone does not reach the bandwidth of the memory. The caller adds
  copies to a queue, and takes part in the copying at the end of the context. Additional threads start once there is
  enough to copy for them, take the next copy from the queue, and end with the context. If the system does not allow
  more threads, those that have started do the work. The threads only access memory, so the wait for them needs no
  timeout. If a signal handler's exception leaves the context, threads may still copy: ``end`` ends them, before the
  memory is used again. The GIL is released while bytes are copied.
* ``ByteLimiter``: a bound on the bytes that are in flight at once. A thread takes bytes before it starts an operation.
  Any thread may give them back when the operation has ended. An operation that is larger than the bound runs alone.
* ``SharedArena``: arrays in one piece of shared memory, which another process can map without a copy. One thread
  reserves the arrays. The memory lives as long as an array in it, or the arena.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from gracepoint import machine
from gracepoint.async_calls.handover import Block
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, GracepointError, SaveFailed
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import DaemonThread, NoThread

logger = logging.getLogger(__name__)

# The answer names at most this many processes, so that it stays small in a large gang.
_SHOWN = 64
# Seconds to wait for the other processes to reach this point. Their first step may take so much longer.
_MEETING_TIMEOUT_S = 900.0

_WHAT_TO_DO_TO_SEND = "leave them out (checkpoint.memory)"
_WHAT_TO_DO = (
    "give the container more memory, or raise the limit, or spread the state over more processes, or save without a "
    "copy (no periodic saves)"
)


@contextlib.contextmanager
def reporting_errors(gang: ProcessGroup, key: str) -> Iterator[None]:
    """Reports any error that leaves the block to the other processes, which wait for ``key`` now or later."""
    try:
        yield
    except BaseException as error:
        try:
            gang.fail(key, error)
        except GracepointError as unreachable:
            logger.warning("could not notify the other processes of an error: %s", unreachable)
        raise


def check_fits(
    needed_bytes: int,
    limit_bytes: int | None,
    *,
    gang: ProcessGroup,
    key: str,
    free_memory: Callable[[], Mapping[str, int]],
    held_bytes: int = 0,
    sends: bool = False,
) -> None:
    """Checks that the snapshots of all processes fit into memory. The result is the same in all processes. Collective.

    Args:
        needed_bytes: Host memory in bytes that this process needs.
        limit_bytes: The setting ``host_memory_limit_bytes`` of this process. None: no limit.
        gang: The processes of the job.
        key: Prefix of the keys under which the processes exchange values.
        free_memory: Returns the available bytes of each memory pool, by a name that processes sharing the pool have in
            common. It is called after all processes have released the memory that they held.
        held_bytes: What other snapshots of this process hold of the limit.
        sends: Whether the snapshots are sent to the memory of nodes, and not written to storage.

    Raises:
        CheckpointError: The snapshots do not fit. The message says what to do.
        BarrierError: Another process did not arrive in time, or has failed.
    """
    here = gang.process_index
    gang.barrier(f"{key}/needed", timeout_s=_MEETING_TIMEOUT_S)  # all have released what they held
    message = json.dumps([needed_bytes, limit_bytes, dict(free_memory()), held_bytes])
    problems = json.loads(gang.reduce(f"{key}/left", message, _problems, timeout_s=_MEETING_TIMEOUT_S))
    if problems:
        process, size_bytes, problem = next((entry for entry in problems if entry[0] == here), problems[0])
        where = "this process" if process == here else f"process {process}"
        needs, what_to_do = "a save in the background needs", _WHAT_TO_DO
        if sends:
            needs, what_to_do = "snapshots in the memory of nodes need", f"{_WHAT_TO_DO_TO_SEND}, {_WHAT_TO_DO}"
        raise CheckpointError(
            f"{needs} {size_bytes} bytes of host memory in {where} for a snapshot of its part of the state, and "
            f"{problem}: {what_to_do}"
        )


def _problems(needs_of_all: list[str]) -> str:
    """Returns the first processes whose snapshots do not fit, each with its need and the reason, as JSON."""
    needs = [json.loads(text) for text in needs_of_all]
    pools: dict[str, dict[int, int]] = {}  # by pool: the available bytes that each process has seen
    for process, (_, _, free, _) in enumerate(needs):
        for pool, left_bytes in free.items():
            pools.setdefault(pool, {})[process] = left_bytes
    problems: dict[int, str] = {}
    for process, (size_bytes, most_bytes, _, held_bytes) in enumerate(needs):
        if most_bytes is not None and size_bytes + held_bytes > most_bytes:
            beside = f", of which saves use {held_bytes}" if held_bytes else ""
            problems[process] = f"host_memory_limit_bytes allows {most_bytes}{beside}"
    for users in pools.values():
        together_bytes, left_bytes = sum(needs[process][0] for process in users), min(users.values())
        if together_bytes <= left_bytes:
            continue
        others = ", ".join(map(str, users))
        alone = f"this process can still have {left_bytes}"
        shared = f"processes {others} share a machine or container, need {together_bytes} and can have {left_bytes}"
        problems |= dict.fromkeys(users, alone if len(users) == 1 else shared)
    shortages = [[process, needs[process][0], problems[process]] for process in sorted(problems)]
    return json.dumps(shortages[:_SHOWN])


#: More threads would only compete for the memory bandwidth.
MAX_THREADS = 8
# Bytes per thread that make another thread worthwhile. Also the largest single copy, so that all threads end at about
# the same time.
_BLOCK_BYTES = 8 << 20
# Copies up to this size are not worth handing to a thread.
_SMALL_BYTES = 256 << 10
_ZERO = np.zeros(1, np.uint8)

_Job = tuple[npt.NDArray[Any], npt.NDArray[Any]]


#: How the generation of a snapshot is stored: the number of its filling.
GENERATION = np.dtype(np.int64)


def check_generation(expected: int, actual: int) -> None:
    """Raises SaveFailed if a save finds another generation in the memory than the one whose values it writes."""
    if actual != expected:
        raise SaveFailed(
            f"the snapshot's memory has generation {actual}, and this save writes generation {expected}: the memory "
            "was filled again meanwhile, and what was written may be of both. It is not committed. This is a defect of "
            "Gracepoint: please report it"
        )


class MemoryUser(Protocol):
    """Threads, or another process, that read or write memory which is to be used again."""

    def end(self, timeout_s: float) -> bool:
        """Ends what an interrupted caller has left behind, and returns whether nothing uses the memory any more.

        Waits for ``timeout_s`` seconds at most. May be called again.
        """


class Copies:
    """A context manager for copies. When it exits, all copies are complete; it raises the first error of a copy."""

    def __init__(self, max_threads: int | None = None) -> None:
        """Sets the number of threads, which includes the caller's. No thread starts yet.

        There are at most ``MAX_THREADS``. If ``max_threads`` is None, half as many threads as cores are used. The job's
        other processes on this host save at the same time, and more threads than cores only displace the caller while
        it adds copies.
        """
        cores = machine.available_cores()
        self._helpers = min(MAX_THREADS, max(1, cores // 2) if max_threads is None else max_threads) - 1
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[DaemonThread] = []
        self._queued_bytes = 0
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def add(self, values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
        """Adds a copy. ``values`` must not change until the context exits. Small values are copied at once.

        Args:
            values: The values to copy, in any memory order, of any type that can be cast.
            into: The memory to copy into, in C order.
        """
        if values.nbytes <= _SMALL_BYTES:
            copy(values, into)
            return
        self._expect(values.nbytes)
        if values.dtype != into.dtype or not values.flags.c_contiguous:
            self._jobs.put((values, into))
            return
        source, target = _flat(values), _flat(into)
        for start in range(0, values.nbytes, _BLOCK_BYTES):
            self._jobs.put((source[start : start + _BLOCK_BYTES], target[start : start + _BLOCK_BYTES]))

    def zero(self, into: npt.NDArray[Any]) -> None:
        """Adds the first touch of memory: it is filled with zeros. ``into`` is in C order."""
        self._expect(into.nbytes)
        target = _flat(into)
        for start in range(0, into.nbytes, _BLOCK_BYTES):
            self._jobs.put((_ZERO, target[start : start + _BLOCK_BYTES]))

    def _expect(self, size_bytes: int) -> None:
        """Starts another thread if there is enough to copy."""
        self._queued_bytes += size_bytes
        if len(self._threads) >= min(self._helpers, self._queued_bytes // _BLOCK_BYTES):
            return
        thread = DaemonThread(self._help, "gracepoint: copying")
        self._threads.append(thread)  # before the start, which may be interrupted
        try:
            thread.start()
        except NoThread as error:  # a limit on threads, or no memory for their stacks
            self._threads.pop()
            started = len(self._threads)
            logger.warning("values are copied in %d threads and not %d: %s", started + 1, self._helpers + 1, error)
            self._helpers = started

    def __exit__(self, *error: object) -> None:
        for _ in range(len(self._threads) + 1):
            self._jobs.put(None)
        self._help()
        for thread in self._threads:
            thread.wait()
        if self._error is not None:
            raise self._error

    def end(self, timeout_s: float) -> bool:
        """As ``MemoryUser``. Copies that were not begun are dropped."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._jobs.put(None)
        return all(thread.wait(timeout_s) for thread in self._threads)

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                copy(*job)
            except BaseException as error:  # noqa: BLE001 - raised when the context exits
                self._error = self._error or error


def copy(values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
    """Copies ``values`` into ``into``, which is in C order, and casts them to its type."""
    if values.dtype == into.dtype and values.flags.c_contiguous:
        np.copyto(_flat(into), _flat(values))  # as bytes: numpy copies types like bfloat16 one by one
        return
    with np.errstate(all="ignore"):  # values out of range of the type are converted: the cast was asked for
        np.copyto(into, values, casting="unsafe")


def _flat(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


class ArrayBytes:
    """The stored bytes of one array. Several threads may use it.

    Attributes:
        in_place: A view of all bytes. None if the values are in another order or type in memory.
    """

    def __init__(self, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
        """``dtype`` is the type that is stored."""
        self._values = values
        self._dtype = dtype
        self._size_bytes = values.size * dtype.itemsize
        as_stored = values.dtype == dtype and values.flags.c_contiguous
        self.in_place: npt.NDArray[np.uint8] | None = values.reshape(-1).view(np.uint8) if as_stored else None

    def __len__(self) -> int:
        return self._size_bytes

    def copy(self, start: int, into: npt.NDArray[np.uint8]) -> None:
        """Fills ``into`` with the bytes from ``start`` on. The range must begin and end at boundaries of values."""
        if self.in_place is not None:
            np.copyto(into, self.in_place[start : start + len(into)])  # releases the GIL
        else:
            _copy(self._values, start // self._dtype.itemsize, into.view(self._dtype))


def bytes_of(data: bytes) -> ArrayBytes:
    """Returns ``data`` in the form that stores write."""
    return ArrayBytes(np.asarray(memoryview(data)), np.dtype(np.uint8))


def stored_values(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns ``values`` as ``dtype`` in C order: the same object if possible, else a copy."""
    if values.dtype == dtype and values.flags.c_contiguous:
        return values
    stored = np.empty(values.shape, dtype)
    copy(values, stored)
    return stored


def _copy(values: npt.NDArray[Any], start: int, into: npt.NDArray[Any]) -> None:
    """Fills ``into``, which is flat, with the values from ``start`` on in C order. Copies whole rows at once."""
    if values.ndim < 2:
        copy(values.reshape(-1)[start : start + into.size], into)
        return
    row_size, copied = math.prod(values.shape[1:]), 0
    while copied < into.size:
        row, skipped = divmod(start + copied, row_size)
        rows = 0 if skipped else (into.size - copied) // row_size
        if rows:
            size = rows * row_size
            copy(values[row : row + rows], into[copied : copied + size].reshape(rows, *values.shape[1:]))
        else:
            size = min(row_size - skipped, into.size - copied)
            _copy(values[row], skipped, into[copied : copied + size])
        copied += size


class ByteLimiter:
    """At most ``max_bytes`` are taken at any time, unless one operation alone needs more. None: no bound."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self._taken = 0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def take(self, size_bytes: int, deadline: Deadline) -> bool:
        """Waits for room and takes it. Returns False and takes nothing if there was no room before the deadline."""
        if self.max_bytes is None:
            return True
        with self._lock:
            if not deadline.wait_for(self._changed, lambda: self._has_room(size_bytes)):
                return False
            self._taken += size_bytes
            return True

    def take_if_room(self, size_bytes: int) -> bool:
        """Takes room without waiting. Returns False and takes nothing if there is none."""
        if self.max_bytes is None:
            return True
        with self._lock:
            if not self._has_room(size_bytes):
                return False
            self._taken += size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        if self.max_bytes is None:
            return
        with self._lock:
            self._taken -= size_bytes
            self._changed.notify_all()

    def _has_room(self, size_bytes: int) -> bool:
        assert self.max_bytes is not None
        return self._taken == 0 or self._taken + size_bytes <= self.max_bytes


#: JAX's CPU backend uses host memory with this alignment without copying it.
JAX_ALIGNMENT_BYTES = 64


def padded(size_bytes: int, alignment_bytes: int) -> int:
    """Returns ``size_bytes`` rounded up to a multiple of ``alignment_bytes``."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def aligned_empty(
    shape: Sequence[int], dtype: np.dtype[Any], alignment_bytes: int = JAX_ALIGNMENT_BYTES
) -> npt.NDArray[Any]:
    """Returns an array of undefined values whose address is a multiple of ``alignment_bytes``."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + alignment_bytes, np.uint8)
    start = -memory.ctypes.data % alignment_bytes
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


class SharedArena:
    """Shared memory of ``size_bytes`` in which arrays are reserved. ``room_for`` says how much an array needs.

    Attributes:
        block: The memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.block = Block(max(1, size_bytes))
        self._memory = np.frombuffer(self.block.memory, np.uint8)
        self._used_bytes = 0

    @staticmethod
    def room_for(size_bytes: int, alignment_bytes: int = JAX_ALIGNMENT_BYTES) -> int:
        """Returns the bytes that an array of ``size_bytes`` takes at most."""
        return size_bytes + alignment_bytes

    def empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], alignment_bytes: int = JAX_ALIGNMENT_BYTES
    ) -> npt.NDArray[Any]:
        """Returns an array of undefined values whose address is a multiple of ``alignment_bytes``."""
        start = padded(self._used_bytes, alignment_bytes)
        self._used_bytes = start + math.prod(shape) * dtype.itemsize
        return array_at(self._memory, start, shape, dtype)

    def offset_of(self, array: npt.NDArray[Any]) -> int:
        """Returns where an array of this arena begins in the memory."""
        return int(array.ctypes.data - self._memory.ctypes.data)


def array_at(
    memory: npt.NDArray[np.uint8], offset: int, shape: Sequence[int], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Returns the array that begins at ``offset`` of ``memory``."""
    size_bytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size_bytes].view(dtype).reshape(shape)
