"""Copies host memory in several threads, as one alone does not reach what the memory can do.

The caller tells of copies, and takes part in them at the end. The threads live from the first copies that are large
enough to be worth them until then, and copy whatever is next. They touch memory only, so that nothing bounds how long
they are waited for. Python's lock is free while bytes are copied.
"""

from __future__ import annotations

import queue
import threading
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from gracepoint import machine

#: More would only wait for each other at the memory.
MAX_THREADS = 8
# What is worth another thread; also the most that is copied at once, so that all end at about the same time.
_BLOCK_BYTES = 8 << 20
# What is not worth being handed over.
_SMALL_BYTES = 256 << 10

_Job = tuple[npt.NDArray[Any], npt.NDArray[Any]]


class Copies:
    """A context that everything is copied in at its end, which raises the first error of a copy."""

    def __init__(self, max_threads: int | None = None) -> None:
        """Starts no thread yet; at most ``max_threads`` with the caller's.

        None: half as many as there are cores, as the job's other processes on this host save at the same time, and more
        threads than cores only take the caller's place while it hands out copies.
        """
        cores = machine.available_cores()
        self._helpers = min(MAX_THREADS, max(1, cores // 2) if max_threads is None else max_threads) - 1
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._queued_bytes = 0
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def add(self, values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
        """Copies ``values``; they must not change until the end. Small ones are copied at once.

        Args:
            values: Of any memory order, and any type that can be cast.
            into: In C order.
        """
        if values.nbytes <= _SMALL_BYTES:
            copy(values, into)
            return
        self._queued_bytes += values.nbytes
        if len(self._threads) < min(self._helpers, self._queued_bytes // _BLOCK_BYTES):
            self._threads.append(threading.Thread(target=self._help, name="gracepoint: copying", daemon=True))
            self._threads[-1].start()
        if values.dtype != into.dtype or not values.flags.c_contiguous:
            self._jobs.put((values, into))
            return
        source, target = _flat(values), _flat(into)
        for start in range(0, values.nbytes, _BLOCK_BYTES):
            self._jobs.put((source[start : start + _BLOCK_BYTES], target[start : start + _BLOCK_BYTES]))

    def __exit__(self, *error: object) -> None:
        for _ in range(len(self._threads) + 1):
            self._jobs.put(None)
        self._help()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _help(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                copy(*job)
            except BaseException as error:  # noqa: BLE001 - raised at the end
                self._error = self._error or error


def copy(values: npt.NDArray[Any], into: npt.NDArray[Any]) -> None:
    """Copies ``values`` into memory in C order, as its type."""
    if values.dtype == into.dtype and values.flags.c_contiguous:
        np.copyto(_flat(into), _flat(values))  # bytes, as numpy copies types like bfloat16 one by one
        return
    with np.errstate(all="ignore"):  # what does not fit the type becomes what the type has for it: that was asked for
        np.copyto(into, values, casting="unsafe")


def _flat(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
