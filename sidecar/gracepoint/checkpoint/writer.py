"""Writes one process's files of a save with TensorStore, in parallel, durably.

TensorStore's own threads do the writing and syncing, and tell of each chunk that is done; the calling thread brings
chunks to host memory and computes checksums meanwhile. Each file has one writer, in a folder that no other save
uses, so there are no locks.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt
import tensorstore as ts

from gracepoint.checkpoint import layout, ocdbt
from gracepoint.checkpoint.byte_limit import ByteLimit
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.files import crc32_of, folders_up_to, sync_folders
from gracepoint.checkpoint.options import DEFAULT_OPTIONS, WriteOptions
from gracepoint.checkpoint.plan import Chunk
from gracepoint.checkpoint.records import File, file_of
from gracepoint.checkpoint.spec import ArraySpec, Format, as_bytes
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

# Chunks that are being written at once in a process. More than cores, as writers mostly wait for the disk.
_CONCURRENT_WRITES = 32
# Up to here it is quicker to hand TensorStore a copy of a chunk's bytes than to open its array.
_COPIED_BYTES = 1 << 16
_GIB = 1 << 30


class Source(Protocol):
    """Where a save's chunks come from."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        """Yields every chunk once; its values don't change until ``written``."""

    def written(self, chunk: Chunk) -> None:
        """Is told of each chunk whose values are needed no longer, from any thread."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What one process wrote of a save.

    Attributes:
        files: By path below the checkpoint's folder.
        values: CRC-32 of the values of chunks whose files hold something else, or that have none, by path.
        copies: The same of the chunks that another process writes.
    """

    files: dict[str, File]
    values: dict[str, int]
    copies: dict[str, int]


class Writer:
    """Writes below temporary folders; keeps TensorStore's context warm between saves."""

    def __init__(self, options: WriteOptions = DEFAULT_OPTIONS) -> None:
        self.options = options
        self._resources: dict[str, Any] = {
            "file_io_concurrency": {"limit": _CONCURRENT_WRITES},
            "file_io_locking": {"mode": "none"},
        }
        self._context = ts.Context({**self._resources, "cache_pool": {"total_bytes_limit": 0}, "file_io_sync": True})

    def write(
        self,
        folder: Path,
        item: str,
        specs: Mapping[int, ArraySpec],
        arrays: Sequence[int],
        source: Source,
        small_files: Mapping[str, bytes],
        deadline: Deadline,
        *,
        process_index: int = 0,
    ) -> Written:
        """Makes chunks, arrays' metadata and ``small_files`` durable below ``folder``.

        Args:
            folder: The save's temporary folder; it exists.
            item: The train state's folder below it.
            specs: Of the leaves that the chunks and ``arrays`` refer to.
            arrays: The leaves whose own metadata is written.
            source: Of the chunks.
            small_files: Contents by path below ``folder``.
            deadline: Until when.
            process_index: This process's, which OCDBT's folder is named by.

        Raises:
            SaveFailed: The deadline passed.
            ValueError, OSError: TensorStore could not write a file; names it.
        """
        started_s = deadline.elapsed_s()
        form = next(iter(specs.values())).format if specs else Format()
        written = Written({}, {}, {})
        in_flight = _InFlight(self.options.write_limit_bytes, folder, deadline)
        plain = self._plain(folder, deadline)
        for path, data in small_files.items():
            in_flight.add(0, functools.partial(plain.write, path, data))
            written.files[path] = file_of(data)
        store = self._store(folder / item, form, process_index, deadline)
        for leaf in arrays:
            path, data = specs[leaf].metadata_file, json.dumps(specs[leaf].metadata).encode()
            in_flight.add(0, functools.partial(store.kvstore.write, path, data))
            if not form.ocdbt:
                written.files[layout.in_item(item, path)] = file_of(data)
        written_bytes = 0
        for chunk, values in source.chunks(deadline):
            path, spec = layout.in_item(item, chunk.file), specs[chunk.leaf]
            if chunk.mine:
                begin = store.writing(chunk, spec, values)
                in_flight.add(chunk.bytes, begin, functools.partial(source.written, chunk))
                written_bytes += chunk.bytes
            file = file_of(as_bytes(values))
            if not chunk.mine:
                written.copies[path] = file.crc32
                source.written(chunk)
            elif form.files_hold_values:
                written.files[path] = file
            else:
                written.values[path] = file.crc32
        in_flight.wait()
        if not form.files_hold_values:
            written.files.update(_found(folder, item, form, process_index, written.values))
        # TensorStore synced each file and its folder; folders above those hold the entries of new folders.
        folders = {(folder / path).parent for path in written.files}
        sync_folders(itertools.chain.from_iterable(folders_up_to(path / "_", folder.parent) for path in folders))
        _report(written_bytes, deadline.elapsed_s() - started_s)
        return written

    def warm(self, folder: Path, deadline: Deadline) -> None:
        """Writes and removes a tiny array below ``folder``, so that code and threads are there when it
        counts."""
        spec = ArraySpec("probe", "numpy", (1,), "<f4", (1,))
        try:
            self.write(folder, layout.NO_ITEM, {0: spec}, [0], _Probe(), {}, deadline)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _plain(self, folder: Path, deadline: Deadline) -> ts.KvStore:
        opening = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}, context=self._context)
        return opening.result(timeout=deadline.remaining_s())

    def _store(self, item: Path, form: Format, process_index: int, deadline: Deadline) -> _Store:
        if form.ocdbt:
            context = ocdbt.context(**self._resources)
            tree = item / ocdbt.process_folder(process_index)
            opening = ts.KvStore.open(ocdbt.kvstore(tree), context=context)
            kvstore = opening.result(timeout=deadline.remaining_s())
            return _Store(kvstore, lambda path: ocdbt.kvstore(tree, path), context, deadline)
        kvstore = self._plain(item, deadline)
        return _Store(kvstore, lambda path: {"driver": "file", "path": f"{item}/{path}"}, self._context, deadline)


class _Store:
    """Where one save's chunks go: a folder, or a B+tree."""

    def __init__(
        self,
        kvstore: ts.KvStore,
        spec_of: Callable[[str], dict[str, Any]],
        context: ts.Context,
        deadline: Deadline,
    ) -> None:
        self.kvstore = kvstore
        self._spec_of = spec_of
        self._context = context
        self._deadline = deadline
        self._arrays: dict[str, ts.TensorStore] = {}

    def writing(self, chunk: Chunk, spec: ArraySpec, values: npt.NDArray[Any]) -> Callable[[], ts.Future[Any]]:
        """Returns what starts to write a chunk."""
        if spec.format.zstd_level is None and values.nbytes <= _COPIED_BYTES:
            return lambda: self.kvstore.write(chunk.file, bytes(as_bytes(values)))
        region = self._array(spec)[tuple(slice(start, stop) for start, stop in chunk.index)]
        return lambda: region.write(values, can_reference_source_data_indefinitely=True).commit

    def _array(self, spec: ArraySpec) -> ts.TensorStore:
        if spec.name not in self._arrays:
            opening = {
                **spec.opening(self._spec_of(f"{spec.name}/")),
                # Otherwise a chunk of zeros would not be stored, and could not be told from a lost one.
                "store_data_equal_to_fill_value": True,
            }
            opened = ts.open(opening, context=self._context).result(timeout=self._deadline.remaining_s())
            self._arrays[spec.name] = opened
        return self._arrays[spec.name]


class _InFlight:
    """The writes of one save that TensorStore works at, and whether all went well.

    Added to and waited for by the thread that writes; ended by TensorStore's.
    """

    def __init__(self, limit_bytes: int | None, folder: Path, deadline: Deadline) -> None:
        self._limit = ByteLimit(limit_bytes)
        self._folder = folder
        self._deadline = deadline
        self._added = 0
        self._ended = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self, size_bytes: int, begin: Callable[[], ts.Future[Any]], done: Callable[[], None] | None = None) -> None:
        """Begins a write as soon as there is room for it; ``done`` is called when it has ended well.

        Raises:
            SaveFailed: There was no room in time.
        """
        if self._error is not None:
            raise self._error
        if not self._limit.take(size_bytes, self._deadline):
            raise self._too_late()
        try:
            future = begin()
        except BaseException:
            self._limit.give_back(size_bytes)
            raise
        self._added += 1
        future.add_done_callback(lambda ended: self._end(ended, size_bytes, done))

    def wait(self) -> None:
        """Waits for all that was added.

        Raises:
            SaveFailed: Not all ended in time.
        """
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self._error is not None or self._ended == self._added, timeout=self._deadline.remaining_s()
            )
        if self._error is not None:
            raise self._error
        if not in_time:
            raise self._too_late()

    def _end(self, future: ts.Future[Any], size_bytes: int, done: Callable[[], None] | None) -> None:
        error = future.exception()
        try:
            if error is None and done is not None:
                done()
        except Exception as raised:  # noqa: BLE001 - of a caller's callback: raised by the thread that writes
            error = raised
        self._limit.give_back(size_bytes)
        with self._changed:
            self._ended += 1
            self._error = self._error or error
            self._changed.notify_all()

    def _too_late(self) -> SaveFailed:
        return SaveFailed(
            f"only {self._ended} of {self._added} files were written to {self._folder} within "
            f"{self._deadline.timeout_s:.1f} s"
        )


class _Probe:
    """The one chunk that ``warm`` writes."""

    def chunks(self, deadline: Deadline) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
        yield Chunk(0, "probe/0", ((0, 1),), mine=True, bytes=4), np.zeros(1, np.float32)

    def written(self, chunk: Chunk) -> None:
        pass


def _found(folder: Path, item: str, form: Format, process_index: int, values: Mapping[str, int]) -> dict[str, File]:
    """Returns the files that TensorStore made of chunks, whose contents are not the values' bytes."""
    if form.ocdbt:
        tree = folder / item / ocdbt.process_folder(process_index)
        paths = [path for path in tree.rglob("*") if path.is_file()]
    else:
        paths = [folder / path for path in values]
    return {str(path.relative_to(folder)): File(path.stat().st_size, crc32_of(path)) for path in paths}


def _report(size_bytes: int, duration_s: float) -> None:
    """Tells the log, and JAX's monitoring by Orbax's names, how fast this process wrote."""
    gib_per_s = size_bytes / _GIB / max(duration_s, 1e-9)
    logger.info("wrote %d bytes in %.3f s (%.3f GiB/s)", size_bytes, duration_s, gib_per_s)
    jax.monitoring.record_scalar("/jax/orbax/write/gbytes", size_bytes / _GIB)
    jax.monitoring.record_scalar("/jax/orbax/write/gbytes_per_sec", gib_per_s)
