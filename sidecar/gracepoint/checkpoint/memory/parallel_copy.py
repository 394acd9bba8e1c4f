"""Copies host memory in several threads, as one thread alone does not reach the bandwidth of the memory.

The caller adds copies to a queue, and takes part in the copying at the end of the context. Additional threads start
once there is enough to copy for them, and end with the context. If the system does not allow more threads, those that
have started do the work. Each thread takes the next copy from the queue. The threads only access memory, so the wait
for them needs no timeout. If a signal handler's exception leaves the context, threads may still copy: ``end`` ends
them, before the memory is used again. The GIL is released while bytes are copied.
"""

from __future__ import annotations

import contextlib
import logging
import queue
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from gracepoint import machine
from gracepoint.daemon_thread import DaemonThread

logger = logging.getLogger(__name__)

#: More threads would only compete for the memory bandwidth.
MAX_THREADS = 8
# Bytes per thread that make another thread worthwhile. Also the largest single copy, so that all threads end at about
# the same time.
_BLOCK_BYTES = 8 << 20
# Copies up to this size are not worth handing to a thread.
_SMALL_BYTES = 256 << 10
_ZERO = np.zeros(1, np.uint8)

_Job = tuple[npt.NDArray[Any], npt.NDArray[Any]]


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
        except RuntimeError as error:  # a limit on threads, or no memory for their stacks
            self._threads.pop()
            begun = len(self._threads)
            logger.warning("values are copied in %d threads and not %d: %s", begun + 1, self._helpers + 1, error)
            self._helpers = begun

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
