"""The threads that write the files of one save.

The thread that makes a ``WriteCrew`` adds work, waits for it and closes the crew. The threads end with the save.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable

from gracepoint.checkpoint.storage.direct_io import Buffer
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

#: Threads of a save to a file system. There may be more than cores, as writers mostly wait for the disk.
THREADS = 8
#: Threads of a save to an object store, each with a connection. One connection has a small part of the bandwidth.
OBJECT_THREADS = 16
# Bounds on files that are handed out and not started. They keep all threads busy, and hold little memory if the values
# are copies from a device.
_WAITING_BYTES = 16 << 20
_WAITING_FILES = 64

Act = Callable[[Buffer], None]


def threads_for(folder: StoragePath) -> int:
    """Returns how many threads write a save, each with a buffer of its own."""
    return THREADS if folder.backend.renames else OBJECT_THREADS


class WriteCrew:
    """The threads of one save. The thread that calls ``FileWriter.write`` adds their work, waits for it and closes."""

    def __init__(self, buffers: list[Buffer], limit_bytes: int | None, folder: StoragePath, deadline: Deadline) -> None:
        """Each thread takes a buffer from ``buffers``, and puts it back at its end."""
        self._wanted = threads_for(folder)
        self._buffers = buffers
        self._limit_bytes = limit_bytes
        self._folder = folder
        self._deadline = deadline
        self._waiting: collections.deque[tuple[int, Act]] = collections.deque()
        self._waiting_bytes = self._unwritten_bytes = 0
        self._added = self._ended = 0
        self._closed = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()  # protects everything above
        self._has_work, self._has_room = threading.Condition(self._lock), threading.Condition(self._lock)
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """Starts as many threads as the system allows, up to the wanted number.

        If no thread can be started, the calling thread writes. Python 3.12 starts no threads once the interpreter is
        about to end.
        """
        for number in range(self._wanted):
            thread = threading.Thread(target=self._run, name=f"gracepoint: writes {number}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit on threads, or no memory for their stacks
                logger.warning("a save is written by %d threads and not %d: %s", number, self._wanted, error)
                return
            self._threads.append(thread)

    def add(self, size_bytes: int, act: Act) -> None:
        """Waits for room, and then has a thread call ``act`` with its buffer.

        Raises:
            SaveFailed: There was no room in time, or the save is stopped.
            BaseException: The error of an earlier call.
        """
        with self._lock:
            has_room = self._deadline.wait_for(self._has_room, lambda: self._may_wait(size_bytes))
            self._raise_error()
            if not has_room or self._deadline.passed():
                raise self._too_late()
            self._waiting.append((size_bytes, act))
            self._waiting_bytes += size_bytes
            self._unwritten_bytes += size_bytes
            self._added += 1
            self._has_work.notify()
        if not self._threads:
            self._run(wait=False)

    def wait(self) -> None:
        """Waits until all added calls have ended.

        Raises:
            SaveFailed: Not all of them ended in time.
            BaseException: The first error of a call.
        """
        with self._lock:
            in_time = self._deadline.wait_for(
                self._has_room, lambda: self._error is not None or self._ended == self._added
            )
            self._raise_error()
            if not in_time:
                raise self._too_late()

    def close(self) -> None:
        """Has the threads end. Calls that have not started are dropped."""
        with self._lock:
            self._closed = True
            self._has_work.notify_all()

    def join(self) -> None:
        """Waits for the threads to end, so that their buffers are free for the next save."""
        for thread in self._threads:
            thread.join(self._deadline.remaining_s())

    def go_on(self) -> None:
        """Raises SaveFailed if the threads must stop."""
        if self._closed or self._error is not None or self._deadline.passed():
            raise self._too_late()

    def _run(self, *, wait: bool = True) -> None:
        buffer = self._take_buffer()
        while (found := self._next(wait)) is not None:
            size_bytes, act = found
            error = None
            try:
                act(buffer)
            except BaseException as raised:  # noqa: BLE001 - raised by the calling thread
                error = raised
            del found, act  # frees the values, which may be copies from a device
            with self._lock:
                self._ended += 1
                self._unwritten_bytes -= size_bytes
                self._error = self._error or error
                self._has_room.notify_all()
        if len(self._buffers) < self._wanted:
            self._buffers.append(buffer)

    def _take_buffer(self) -> Buffer:
        try:
            return self._buffers.pop()
        except IndexError:
            return Buffer()  # none was reserved, or a stuck thread of an earlier save has it

    def _next(self, wait: bool) -> tuple[int, Act] | None:
        """Returns the next call; None if the thread must end. Without ``wait``, None also if there is no call now."""
        with self._lock:
            if wait:
                self._deadline.wait_for(
                    self._has_work, lambda: bool(self._waiting) or self._closed or self._error is not None
                )
            if self._closed or self._error is not None or not self._waiting:
                return None
            size_bytes, act = self._waiting.popleft()
            self._waiting_bytes -= size_bytes
            self._has_room.notify_all()
            return size_bytes, act

    def _may_wait(self, size_bytes: int) -> bool:
        if self._error is not None or self._added == self._ended:
            return True
        if self._limit_bytes is not None and self._unwritten_bytes + size_bytes > self._limit_bytes:
            return False
        if not self._waiting:
            return True
        return len(self._waiting) < _WAITING_FILES and self._waiting_bytes + size_bytes <= _WAITING_BYTES

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _too_late(self) -> SaveFailed:
        return SaveFailed(
            f"only {self._ended} of {self._added} files were written to {self._folder} {self._deadline.ended}"
        )
