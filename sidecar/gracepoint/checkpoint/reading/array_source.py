"""Sources of array values: chunk files that hold them unencoded, or anything that TensorStore reads.

All sources are read in pieces. Any number of threads may read at once. Each piece is read once, by one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import tensorstore as ts

from gracepoint.checkpoint.format.array_spec import ArraySpec, Index, as_bytes
from gracepoint.checkpoint.format.manifest import StoredFile
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt

T = TypeVar("T", covariant=True)


class ByPath(Protocol[T]):
    """What is recorded of chunks, by path."""

    def __getitem__(self, path: str, /) -> T:
        """Returns what is recorded of one chunk.

        Raises:
            CheckpointCorrupt: The record cannot be read.
        """


class ArraySource(Protocol):
    """The arrays of one checkpoint."""

    def pieces(self, name: str, boxes: Sequence[Index]) -> list[list[Index]]:
        """Returns the pieces to read for each of ``boxes``, which are regions of an array. Nothing is read twice.

        A piece that several boxes need is in the list of each.
        """

    def extra_bytes(self, name: str, piece: Index) -> int:
        """Returns an estimate of the memory in bytes that reading ``piece`` needs in addition to its output."""

    def read(self, name: str, piece: Index, out: npt.NDArray[Any], deadline: Deadline) -> None:
        """Reads ``piece`` into ``out``, which is in C order.

        Raises:
            CheckpointCorrupt: The piece is missing or damaged. The message names the leaf or its file.
            TimeoutError: The deadline passed.
        """


class ChunkFiles:
    """Files of raw values, with their sizes and checksums in the manifest. Each file is read whole, and checked."""

    def __init__(self, item: StoragePath, specs: Mapping[str, ArraySpec], files: ByPath[StoredFile]) -> None:
        """Reads files below ``item``. ``files`` is keyed by path below it."""
        self._item = item
        self._specs = specs
        self._files = files

    def pieces(self, name: str, boxes: Sequence[Index]) -> list[list[Index]]:
        return [_chunks_in(box, self._specs[name]) for box in boxes]

    def extra_bytes(self, name: str, piece: Index) -> int:
        return 0

    def read(self, name: str, piece: Index, out: npt.NDArray[Any], deadline: Deadline) -> None:
        path = self._specs[name].chunk_file(piece)
        file = self._files[path]
        read_checked(self._item / path, file.bytes, file.crc32, as_bytes(out))


class ChunkKeys:
    """Raw values under keys of an OCDBT tree, with their checksums in the manifest. Each is read whole, and checked."""

    def __init__(
        self, where: StoragePath, store: ts.KvStore, specs: Mapping[str, ArraySpec], checksums: ByPath[int]
    ) -> None:
        """``where`` is used in error messages. ``checksums`` is keyed by the key in the store."""
        self._where = where
        self._store = store
        self._specs = specs
        self._checksums = checksums

    def pieces(self, name: str, boxes: Sequence[Index]) -> list[list[Index]]:
        return [_chunks_in(box, self._specs[name]) for box in boxes]

    def extra_bytes(self, name: str, piece: Index) -> int:
        return self._specs[name].chunk_bytes

    def read(self, name: str, piece: Index, out: npt.NDArray[Any], deadline: Deadline) -> None:
        key, where = self._specs[name].chunk_file(piece), f"{self._where}: leaf {name!r}"
        try:
            found = self._store.read(key).result(timeout=deadline.remaining_s())
        except ValueError as error:
            raise CheckpointCorrupt(f"{where}: {error}") from error
        if found.state != "value":
            raise CheckpointCorrupt(f"{where}: chunk {key} is missing")
        if len(found.value) != out.nbytes or crc32(found.value) != self._checksums[key]:
            raise CheckpointCorrupt(f"{where}: chunk {key} has values that do not fit its checksum")
        as_bytes(out)[:] = found.value


class StoredArrays:
    """Arrays that TensorStore has opened.

    Only TensorStore's own checks are made: OCDBT's checksums, and missing or short chunks.
    """

    def __init__(self, where: StoragePath, stores: Mapping[str, ts.TensorStore]) -> None:
        self._where = where
        self._stores = stores

    def pieces(self, name: str, boxes: Sequence[Index]) -> list[list[Index]]:
        store = self._stores[name]
        chunk = chunk_shape(store)
        chunks = [touched(box, store.shape, chunk) for box in boxes]
        if len({piece for pieces in chunks for piece in pieces}) < sum(map(len, chunks)):
            return chunks
        return [[box] for box in boxes]  # TensorStore reads their chunks in parallel

    def extra_bytes(self, name: str, piece: Index) -> int:
        store = self._stores[name]
        size_bytes = int(store.dtype.numpy_dtype.itemsize)
        for (start, stop), size in zip(piece, chunk_shape(store), strict=True):
            size_bytes *= -(-stop // size) * size - start // size * size  # whole chunks are decoded
        return size_bytes

    def read(self, name: str, piece: Index, out: npt.NDArray[Any], deadline: Deadline) -> None:
        try:
            copy_into(out, self._stores[name], piece, deadline)
        except ValueError as error:
            raise CheckpointCorrupt(f"{self._where}: leaf {name!r}: {error}") from error


class CheckedStoredArrays(StoredArrays):
    """Arrays as in ``StoredArrays``, with checksums of their chunks' values. Each chunk is read whole, and checked."""

    def __init__(
        self,
        where: StoragePath,
        stores: Mapping[str, ts.TensorStore],
        specs: Mapping[str, ArraySpec],
        checksums: ByPath[int],
    ) -> None:
        """``checksums`` is keyed by the path of the chunk below ``where``."""
        super().__init__(where, stores)
        self._specs = specs
        self._checksums = checksums

    def pieces(self, name: str, boxes: Sequence[Index]) -> list[list[Index]]:
        return [_chunks_in(box, self._specs[name]) for box in boxes]

    def read(self, name: str, piece: Index, out: npt.NDArray[Any], deadline: Deadline) -> None:
        super().read(name, piece, out, deadline)
        path = self._specs[name].chunk_file(piece)
        if crc32(as_bytes(out)) != self._checksums[path]:
            raise CheckpointCorrupt(
                f"{self._where}: leaf {name!r}: chunk {path} has values that do not fit its checksum"
            )


def _chunks_in(box: Index, spec: ArraySpec) -> list[Index]:
    return touched(box, spec.shape, spec.chunk)


def touched(box: Index, shape: Sequence[int], chunk: Sequence[int]) -> list[Index]:
    """Returns the indices of the chunks of a regular grid that overlap ``box``."""
    axes = [
        [(first, min(first + size, length)) for first in range(start // size * size, stop, size)]
        for (start, stop), length, size in zip(box, shape, (max(1, size) for size in chunk), strict=True)
    ]
    return list(itertools.product(*axes))


def chunk_shape(store: ts.TensorStore) -> tuple[int, ...]:
    """Returns the shape of the chunks that TensorStore decodes."""
    shape = store.chunk_layout.read_chunk.shape
    return tuple(max(1, size or 1) for size in shape or (1,) * store.rank)


def copy_into(out: npt.NDArray[Any], store: ts.TensorStore, piece: Index, deadline: Deadline) -> None:
    """Reads ``piece`` into ``out``.

    Raises:
        ValueError: TensorStore cannot read it.
        TimeoutError: The deadline passed.
    """
    region = store[tuple(slice(start, stop) for start, stop in piece)][ts.d[:].translate_to[0]] if piece else store
    ts.array(out).write(region).result(timeout=deadline.remaining_s())
