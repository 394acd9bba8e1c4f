"""Writes compressed chunks, and chunks in OCDBT, to stores that cannot rename.

TensorStore encodes them in this process's memory. The results are then written like every other file of the save, with
conditions and with checksums. TensorStore's own writes to such stores have no conditions and no deadline.

In OCDBT, a process collects chunks up to ``_TREE_BYTES``, and makes a small tree of them. Each tree has a folder of its
own, so nothing in it is ever overwritten. The commit merges the trees of all processes.

The threads are those of a ``WritePool``. Each encodes and writes one tree or chunk at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy.typing as npt
import tensorstore as ts

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.array_spec import ArraySpec, as_bytes, folder_of_leaf
from gracepoint.checkpoint.format.manifest import file_of
from gracepoint.checkpoint.memory.array_bytes import stored_values
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning.chunks import Chunk
from gracepoint.checkpoint.storage.direct_io import Buffer
from gracepoint.checkpoint.storage.flat_backend import FlatBackend
from gracepoint.checkpoint.writing.file_writer import Folders, bytes_of, write_file
from gracepoint.checkpoint.writing.write_job import FAILED_ENDS_S, WriteJob, WrittenFiles, form_of
from gracepoint.checkpoint.writing.write_pool import WritePool
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed

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
            SaveFailed: The deadline passed, or was cancelled. Or TensorStore could not read what would be written.
            ValueError, OSError: A file cannot be written. The message names it.
        """
        if form_of(job).ocdbt and (error := cast(FlatBackend, job.folder.backend).tensorstore_error):
            raise SaveFailed(f"{job.folder}: {error}. Save without OCDBT, or mend that")
        written = WrittenFiles()
        pool = WritePool([], self._limit_bytes, job.folder, deadline)
        folders = Folders(job.folder, direct=False)
        put = functools.partial(_put, folders, written, pool)
        in_tree = form_of(job).ocdbt
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
    write_file(folders, path, bytes_of(data), written, pool, buffer)


def _groups(job: WriteJob, deadline: Deadline, written: WrittenFiles, group_bytes: int) -> Iterator[list[_Piece]]:
    """Yields the chunks that this process writes, in groups of at least ``group_bytes``, the last one excepted.

    Notes the checksums of the values of all chunks in ``written``.
    """
    group: list[_Piece] = []
    collected_bytes = 0
    for chunk, given in job.source.chunks(deadline):
        values = stored_values(given, job.specs[chunk.leaf].numpy_dtype)
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
