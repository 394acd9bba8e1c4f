"""Reads compiled programs from the store, many at once and before they are asked for.

``prefetch`` runs in one thread of its caller and in helpers that end with it. The threads that compile call ``read``.
If the file is being read already, ``read`` waits for that. For any other file it starts a daemon thread ("gracepoint:
reads a program"), so that a store that hangs does not keep the caller longer than the timeout. ``_lock`` guards the
dict of files. Each ``_ProgramFile`` is written by the one thread that reads it, before its event is set.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable

from gracepoint.checkpoint.storage import backend
from gracepoint.checkpoint.storage.objects import requests
from gracepoint.checkpoint.storage.storage_path import StoragePath

_AT_ONCE = 16


class _ProgramFile:
    """A file that is being read, or was read. When ``done`` is set, it has either ``data`` or ``error``."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.data: bytes | None = None
        self.error: Exception | None = None


class ProgramDownloads:
    """See the module.

    Args:
        timeout_s: Seconds that reading a file may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._files: dict[StoragePath, _ProgramFile] = {}

    def prefetch(self, paths: Iterable[StoragePath]) -> None:
        """Reads files, and keeps their bytes until ``read`` or ``forget`` is called. Never raises."""
        requests.run([functools.partial(self._prefetch, path) for path in paths], threads=_AT_ONCE)

    def read(self, path: StoragePath) -> bytes:
        """Returns the bytes of a file.

        Raises:
            FileNotFoundError: The file does not exist.
            TimeoutError: The store did not return it in time.
            OSError: The file cannot be read.
            RuntimeError: The system has no more threads.
        """
        file, is_new = self._file(path)
        if is_new:
            thread = threading.Thread(
                target=self._read, args=(path, file), name="gracepoint: reads a program", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # also raised to those who wait for this file
                file.error = error
                file.done.set()
            except BaseException:  # a signal handler's: the thread may never run, and the next to ask starts another
                with self._lock:
                    self._files.pop(path, None)
                raise
        if not file.done.wait(self._timeout_s):
            raise TimeoutError(f"the store did not return it within {self._timeout_s:g} s")
        with self._lock:
            if self._files.get(path) is file:
                del self._files[path]
        if file.error is not None:
            raise file.error
        assert file.data is not None
        return file.data

    def forget(self) -> None:
        """Drops the bytes that nobody asked for."""
        with self._lock:
            self._files.clear()

    def _prefetch(self, path: StoragePath) -> None:
        file, is_new = self._file(path)
        if is_new:
            self._read(path, file)

    def _file(self, path: StoragePath) -> tuple[_ProgramFile, bool]:
        with self._lock:
            found = self._files.get(path)
            if found is not None:
                return found, False
            self._files[path] = made = _ProgramFile()
            return made, True

    def _read(self, path: StoragePath, file: _ProgramFile) -> None:
        until_s = time.monotonic() + self._timeout_s

        def go_on() -> None:
            if time.monotonic() > until_s:
                raise TimeoutError(f"the store did not return it within {self._timeout_s:g} s")

        try:
            with backend.ended_by(go_on):
                file.data = path.read_bytes()
        except Exception as error:  # noqa: BLE001 - raised by read
            file.error = error
        finally:
            file.done.set()
