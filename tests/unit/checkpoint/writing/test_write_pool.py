"""The threads of a save: who syncs, how many files are open meanwhile, and that nothing is left open."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.buffers import Buffer
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.writing.pool import _MOST_UNSYNCED, _WAITING_BYTES, SYNCERS, THREADS, Finish, WritePool
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from tests.waiting import until, until_no_thread

_TIMEOUT_S = 60.0


class Disk:
    """``os.fsync`` waits here until it is let through.

    Attributes:
        asked: How often it was called.
        goes_on: Lets all calls through.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self.goes_on = threading.Event()
        self._lock = threading.Lock()
        self._real = os.fsync
        monkeypatch.setattr(os, "fsync", self._sync)

    def _sync(self, descriptor: int) -> None:
        with self._lock:
            self.asked += 1
        assert self.goes_on.wait(_TIMEOUT_S)
        self._real(descriptor)


class Files:
    """Files that a pool writes.

    Attributes:
        written: How many are written.
        synced: How many are synced and reported.
    """

    def __init__(self, folder: Path, pool: WritePool) -> None:
        self._folder = folder
        self._pool = pool
        self._lock = threading.Lock()
        self._made = 0
        self.written = 0
        self.synced = 0

    def add(self) -> None:
        self._made += 1
        path = PosixPath(str(self._folder / str(self._made)))

        def act(buffer: Buffer) -> Finish:
            data = ArrayBytes(np.ones(10, np.uint8), np.dtype(np.uint8))
            files: list[Any] = []
            path.write_large(data, buffer, lambda: None, direct=False, later=files.append)
            with self._lock:
                self.written += 1
            return Finish(files[0], self._reported)

        self._pool.add(10, act)

    def _reported(self) -> None:
        with self._lock:
            self.synced += 1


def pool_of(folder: Path) -> WritePool:
    return WritePool([], None, storage_path(folder), Deadline.after(_TIMEOUT_S, time.monotonic))


def open_files(folder: Path) -> int:
    """How many files of the folder this process has open. Threads of other tests may have others."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            found += Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(folder)
    return found


def test_files_are_written_while_others_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, pool = Disk(monkeypatch), pool_of(tmp_path)
    files = Files(tmp_path, pool)
    pool.begin()
    try:
        for _ in range(2 * THREADS):
            files.add()
        until(lambda: files.written == 2 * THREADS, "all files to be written")
        assert files.synced == 0
        disk.goes_on.set()
        pool.wait()
        assert files.synced == disk.asked == 2 * THREADS
    finally:
        disk.goes_on.set()
        pool.close()
        pool.join()


def test_only_so_many_files_are_open_and_unsynced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, pool = Disk(monkeypatch), pool_of(tmp_path)
    files = Files(tmp_path, pool)
    pool.begin()
    try:
        most = _MOST_UNSYNCED + SYNCERS + THREADS  # those that wait, and those that a thread is syncing
        for _ in range(most):
            files.add()
        until(lambda: disk.asked == SYNCERS + THREADS, "all threads to sync")
        for _ in range(THREADS):
            files.add()  # which no thread takes
        # A writer may have begun to sync just before a syncer took a file from those that wait.
        assert most - SYNCERS <= files.written <= most
        assert open_files(tmp_path) == files.written
        disk.goes_on.set()
        pool.wait()
        assert files.synced == most + THREADS
    finally:
        disk.goes_on.set()
        pool.close()
        pool.join()
    assert open_files(tmp_path) == 0


def test_files_that_wait_for_a_writer_hold_few_bytes(tmp_path: Path) -> None:
    """They may be copies from a device, and the memory of the host is not much larger than a device's."""
    pool, goes_on, begun = pool_of(tmp_path), threading.Event(), threading.Semaphore(0)

    def act(_: Buffer) -> None:
        begun.release()
        assert goes_on.wait(_TIMEOUT_S)

    pool.begin()
    try:
        for _ in range(THREADS):
            pool.add(1, act)
            assert begun.acquire(timeout=_TIMEOUT_S)
        pool.add(_WAITING_BYTES - 10, act)  # no writer is left for it
        pool.add(10, act)
        late = threading.Thread(target=pool.add, args=(1, act), daemon=True)
        late.start()
        late.join(0.1)
        assert late.is_alive(), "it waits until a writer takes another file"
        goes_on.set()
        late.join(_TIMEOUT_S)
        pool.wait()
        pool.add(2 * _WAITING_BYTES, act)  # nothing waits: a file of any size may
        pool.wait()
    finally:
        goes_on.set()
        pool.close()
        pool.join()


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_a_save_that_stops_leaves_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    deadline = Deadline.after(_TIMEOUT_S, time.monotonic)
    disk = Disk(monkeypatch)
    pool = WritePool([], None, storage_path(tmp_path), deadline)
    files = Files(tmp_path, pool)
    pool.begin()
    for _ in range(3 * THREADS):
        files.add()
    until(lambda: files.written == 3 * THREADS, "all files to be written")
    until(lambda: disk.asked == SYNCERS, "each syncer to have a file")
    if how == "cancelled":
        deadline.cancel("the step can be saved instead")
        with pytest.raises(SaveFailed, match="the step can be saved instead"):
            pool.wait()
    pool.close()
    until(lambda: open_files(tmp_path) == SYNCERS, "the files that no thread syncs to be closed")
    disk.goes_on.set()
    for name in ("gracepoint: writes", "gracepoint: syncs"):
        until_no_thread(name)
    assert open_files(tmp_path) == 0
    assert disk.asked <= SYNCERS


def test_a_file_that_cannot_be_synced_fails_the_save_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    pool = pool_of(tmp_path)
    files = Files(tmp_path, pool)
    monkeypatch.setattr(os, "fsync", fails)
    pool.begin()
    try:
        with pytest.raises(OSError, match=rf"Input/output error: '{tmp_path}/\d+'"):
            _write_all(files, pool)
    finally:
        pool.close()
        pool.join()
    assert files.synced == 0
    assert open_files(tmp_path) == 0


def _write_all(files: Files, pool: WritePool) -> None:
    for _ in range(100):
        files.add()
    pool.wait()
