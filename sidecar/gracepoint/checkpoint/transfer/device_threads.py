"""Runs one thread for each device, so that the values of all devices are on their way to the host at once.

Each thread advances one iterator. The calling thread yields the values of all of them, in the order in which they come.
The threads start when the first value is asked for. They end with their iterators, with the first error of one of them,
when the caller stops, or when the deadline passes. A thread that waits for a device cannot be interrupted.

If there is only one iterator, the calling thread advances it.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Generic, TypeVar

from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Makes an iterator. Its waits must end with the deadline that it gets.
Make = Callable[[Deadline], Iterator[T]]


def merged(makes: Sequence[Make[T]], deadline: Deadline, *, join: bool) -> Generator[T, None, None]:
    """Yields what all iterators yield.

    Args:
        makes: One function for each device.
        deadline: When all must have ended.
        join: Whether to wait for the threads even if the iteration fails or stops. Needed if they write to memory that
            is used again. The wait has no timeout: a thread that must stop waits for nothing but its device.

    Raises:
        SaveFailed: The deadline passed, or was cancelled.
        BaseException: The first error of an iterator.
    """
    if len(makes) == 1:
        yield from makes[0](deadline)
        return
    merging = _Merging[T](deadline)
    threads = [
        threading.Thread(target=merging.advance, args=(make,), name=f"gracepoint: device {number}", daemon=True)
        for number, make in enumerate(makes)
    ]
    begun = []
    try:
        for number, thread in enumerate(threads):
            try:
                thread.start()
            except RuntimeError as error:  # a limit on threads, or no memory for their stacks
                logger.warning("values of %d devices are copied by one thread: %s", len(makes) - number, error)
                for make in makes[number:]:
                    yield from make(merging.deadline)
                break
            begun.append(thread)
        yield from merging.values(len(begun))
    finally:
        merging.stop()
        if join:
            # A deadline here would let a thread write to memory that is used again. Each thread ends with the transfer
            # under way. If the device hangs, only the end of the process ends the wait.
            for thread in begun:
                thread.join()


class _Merging(Generic[T]):
    """What the threads of one call have in common.

    Attributes:
        deadline: Ends with the caller's deadline, or when the threads must stop.
    """

    def __init__(self, deadline: Deadline) -> None:
        self.deadline = Deadline.following(deadline.remaining_s, deadline.clock)
        self._callers = deadline
        self._values: collections.deque[T] = collections.deque()
        self._ended = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # protects the three above

    def advance(self, make: Make[T]) -> None:
        """Runs in each thread."""
        error = None
        try:
            for value in make(self.deadline):
                with self._changed:
                    if self.deadline.cancelled:
                        return
                    self._values.append(value)
                    self._changed.notify()
                del value  # it may hold much memory, and the next one may have to wait for room
        except BaseException as raised:  # noqa: BLE001 - raised by the calling thread
            error = raised
        finally:
            with self._changed:
                self._error = self._error or error
                self._ended += 1
                self._changed.notify()

    def values(self, threads: int) -> Iterator[T]:
        """Yields the values until all threads have ended."""
        while True:
            with self._changed:
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
