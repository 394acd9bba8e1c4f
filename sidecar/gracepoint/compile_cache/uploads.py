"""Writes compiled programs to the store in the background.

Any thread calls ``add``. Up to ``_THREADS`` daemon threads ("gracepoint: keeps programs") write, and end when nothing
is left to write. ``add`` starts another one. ``_changed`` guards all state. ``close`` waits for the threads, up to its
timeout. What is added later is not written. A store that hangs keeps no process from ending.

Each file appears in the store as a whole, or not at all.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.threads import DaemonThread

logger = logging.getLogger(__name__)

_THREADS = 4
#: Most bytes that wait to be written, or are being written. A program that does not fit in is not kept.
_WAITING_BYTES = 1 << 30
#: After this number of failures in a row, nothing more is written.
_FAILURES = 3


class ProgramUploads:
    """See the module.

    Args:
        on_idle: Called in one of the threads when nothing is left to write, with the number of bytes that were written
            since its last call. It must not raise.

    Attributes:
        written: Number of files that were written.
    """

    def __init__(self, on_idle: Callable[[int], None]) -> None:
        self._on_idle = on_idle
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: collections.deque[tuple[StoragePath, int, Callable[[], bytes]]] = collections.deque()
        self._waiting_bytes = 0
        self._threads: list[DaemonThread] = []  # each takes itself out when it finds nothing to do
        self._failures = 0  # in a row
        self._bytes = 0  # written since the last call of on_idle
        self._closed = False
        self._full = False
        self.written = 0

    def add(self, path: StoragePath, size_bytes: int, contents: Callable[[], bytes]) -> None:
        """Has a file written in the background, in place of one that has the name already.

        Args:
            path: The file.
            size_bytes: About the size of the file.
            contents: Returns the bytes of the file. Called in the background.
        """
        with self._lock:
            if self._closed:
                return
            if self._waiting_bytes + size_bytes > _WAITING_BYTES:
                if not self._full:
                    logger.warning(
                        "some compiled programs are not kept: the store takes them too slowly at %s", path.parent
                    )
                self._full = True
                return
            self._waiting.append((path, size_bytes, contents))
            self._waiting_bytes += size_bytes
            if self._running() < _THREADS:
                self._start_thread()

    def _running(self) -> int:
        """Returns how many threads there are. Those whose start was refused or interrupted never run."""
        self._threads = [thread for thread in self._threads if not thread.ended]
        return len(self._threads)

    def _start_thread(self) -> None:
        thread = DaemonThread(lambda: self._run(thread), "gracepoint: keeps programs")
        self._threads.append(thread)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter ends
            logger.debug("no thread could be started to keep compiled programs: %s", error)

    def close(self, timeout_s: float) -> None:
        """Waits until everything is written, or no thread writes. Nothing is added afterwards. Never raises."""
        with self._lock:
            self._closed = True
            # The threads end when nothing is left. If none of them could start, nobody writes what is left.
            if self._waiting and not self._running():
                self._start_thread()
            if not self._changed.wait_for(lambda: not self._running(), timeout_s) or self._waiting:
                logger.info("compiled programs not written in time count=%d", len(self._waiting) + self._running())
            self._waiting.clear()

    def _run(self, thread: DaemonThread) -> None:
        while (item := self._take(thread)) is not None:
            path, size_bytes, contents = item
            try:
                self._write(path, contents())
            except Exception as error:  # noqa: BLE001 - the training goes on without
                self._note_failure(path, error)
            finally:
                with self._lock:
                    self._waiting_bytes -= size_bytes

    def _take(self, thread: DaemonThread) -> tuple[StoragePath, int, Callable[[], bytes]] | None:
        """Returns what to write next. None if the thread must end. The last thread calls ``on_idle`` before it ends."""
        while True:
            with self._lock:
                if self._waiting:
                    return self._waiting.popleft()
                if self._running() > 1 or not self._bytes:
                    self._threads.remove(thread)
                    self._changed.notify_all()
                    return None
                written_bytes, self._bytes = self._bytes, 0
            self._on_idle(written_bytes)

    def _write(self, path: StoragePath, data: bytes) -> None:
        started_s = time.monotonic()
        try:
            path.put(data)
        except FileNotFoundError:
            path.parent.make_folder()
            path.put(data)
        logger.debug(
            "compiled program kept path=%s bytes=%d took_s=%.2f", path, len(data), time.monotonic() - started_s
        )
        with self._lock:
            self._failures = 0
            self._bytes += len(data)
            self.written += 1

    def _note_failure(self, path: StoragePath, error: Exception) -> None:
        with self._lock:
            self._failures += 1
            failures = self._failures
            if failures == _FAILURES:
                self._closed = True
                self._waiting.clear()
        if failures == 1:
            logger.warning("a compiled program is not kept, and the next start compiles it again: %s: %s", path, error)
        elif failures == _FAILURES:
            logger.warning(
                "compiled programs are no longer kept in this run, as the store does not take them: %s", error
            )
