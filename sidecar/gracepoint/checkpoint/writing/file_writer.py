"""Writes chunks whose files hold exactly the bytes of their values, at the speed of the storage, without TensorStore.

The calling thread hands out files to the threads of a ``WriteCrew``, which is made for one save. Each thread writes one
file at a time, straight from the memory of the arrays. It computes the checksum while it writes, and syncs the file.
So all cores are in use, no core waits for the disk, and the only extra memory is the buffers of the threads.

``reserve`` allocates and touches the buffers. Otherwise a buffer is allocated for the first values that cannot be
written in place. Buffers are kept from one save to the next.

A crew ends with its save. Its threads check the deadline before each block. A thread that is stuck in the kernel keeps
its buffer, and is waited for only until the deadline.

Files have their final names at once: the folder belongs to this save alone, and nothing in it counts before the
done-record exists.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.manifest import StoredFile
from gracepoint.checkpoint.memory.array_bytes import ArrayBytes
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning.write_plan import Chunk
from gracepoint.checkpoint.storage.direct_io import Buffer, checksum_of
from gracepoint.checkpoint.storage.storage_path import StoragePath, sync_folders
from gracepoint.checkpoint.writing.write_job import WriteJob, WrittenFiles
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


class FileWriter:
    """Writes files, one save at a time. Keeps buffers between saves."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._buffers: list[Buffer] = []  # that no thread uses
        self._direct: dict[int, bool] = {}  # by file system

    def reserve(self, folder: StoragePath) -> None:
        """Prepares for saves into ``folder``: finds out whether it has direct I/O, and allocates the buffers.

        Raises:
            OSError: Nothing can be written there.
        """
        if self._has_direct_io(folder):
            self._buffers += [Buffer() for _ in range(threads_for(folder) - len(self._buffers))]
            for buffer in self._buffers:
                buffer.make_ready()

    def write(self, job: WriteJob, deadline: Deadline) -> WrittenFiles:
        """Makes all files of ``job`` durable.

        Raises:
            SaveFailed: The deadline passed, or was cancelled.
            OSError: A file cannot be written. The message names it.
        """
        written = WrittenFiles()
        crew = WriteCrew(self._buffers, self._options.write_limit_bytes, job.folder, deadline)
        folders = Folders(job.folder, direct=self._has_direct_io(job.folder))
        chunk_bytes = 0
        try:
            crew.begin()
            for path, data in job.small_files.items():
                crew.add(0, functools.partial(write_file, folders, path, bytes_of(data), written, crew))
            for leaf in job.arrays:
                spec = job.specs[leaf]
                path, data = layout.in_item(job.item, spec.metadata_file), json.dumps(spec.metadata).encode()
                crew.add(0, functools.partial(write_file, folders, path, bytes_of(data), written, crew))
            for chunk, values in job.source.chunks(deadline):
                act = functools.partial(_write_chunk, folders, job, chunk, values, written, crew)
                size_bytes = chunk.bytes if chunk.mine else 0
                crew.add(size_bytes, act)
                chunk_bytes += size_bytes
            crew.wait()
            for folder in folders.made:
                crew.add(0, functools.partial(_sync, folder))
            crew.wait()
        finally:
            crew.close()
        crew.join()
        return dataclasses.replace(written, chunk_bytes=chunk_bytes)

    def _has_direct_io(self, folder: StoragePath) -> bool:
        device = folder.volume()
        if device not in self._direct:
            self._direct[device] = folder.has_direct_io()
        return self._direct[device]


class Folders:
    """The folders of one save. Any thread makes them when they are needed.

    Attributes:
        direct: True if their file system has direct I/O.
    """

    def __init__(self, top: StoragePath, *, direct: bool) -> None:
        self._top = top
        self.direct = direct
        self.made = {top, top.parent}  # the parent has the entry of the top folder

    def place(self, path: str) -> StoragePath:
        """Returns the location of ``path``. Makes its folder if that does not exist."""
        place = self._top / path
        if place.parent not in self.made:
            place.parent.make_folder()
            self.made.update(place.folders_up_to(self._top))
        return place


def bytes_of(data: bytes) -> ArrayBytes:
    """Returns ``data`` in the form that stores write."""
    return ArrayBytes(np.asarray(memoryview(data)), np.dtype(np.uint8))


def write_file(
    folders: Folders, path: str, data: ArrayBytes, written: WrittenFiles, crew: WriteCrew, buffer: Buffer
) -> None:
    """Writes one file at ``path`` below the save's folder, and adds it to ``written``."""
    place = folders.place(path)
    checksum = place.backend.write_large(place.key, data, buffer, crew.go_on, direct=folders.direct)
    written.files[path] = StoredFile(len(data), checksum)


def _write_chunk(
    folders: Folders,
    job: WriteJob,
    chunk: Chunk,
    values: npt.NDArray[Any],
    written: WrittenFiles,
    crew: WriteCrew,
    buffer: Buffer,
) -> None:
    path = layout.in_item(job.item, chunk.file)
    data = ArrayBytes(values, job.specs[chunk.leaf].numpy_dtype)
    if chunk.mine:
        write_file(folders, path, data, written, crew, buffer)
    else:
        written.copies[path] = checksum_of(data, buffer)
    job.source.written(chunk)


def _sync(folder: StoragePath, _: Buffer) -> None:
    sync_folders([folder])


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
