"""Runs one thread for each device, so that the values of all devices are on their way to the host at once.

Each thread advances one iterator. The calling thread yields the values of all of them, in the order in which they come.
The threads start when the first value is asked for. They end with their iterators, with the first error of one of them,
when the caller stops, or when the deadline passes. A thread that waits for a device cannot be interrupted. If a signal
handler's exception leaves the calling thread's wait, threads may still run. So whoever lends them memory hears of them
before they start (``lend``), and asks them whether they have ended.

If there is only one iterator, the calling thread advances it.
"""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, TypeVar

from gracepoint.checkpoint.memory.parallel_copy import MemoryUser
from gracepoint.daemon_thread import DaemonThread
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

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
        begun = merging.begin()
        if begun < len(makes):
            for make in makes[begun:]:
                yield from make(merging.deadline)
        yield from merging.values(begun)
    finally:
        merging.stop()
        if lend is not None:
            # A deadline here would let a thread write to memory that is used again. Each thread ends with the transfer
            # under way. If the device hangs, only the end of the process ends the wait.
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
            except RuntimeError as error:  # a limit on threads, or no memory for their stacks
                left = len(self._threads) - number
                logger.warning("values of %d devices are copied by one thread: %s", left, error)
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
                    left = threads - self._ended
                    raise SaveFailed(f"the values of {left} devices were not copied {self._callers.ended}")
                if not self._values:
                    return
                value = self._values.popleft()
            yield value
            del value

    def stop(self) -> None:
        self.deadline.cancel("the save goes on without them, or has failed")
