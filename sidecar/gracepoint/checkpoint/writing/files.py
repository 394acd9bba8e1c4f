"""Writes chunks whose files hold exactly the bytes of their values, at the speed of the storage, without TensorStore.

The calling thread hands out files to the threads of a ``WritePool``, which is made for one save. Each writer writes one
file at a time, straight from the memory of the arrays, and computes the checksum while it writes. Other threads of the
pool sync the files. So all cores are in use, no core waits for the disk, the disk always has something to write, and
the only extra memory is the buffers of the writers.

``reserve`` allocates and touches the buffers. Otherwise a buffer is allocated for the first values that cannot be
written in place. Buffers are kept from one save to the next.

A pool ends with its save. Its threads check the deadline before each block. A thread that is stuck in the kernel keeps
its buffer, and is waited for only until the deadline.

Files have their final names at once: the folder belongs to this save alone, and nothing in it counts before the
done-record exists.

``WriteJob`` and ``WrittenFiles`` are the input and the result of every writer of a save's files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk, Format
from gracepoint.checkpoint.format.manifest import StoredFile
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.storage.direct_io import Buffer, UnsyncedFile, checksum_of
from gracepoint.checkpoint.storage.storage_path import StoragePath, sync_folders
from gracepoint.checkpoint.writing.pool import Finish, IdlePriority, WritePool, size_for
from gracepoint.deadline import Deadline

#: Seconds for what is being written to end after one write has failed: what was written is deleted next.
FAILED_ENDS_S = 10.0


class ChunkSource(Protocol):
    """Supplies the chunks of a save."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields every chunk once. Its values do not change until ``written`` is called for it.

        They may be in any memory order, and of another type than the stored one.
        """

    def written(self, chunk: Chunk) -> None:
        """Is called for each chunk whose values are no longer needed, from any thread."""


class PartSource(ChunkSource, Protocol):
    """Supplies the chunks of one process's part of a save."""

    def check_unchanged(self) -> None:
        """Raises SaveFailed if the values are not those any more that the source was made with."""


class SaveSource(PartSource, Protocol):
    """Supplies the chunks of a save that a worker process may write."""

    def written_elsewhere(self) -> None:
        """Is called in place of the others if a worker process, which has the chunks, too, has written them."""


@dataclasses.dataclass(frozen=True)
class WriteJob:
    """This process's part of a save.

    Attributes:
        folder: The save's temporary folder. It exists.
        item: Name of the train state's folder below ``folder``.
        specs: What is stored of each leaf that the chunks and ``arrays`` refer to, by index of the leaf.
        arrays: Indices of the leaves whose own metadata is written.
        source: Supplies the chunks.
        small_files: Contents of other files by path below ``folder``.
        tree_numbers: Candidate numbers for the chunks' tree in OCDBT. The job uses the first number whose tree does
            not exist yet, so that nobody else writes that tree. In a store that cannot rename, it uses the first
            number, and its trees have random names besides. A job that writes no array has no tree.
        is_urgent: Returns whether somebody waits for the save. Until then, threads that write plain values to a file
            system leave the CPU to other threads. None: they do not.
    """

    folder: StoragePath
    item: str
    specs: Mapping[int, ArraySpec]
    arrays: Sequence[int]
    source: ChunkSource
    small_files: Mapping[str, bytes]
    tree_numbers: Iterable[int] = (0,)
    is_urgent: Callable[[], bool] | None = None


@dataclasses.dataclass(frozen=True)
class WrittenFiles:
    """What one process wrote of a save.

    Attributes:
        files: Size and checksum of each file, by path below the checkpoint's folder.
        values: CRC-32 of the values of each chunk that has no file (in OCDBT), or whose file is compressed, by path.
        copies: CRC-32 of the values of each chunk that another process writes, by path.
        chunk_bytes: Size of the values of all chunks that were written.
    """

    files: dict[str, StoredFile] = dataclasses.field(default_factory=dict)
    values: dict[str, int] = dataclasses.field(default_factory=dict)
    copies: dict[str, int] = dataclasses.field(default_factory=dict)
    chunk_bytes: int = 0


def form_of(job: WriteJob) -> Format:
    """Returns the format of the arrays, which is the same for all arrays of a save."""
    return next(iter(job.specs.values())).format if job.specs else Format()


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
        folders = Folders(job.folder, direct=self._has_direct_io(job.folder))
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


class Folders:
    """The folders of one save. The thread that first needs a folder makes it.

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
    folders: Folders, path: str, data: ArrayBytes, written: WrittenFiles, pool: WritePool, buffer: Buffer
) -> None:
    """Writes one file at ``path`` below the save's folder durably, and adds it to ``written``."""
    place = folders.place(path)
    checksum = place.backend.write_large(place.key, data, buffer, pool.go_on, direct=folders.direct)
    written.files[path] = StoredFile(len(data), checksum)


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
    place = folders.place(path)
    unsynced: list[UnsyncedFile] = []
    checksum = place.backend.write_large(
        place.key, data, buffer, pool.go_on, direct=folders.direct, later=unsynced.append
    )
    written.files[path] = StoredFile(len(data), checksum)
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
