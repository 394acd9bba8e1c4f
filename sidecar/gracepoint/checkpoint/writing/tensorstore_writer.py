"""Writes a save's files with TensorStore: compressed chunks, chunks in OCDBT, and all chunks if the options say so.

In file systems (``TensorStoreWriter``), TensorStore's own threads write and sync the files, and report each complete
chunk. Meanwhile the calling thread brings chunks to host memory and computes checksums. Each file has one writer, so no
file is locked. Several jobs may write below one folder at once: the processes of a save, and calls of type handlers. So
a job reads only files that it wrote itself. It knows their names, except in OCDBT, where TensorStore chooses them. In
OCDBT each job makes a separate folder for its tree, and lists that folder after all its writes have ended.

To stores that cannot rename (``EncodedWriter``), TensorStore does not write: its writes there have no conditions and no
deadline. It encodes chunks in this process's memory, and the results are written like every other file of the save. In
OCDBT, a process collects chunks up to ``_TREE_BYTES``, and makes a small tree of them. Each tree has a separate folder,
so nothing in it is ever overwritten. The commit merges the trees of all processes. The threads are those of a
``WritePool``. Each encodes and writes one tree or chunk at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy.typing as npt
import tensorstore as ts

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.array_spec import ArraySpec, Chunk, as_bytes, folder_of_leaf
from gracepoint.checkpoint.format.records import StoredFile, file_of
from gracepoint.checkpoint.memory import ByteLimiter, bytes_of, stored_values
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.storage.buffers import Buffer
from gracepoint.checkpoint.storage.checks import crc32_of, size_of
from gracepoint.checkpoint.storage.in_memory import new_context
from gracepoint.checkpoint.storage.storage_path import StoragePath, sync_folders
from gracepoint.checkpoint.writing.pool import FAILED_ENDS_S, Folders, WriteJob, WritePool, WrittenFiles
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

# Chunks that a process writes at once. There may be more than cores, as writers mostly wait for the disk.
_CONCURRENT_WRITES = 32
# For chunks up to this size, giving TensorStore a copy of the bytes is faster than opening the array.
_COPIED_BYTES = 1 << 16


class TensorStoreWriter:
    """Writes with TensorStore. Keeps its context between saves."""

    def __init__(self, options: WriteOptions) -> None:
        self._limit_bytes = options.write_limit_bytes
        self._data_file_bytes = options.ocdbt_target_data_file_bytes
        self._resources: dict[str, Any] = {"file_io_concurrency": {"limit": _CONCURRENT_WRITES}}
        self._context = new_context({**self._resources, "cache_pool": {"total_bytes_limit": 0}, "file_io_sync": True})

    def write(self, job: WriteJob, deadline: Deadline) -> WrittenFiles:
        """Makes all files of ``job`` durable.

        Raises:
            SaveFailed: The deadline passed, or was cancelled.
            ValueError, OSError: TensorStore could not write a file. The message names it.
        """
        in_flight = _InFlight(self._limit_bytes, job.folder, deadline)
        try:
            return self._write(job, deadline, in_flight)
        except BaseException:
            in_flight.settle()
            raise

    def _write(self, job: WriteJob, deadline: Deadline, in_flight: _InFlight) -> WrittenFiles:
        folder, item, specs = job.folder, job.item, job.specs
        form = job.form
        written, chunk_bytes = WrittenFiles(), 0
        plain = self._plain(folder, deadline)
        for path, data in job.small_files.items():
            in_flight.add(0, functools.partial(plain.write, path, data))
            written.files[path] = file_of(data)
        store = _Store(job, self._context, self._resources, deadline, self._data_file_bytes)
        for leaf in job.arrays:
            path, data = specs[leaf].metadata_file, json.dumps(specs[leaf].metadata).encode()
            in_flight.add(0, functools.partial(store.kvstore.write, path, data))
            if not form.ocdbt:
                written.files[layout.in_item(item, path)] = file_of(data)
        for chunk, raw in job.source.chunks(deadline):
            path, spec = layout.in_item(item, chunk.file), specs[chunk.leaf]
            values = stored_values(raw, spec.numpy_dtype)
            if chunk.mine:
                begin = store.writing(chunk, spec, values)
                in_flight.add(chunk.bytes, begin, functools.partial(job.source.written, chunk))
                chunk_bytes += chunk.bytes
            file = file_of(as_bytes(values))
            if not chunk.mine:
                written.copies[path] = file.crc32
                job.source.written(chunk)
            elif form.files_hold_values:
                written.files[path] = file
            else:
                written.values[path] = file.crc32
        in_flight.wait()
        if not form.files_hold_values:
            written.files.update(_sizes_and_checksums(folder, store.files(written.values)))
        # TensorStore has synced each file and its folder. The folders above have the names of new folders, and are
        # synced here.
        folders = {(folder / path).parent for path in written.files}
        sync_folders(itertools.chain.from_iterable((path / "_").folders_up_to(folder.parent) for path in folders))
        return dataclasses.replace(written, chunk_bytes=chunk_bytes)

    def _plain(self, folder: StoragePath, deadline: Deadline) -> ts.KvStore:
        opening = ts.KvStore.open(folder.kvstore_spec(), context=self._context)
        return opening.result(timeout=deadline.remaining_s())


class _Store:
    """The store of one job's chunks: its item's folder, or a separate B+tree. The first write makes the tree."""

    def __init__(
        self,
        job: WriteJob,
        context: ts.Context,
        resources: Mapping[str, Any],
        deadline: Deadline,
        data_file_bytes: int | None,
    ) -> None:
        """Stores the arguments. Nothing is opened yet.

        Args:
            job: The job that writes the chunks.
            context: The context for chunks that are files.
            resources: Resources of the separate context of a B+tree.
            deadline: The deadline for opening the store.
            data_file_bytes: See ``WriteOptions.ocdbt_target_data_file_bytes``.
        """
        self._data_file_bytes = data_file_bytes
        self._folder = job.folder
        self._item = job.folder / job.item
        self._tree_numbers = job.tree_numbers if job.form.ocdbt else None
        self._context = context if self._tree_numbers is None else ocdbt.context(**resources)
        self._deadline = deadline
        self._tree: StoragePath | None = None  # None: not made yet, or not in OCDBT
        self._arrays: dict[str, ts.TensorStore] = {}

    @functools.cached_property
    def kvstore(self) -> ts.KvStore:
        opening = ts.KvStore.open(self._spec(""), context=self._context)
        return opening.result(timeout=self._deadline.remaining_s())

    def files(self, chunks: Iterable[str]) -> list[StoragePath]:
        """Returns the files that hold ``chunks``, paths below the folder. All writes must have ended."""
        if self._tree_numbers is None:
            return [self._folder / chunk for chunk in chunks]
        return [] if self._tree is None else [self._tree / entry.key for entry in self._tree.entries()]

    def _spec(self, path: str) -> dict[str, Any]:
        if self._tree_numbers is None:
            return (self._item / path.rstrip("/")).kvstore_spec()
        if self._tree is None:
            # Not the folder above: if the folder of the save was removed, that is an error.
            self._item.make_folder(parents=False)
            self._tree = ocdbt.new_folder(self._item, self._tree_numbers)
        return ocdbt.kvstore(self._tree, path, data_file_bytes=self._data_file_bytes)

    def writing(self, chunk: Chunk, spec: ArraySpec, values: npt.NDArray[Any]) -> Callable[[], ts.Future[Any]]:
        """Returns a function that starts to write a chunk."""
        if spec.format.zstd_level is None and values.nbytes <= _COPIED_BYTES:
            return lambda: self.kvstore.write(chunk.file, bytes(as_bytes(values)))
        region = self._array(spec)[tuple(slice(start, stop) for start, stop in chunk.index)]
        return lambda: region.write(values, can_reference_source_data_indefinitely=True).commit

    def _array(self, spec: ArraySpec) -> ts.TensorStore:
        if spec.name not in self._arrays:
            opening = {
                **spec.opening(self._spec(folder_of_leaf(spec.name))),
                # Otherwise a chunk of zeros would not be stored, and could not be distinguished from a lost one.
                "store_data_equal_to_fill_value": True,
            }
            opened = ts.open(opening, context=self._context).result(timeout=self._deadline.remaining_s())
            self._arrays[spec.name] = opened
        return self._arrays[spec.name]


class _InFlight:
    """The writes of one save that are in flight, and their first error.

    The thread that calls ``TensorStoreWriter.write`` adds writes and waits for them. TensorStore's threads end them.
    """

    def __init__(self, limit_bytes: int | None, folder: StoragePath, deadline: Deadline) -> None:
        self._limit = ByteLimiter(limit_bytes)
        self._folder = folder
        self._deadline = deadline
        self._added = 0
        self._ended = 0
        self._error: BaseException | None = None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._begun: list[ts.Future[Any]] = []

    def add(
        self, size_bytes: int, begin: Callable[[], ts.Future[Any]], on_done: Callable[[], None] | None = None
    ) -> None:
        """Waits for room, and starts a write. ``on_done`` is called when the write has succeeded.

        Raises:
            SaveFailed: There was no room in time, or the save is stopped.
        """
        if self._error is not None:
            raise self._error
        if not self._limit.take(size_bytes, self._deadline) or self._deadline.passed():
            raise self._given_up()
        try:
            future = begin()
        except BaseException:
            self._limit.give_back(size_bytes)
            raise
        self._added += 1
        self._begun.append(future)
        future.add_done_callback(lambda completed: self._end(completed, size_bytes, on_done))

    def wait(self) -> None:
        """Waits until all added writes have ended.

        Raises:
            SaveFailed: Not all of them ended in time.
        """
        with self._lock:
            in_time = self._deadline.wait_for(
                self._changed, lambda: self._error is not None or self._ended == self._added
            )
        if self._error is not None:
            raise self._error
        if not in_time:
            raise self._given_up()

    def settle(self) -> None:
        """After an error: waits until TensorStore writes nothing any more, for some seconds at most.

        Nothing is cancelled: a future that is cancelled has ended, and its write may continue.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._ended == self._added, min(FAILED_ENDS_S, self._deadline.remaining_s()))

    def _given_up(self) -> SaveFailed:
        """Cancels the writes that TensorStore has not started. Returns the error to raise."""
        error = self._too_late()
        for future in self._begun:
            future.cancel()
        return error

    def _end(self, future: ts.Future[Any], size_bytes: int, on_done: Callable[[], None] | None) -> None:
        error: BaseException | None = self._too_late() if future.cancelled() else future.exception()
        try:
            if error is None and on_done is not None:
                on_done()
        except Exception as raised:  # noqa: BLE001 - of a caller's callback: raised by the calling thread
            error = raised
        self._limit.give_back(size_bytes)
        with self._lock:
            self._ended += 1
            self._error = self._error or error
            self._changed.notify_all()

    def _too_late(self) -> SaveFailed:
        return SaveFailed(
            f"only {self._ended} of {self._added} files were written to {self._folder} {self._deadline.ended}"
        )


def _sizes_and_checksums(folder: StoragePath, paths: Iterable[StoragePath]) -> dict[str, StoredFile]:
    """Returns size and checksum of each of ``paths``, by path below ``folder``."""
    return {path.below(folder): StoredFile(size_of(path), crc32_of(path)) for path in paths}


# A tree is in memory several times while it is made. With all threads at work, this bounds the extra memory.
_TREE_BYTES = 4 << 20
# Most bytes of chunks that are handed to the threads and not yet written.
_IN_FLIGHT_BYTES = 64 << 20

_Piece = tuple[Chunk, npt.NDArray[Any]]


class EncodedWriter:
    """Writes with TensorStore's encoders."""

    def __init__(self, options: WriteOptions) -> None:
        self._limit_bytes = min(options.write_limit_bytes or _IN_FLIGHT_BYTES, _IN_FLIGHT_BYTES)

    def write(self, job: WriteJob, deadline: Deadline) -> WrittenFiles:
        """Makes all files of ``job`` durable.

        Raises:
            SaveFailed: The deadline passed, or was cancelled.
            ValueError, OSError: A file cannot be written. The message names it.
        """
        written = WrittenFiles()
        pool = WritePool([], self._limit_bytes, job.folder, deadline)
        folders = Folders(job.folder, job.place, direct=False)
        put = functools.partial(_put, folders, written, pool)
        in_tree = job.form.ocdbt
        chunk_bytes = 0
        try:
            pool.begin()
            for path, data in job.small_files.items():
                pool.add(0, functools.partial(_put, folders, written, pool, path, data))
            metadata = {
                job.specs[leaf].metadata_file: json.dumps(job.specs[leaf].metadata).encode() for leaf in job.arrays
            }
            if not in_tree:
                for path, data in metadata.items():
                    pool.add(0, functools.partial(_put, folders, written, pool, layout.in_item(job.item, path), data))
            for pieces in _groups(job, deadline, written, _TREE_BYTES if in_tree else 0):
                size_bytes = sum(chunk.bytes for chunk, _ in pieces)
                act = _write_tree if in_tree else _write_chunks
                pool.add(size_bytes, functools.partial(act, job, pieces, metadata, put))
                metadata = {}  # the first tree has it
                chunk_bytes += size_bytes
            if in_tree and metadata:
                pool.add(0, functools.partial(_write_tree, job, [], metadata, put))
            pool.wait()
        except BaseException:
            pool.close()
            pool.join(FAILED_ENDS_S)
            raise
        pool.close()
        pool.join()
        return dataclasses.replace(written, chunk_bytes=chunk_bytes)


_Put = Callable[[str, bytes, Buffer], None]


def _put(folders: Folders, written: WrittenFiles, pool: WritePool, path: str, data: bytes, buffer: Buffer) -> None:
    written.files[path] = folders.write(path, bytes_of(data), buffer, pool.go_on)


def _groups(job: WriteJob, deadline: Deadline, written: WrittenFiles, group_bytes: int) -> Iterator[list[_Piece]]:
    """Yields the chunks that this process writes, in groups of at least ``group_bytes``, the last one excepted.

    Notes the checksums of the values of all chunks in ``written``.
    """
    group: list[_Piece] = []
    collected_bytes = 0
    for chunk, raw in job.source.chunks(deadline):
        values = stored_values(raw, job.specs[chunk.leaf].numpy_dtype)
        checksum = file_of(as_bytes(values)).crc32
        path = layout.in_item(job.item, chunk.file)
        if not chunk.mine:
            written.copies[path] = checksum
            job.source.written(chunk)
            continue
        written.values[path] = checksum
        group.append((chunk, values))
        collected_bytes += chunk.bytes
        if collected_bytes >= group_bytes:
            yield group
            group, collected_bytes = [], 0
    if group:
        yield group


def _write_chunks(job: WriteJob, pieces: list[_Piece], _: Any, put: _Put, buffer: Buffer) -> None:
    for chunk, values in pieces:
        with _InMemory() as memory:
            spec = job.specs[chunk.leaf]
            memory.encode(chunk, spec, values, memory.spec(folder_of_leaf(spec.name)))
            put(layout.in_item(job.item, chunk.file), memory.files()[chunk.file], buffer)
        job.source.written(chunk)


def _write_tree(job: WriteJob, pieces: list[_Piece], metadata: dict[str, bytes], put: _Put, buffer: Buffer) -> None:
    (number,) = list(job.tree_numbers)[:1]
    name = f"{ocdbt.process_folder(number)}.{secrets.token_hex(8)}"
    with _InMemory() as memory:
        tree = ocdbt.kvstore_in(memory.spec(""))
        store = ts.KvStore.open(tree, context=memory.context).result()
        writes = [store.write(path, data) for path, data in metadata.items()]
        for chunk, values in pieces:
            spec = job.specs[chunk.leaf]
            if spec.format.zstd_level is None:
                writes.append(store.write(chunk.file, bytes(as_bytes(values))))
            else:
                memory.encode(chunk, spec, values, ocdbt.kvstore_in(memory.spec(""), folder_of_leaf(spec.name)))
        for write in writes:
            write.result()
        for path, data in memory.files().items():
            put(layout.in_item(job.item, f"{name}/{path}"), data, buffer)
    for chunk, _ in pieces:
        job.source.written(chunk)


class _InMemory:
    """A store in memory, which ends with the block."""

    def __init__(self) -> None:
        self.context = ocdbt.context(memory_key_value_store={}, cache_pool={"total_bytes_limit": 0})

    def __enter__(self) -> _InMemory:
        return self

    def __exit__(self, *_: object) -> None:
        del self.context

    def spec(self, path: str) -> dict[str, Any]:
        return {"driver": "memory", "path": path}

    def encode(self, chunk: Chunk, spec: ArraySpec, values: npt.NDArray[Any], kvstore: dict[str, Any]) -> None:
        """Writes the encoded chunk to ``kvstore``, the folder of its array."""
        opening = {**spec.opening(kvstore), "store_data_equal_to_fill_value": True}
        array = ts.open(opening, context=self.context).result()
        array[tuple(slice(start, stop) for start, stop in chunk.index)].write(values).result()

    def files(self) -> dict[str, bytes]:
        """Returns all values by their keys."""
        store = ts.KvStore.open({"driver": "memory"}, context=self.context).result()
        return {key.decode(): store.read(key).result().value for key in store.list().result()}
