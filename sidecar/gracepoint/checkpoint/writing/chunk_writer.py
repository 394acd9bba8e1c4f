"""Writes one process's chunks and small files of a save, in parallel and durably.

Chunks whose files hold exactly the bytes of their values are written here, at the speed of the storage and without
TensorStore (``FileWriter``). ``tensorstore_writer`` writes chunks that are compressed or kept in OCDBT.

The calling thread hands out files to the threads of a ``WritePool``, which is made for one save. Each writer writes one
file at a time, straight from the memory of the arrays, and computes the checksum while it writes. Other threads of the
pool sync the files. So all cores are in use, no core waits for the disk, the disk always has something to write, and
the only extra memory is the buffers of the writers.

``reserve`` allocates and touches the buffers. Otherwise a buffer is allocated for the first values that cannot be
written in place. Buffers are kept from one save to the next.

A pool ends with its save. Its threads check the deadline before each block. A thread that is stuck in the kernel keeps
its buffer, and is waited for only until the deadline.

Files have their final names at once: the folder belongs to this save alone, and nothing in it counts before the
done-record exists. Each file has one writer, so no file is locked.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk
from gracepoint.checkpoint.memory import ArrayBytes, bytes_of
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.buffers import Buffer, UnsyncedFile, checksum_of
from gracepoint.checkpoint.storage.storage_path import StoragePath, sync_folders
from gracepoint.checkpoint.writing.pool import (
    FAILED_ENDS_S,
    Finish,
    Folders,
    IdlePriority,
    WriteJob,
    WritePool,
    WrittenFiles,
    size_for,
)
from gracepoint.deadline import Deadline

if TYPE_CHECKING:
    from gracepoint.checkpoint.writing.tensorstore_writer import EncodedWriter, TensorStoreWriter


class ChunkWriter:
    """Writes below temporary folders, one save at a time. Keeps resources that saves share."""

    def __init__(self, options: WriteOptions = DEFAULT_OPTIONS) -> None:
        self.options = options
        self._express = FileWriter(options)

    # A worker process imports TensorStore only if a save needs it.

    @functools.cached_property
    def _tensorstore(self) -> TensorStoreWriter:
        from gracepoint.checkpoint.writing.tensorstore_writer import TensorStoreWriter

        return TensorStoreWriter(self.options)

    @functools.cached_property
    def _encoded(self) -> EncodedWriter:
        from gracepoint.checkpoint.writing.tensorstore_writer import EncodedWriter

        return EncodedWriter(self.options)

    def write(self, job: WriteJob, deadline: Deadline) -> WrittenFiles:
        """Makes the chunks, the arrays' metadata and the small files of ``job`` durable.

        Raises:
            SaveFailed: The deadline passed, or was cancelled.
            ValueError, OSError: A file cannot be written. The message names it.
        """
        return self._writer_of(job).write(job, deadline)

    def _writer_of(self, job: WriteJob) -> FileWriter | TensorStoreWriter | EncodedWriter:
        renames, holds_values = job.folder.renames, job.form.files_hold_values
        if holds_values and (self.options.express or not renames):
            return self._express
        return self._tensorstore if renames else self._encoded

    def warm(self, folder: StoragePath, deadline: Deadline) -> None:
        """Writes and removes a tiny array below ``folder`` with each writer that a save may use.

        So code is loaded, threads have run and memory is reserved before the first save.
        """
        folder.parent.check_usable()
        folder.make_folder()
        spec = ArraySpec("probe", "numpy", (1,), "<f4", (1,))
        job = WriteJob(folder, layout.NO_ITEM, {0: spec}, [0], _Probe(), {})
        try:
            if self.options.express:
                self._express.reserve(folder)
                self._express.write(job, deadline)
            (self._tensorstore if folder.renames else self._encoded).write(job, deadline)
        finally:
            undeleted.delete_folder(folder)


class _Probe:
    """The one chunk that ``warm`` writes."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        yield Chunk(0, "probe/0", ((0, 1),), mine=True, bytes=4), np.zeros(1, np.float32)

    def written(self, chunk: Chunk) -> None:
        pass


class FileWriter:
    """Writes files, one save at a time. Keeps buffers between saves."""

    def __init__(self, options: WriteOptions) -> None:
        self._options = options
        self._buffers: list[Buffer] = []  # that no thread uses
        self._direct: dict[int, bool] = {}  # by volume: whether it has direct I/O

    def reserve(self, folder: StoragePath) -> None:
        """Prepares for saves into ``folder``: finds out whether it has direct I/O, and allocates the buffers.

        Raises:
            OSError: Nothing can be written there.
        """
        if self._has_direct_io(folder):
            self._buffers += [Buffer() for _ in range(size_for(folder).writers - len(self._buffers))]
            for buffer in self._buffers:
                buffer.make_ready()

    def write(self, job: WriteJob, deadline: Deadline) -> WrittenFiles:
        """Makes all files of ``job`` durable.

        Raises:
            SaveFailed: The deadline passed, or was cancelled.
            OSError: A file cannot be written. The message names it.
        """
        written = WrittenFiles()
        idle_priority = None if job.is_urgent is None else IdlePriority(job.is_urgent)
        pool = WritePool(self._buffers, self._options.write_limit_bytes, job.folder, deadline, idle_priority)
        folders = Folders(job.folder, job.place, direct=self._has_direct_io(job.folder))
        chunk_bytes = 0
        try:
            pool.begin()
            for path, data in job.small_files.items():
                pool.add(0, functools.partial(_write_small, folders, path, data, written, pool))
            for leaf in job.arrays:
                spec = job.specs[leaf]
                path, data = layout.in_item(job.item, spec.metadata_file), json.dumps(spec.metadata).encode()
                pool.add(0, functools.partial(_write_small, folders, path, data, written, pool))
            for chunk, values in job.source.chunks(deadline):
                act = functools.partial(_write_chunk, folders, job, chunk, values, written, pool)
                size_bytes = chunk.bytes if chunk.mine else 0
                pool.add(size_bytes, act)
                chunk_bytes += size_bytes
            pool.wait()
            # After all files are made: the sync of a folder makes durable the names that the folder has then.
            for folder in folders.made:
                pool.add(0, functools.partial(_sync, folder))
            pool.wait()
        except BaseException:
            pool.close()
            pool.join(FAILED_ENDS_S)
            raise
        pool.close()
        pool.join()
        return dataclasses.replace(written, chunk_bytes=chunk_bytes)

    def _has_direct_io(self, folder: StoragePath) -> bool:
        device = folder.volume()
        if device not in self._direct:
            self._direct[device] = folder.has_direct_io()
        return self._direct[device]


def _write(
    folders: Folders,
    path: str,
    data: ArrayBytes,
    written: WrittenFiles,
    pool: WritePool,
    buffer: Buffer,
    then: Callable[[], None],
) -> Finish | None:
    """Writes one file. Calls ``then`` if the file is durable on return. Otherwise returns what is left to do."""
    unsynced: list[UnsyncedFile] = []
    written.files[path] = folders.write(path, data, buffer, pool.go_on, unsynced.append)
    if unsynced:
        return Finish(unsynced[0], then)
    then()
    return None


def _nothing() -> None:
    """Called after the sync of a small file. Only chunks are reported as written."""


def _write_small(
    folders: Folders, path: str, data: bytes, written: WrittenFiles, pool: WritePool, buffer: Buffer
) -> Finish | None:
    return _write(folders, path, bytes_of(data), written, pool, buffer, _nothing)


def _write_chunk(
    folders: Folders,
    job: WriteJob,
    chunk: Chunk,
    values: npt.NDArray[Any],
    written: WrittenFiles,
    pool: WritePool,
    buffer: Buffer,
) -> Finish | None:
    path = layout.in_item(job.item, chunk.file)
    data = ArrayBytes(values, job.specs[chunk.leaf].numpy_dtype)
    then = functools.partial(job.source.written, chunk)
    if chunk.mine:
        return _write(folders, path, data, written, pool, buffer, then)
    written.copies[path] = checksum_of(data, buffer, pool.go_on)
    then()
    return None


def _sync(folder: StoragePath, _: Buffer) -> None:
    sync_folders([folder])
