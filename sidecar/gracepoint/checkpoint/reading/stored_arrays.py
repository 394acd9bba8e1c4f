"""The arrays of a checkpoint of Gracepoint or Orbax: their specs, and the sources of their values.

For a checkpoint with a manifest, the manifest has the specs and the checksums. Otherwise the specs are read from zarr's
metadata and from what Orbax records next to it, and there are no checksums. A source is either chunk files that hold
the values unencoded, or anything that TensorStore reads.

Sources are read in pieces. Any number of threads may read at once. Each piece is read once, by one thread. If a
manifest is in parts, a part is read when a chunk in it is first asked for, by the first thread that needs it
(``ManifestParts``); other threads wait only if they need the same part. Parts are kept in arrays of numpy, because a
process that restores much reads many of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.array_spec import (
    ArraySpec,
    Index,
    Kind,
    as_bytes,
    chunk_count,
    folder_of_leaf,
    zarr_dtype,
)
from gracepoint.checkpoint.format.records import Manifest, ManifestPart, StoredFile
from gracepoint.checkpoint.planning import chunks
from gracepoint.checkpoint.storage.checks import check_sizes, read_checked
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checksum import crc32
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
            result = self._store.read(key).result(timeout=deadline.remaining_s())
        except ValueError as error:
            raise CheckpointCorrupt(f"{where}: {error}") from error
        if result.state != "value":
            raise CheckpointCorrupt(f"{where}: chunk {key} is missing")
        if len(result.value) != out.nbytes or crc32(result.value) != self._checksums[key]:
            raise CheckpointCorrupt(f"{where}: chunk {key} has values that do not fit its checksum")
        as_bytes(out)[:] = result.value


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


Value = TypeVar("Value")

# The place of a chunk in the grid, at the end of its path. In zarr3 it begins with "c".
_PLACE = {2: re.compile(r"(?:(.*)/)?(\d+(?:\.\d+)*)", re.ASCII), 3: re.compile(r"(?:(.*)/)?c((?:/\d+)*)", re.ASCII)}


class ManifestParts:
    """The parts of one manifest.

    Attributes:
        files: Size and checksum of the file of each chunk, by path below the train state's folder.
        values: CRC-32 of the values of each chunk that has no file, or whose file holds encoded values, by that path.
    """

    def __init__(self, folder: StoragePath, manifest: Manifest) -> None:
        """Reads the table of writers, and no part yet.

        Raises:
            CheckpointCorrupt: The table is missing or damaged.
        """
        self._folder = folder
        self._manifest = manifest
        self._specs = {spec.name: spec for spec in manifest.arrays}
        counts = [chunk_count(spec) for spec in manifest.arrays]
        self._first: dict[str, int] = dict(zip(self._specs, np.cumsum([0, *counts]).tolist(), strict=False))
        total = sum(counts)
        where = folder / layout.CHUNK_WRITERS
        try:
            self._writers = chunks.from_table(bytes(self._read(layout.CHUNK_WRITERS)))
        except ValueError as error:
            raise CheckpointCorrupt(f"{where} cannot be read: {error}") from error
        if len(self._writers) != total or self._writers.max(initial=0) >= manifest.process_count:
            raise CheckpointCorrupt(
                f"{where} has {len(self._writers)} chunks, expected {total} of {manifest.process_count} processes"
            )
        self._counts = np.bincount(self._writers, minlength=manifest.process_count)
        self._bytes = np.zeros(total, np.int64)
        self._crc32 = np.zeros(total, np.uint32)
        self._values = np.zeros(total, np.uint32)
        self._reading = threading.Lock()  # protects ``_locks``
        self._locks: dict[int, threading.Lock] = {}  # by process
        self._known: set[int] = set()  # processes whose part is in the arrays
        self.files = _Chunks(self._file_of)
        self.values = _Chunks(self._value_of)

    def writer_of(self, path: str) -> int:
        """Returns the process that wrote a chunk.

        Raises:
            KeyError: There is no such chunk.
        """
        return int(self._writers[self._number_of(path)])

    def _file_of(self, path: str) -> StoredFile:
        number = self._number(path)
        return StoredFile(int(self._bytes[number]), int(self._crc32[number]))

    def _value_of(self, path: str) -> int:
        return int(self._values[self._number(path)])

    def _number(self, path: str) -> int:
        """Returns the number of a chunk among all chunks, once the part that has it is in the arrays."""
        number = self._number_of(path)
        process = int(self._writers[number])
        if process not in self._known:
            with self._reading:
                lock = self._locks.setdefault(process, threading.Lock())
            with lock:
                if process not in self._known:
                    self._take_in(process)
        return number

    def _number_of(self, path: str) -> int:
        zarr = next(iter(self._specs.values())).format.zarr if self._specs else 2
        match = _PLACE[zarr].fullmatch(path)
        spec = None if match is None else self._specs.get(match[1] or "")
        if match is None or spec is None:
            raise KeyError(path)
        place = [int(at) for at in re.split(r"[./]", match[2]) if at][-len(spec.shape) :] if spec.shape else []
        return self._first[spec.name] + _flat(place, spec)

    def _take_in(self, process: int) -> None:
        name = layout.manifest_part(process)
        part = ManifestPart.from_bytes(bytes(self._read(name)), str(self._folder / name))
        below = len(layout.in_item(self._manifest.item, ""))
        expected = int(self._counts[process])
        if max(len(part.files), len(part.values)) != expected:
            raise CheckpointCorrupt(
                f"{self._folder / name} has {max(len(part.files), len(part.values))} chunks, expected {expected}"
            )
        for path, file in part.files.items():
            number = self._number_of(path[below:])
            self._bytes[number], self._crc32[number] = file.bytes, file.crc32
        for path, checksum in part.values.items():
            self._values[self._number_of(path[below:])] = checksum
        self._known.add(process)  # last, as other threads then read the arrays without a lock

    def _read(self, name: str) -> bytearray:
        file = self._manifest.files[name]
        data = bytearray(file.bytes)
        read_checked(self._folder / name, len(data), file.crc32, memoryview(data))
        return data


class _Chunks(Generic[Value]):
    """What is known of each chunk, by path."""

    def __init__(self, find: Callable[[str], Value]) -> None:
        self._find = find

    def __getitem__(self, path: str) -> Value:
        return self._find(path)


def _flat(place: list[int], spec: ArraySpec) -> int:
    number = 0
    for at, length, size in zip(place, spec.shape, spec.chunk, strict=True):
        number = number * -(-length // max(1, size)) + at
    return number if math.prod(spec.shape) else 0


_CHUNK_NAME = re.compile(r"\d+(\.\d+)*")
_KINDS: Mapping[str, Kind] = {"jax.Array": "array", "np.ndarray": "numpy", "scalar": "scalar"}


def source_by_manifest(manifest: Manifest, folder: StoragePath, deadline: Deadline) -> ArraySource:
    """Returns the source of the values of a checkpoint that has a manifest.

    Raises:
        CheckpointCorrupt: The arrays cannot be opened.
        TimeoutError: The deadline passed.
    """
    item = folder / manifest.item
    specs = {spec.name: spec for spec in manifest.arrays}
    below = layout.in_item(manifest.item, "")
    files = {path.removeprefix(below): file for path, file in manifest.files.items() if path.startswith(below)}
    parts = ManifestParts(folder, manifest) if manifest.is_in_parts else None
    if all(spec.format.files_hold_values for spec in specs.values()):
        return ChunkFiles(item, specs, files if parts is None else parts.files)
    check_sizes(item, {path: file.bytes for path, file in files.items()})
    checksums: ByPath[int]
    if parts is None:
        checksums = {path.removeprefix(below): checksum for path, checksum in manifest.values.items()}
    else:
        checksums = parts.values
    if all(spec.format.ocdbt and spec.format.zstd_level is None for spec in specs.values()):
        tree_in_item = ts.KvStore.open(ocdbt.kvstore(item), context=ocdbt.context())
        try:
            return ChunkKeys(item, tree_in_item.result(timeout=deadline.remaining_s()), specs, checksums)
        except ValueError as error:
            raise CheckpointCorrupt(f"{item / ocdbt.MANIFEST} cannot be opened: {error}") from error
    opening = {
        name: spec.opening(
            ocdbt.kvstore(item, folder_of_leaf(name)) if spec.format.ocdbt else (item / name).kvstore_spec()
        )
        | {"fill_missing_data_reads": False}
        for name, spec in specs.items()
    }
    return CheckedStoredArrays(item, _opened(item, opening, deadline), specs, checksums)


def open_arrays(
    item: StoragePath, metadata: Mapping[str, Any], value_types: Mapping[str, str], deadline: Deadline
) -> tuple[dict[str, ArraySpec], ArraySource]:
    """Opens the arrays of a checkpoint that has no manifest.

    Args:
        item: The folder of the train state.
        metadata: What the tree's metadata says of the format of the arrays.
        value_types: Orbax's name for the kind of value, by the name of the leaf.
        deadline: The deadline for opening.

    Returns:
        The specs of the leaves that are arrays, by name, and the source of their values.

    Raises:
        CheckpointCorrupt: An array is missing or damaged; names it.
        TimeoutError: The deadline passed.
    """
    in_ocdbt, zarr3 = metadata.get("use_ocdbt"), metadata.get("use_zarr3", False)
    kinds = {name: _KINDS[value_type] for name, value_type in value_types.items() if value_type in _KINDS}
    if in_ocdbt is not False and kinds:
        has_tree = (item / ocdbt.MANIFEST).is_value()
        if in_ocdbt and not has_tree:
            raise CheckpointCorrupt(
                f"{item} has no {ocdbt.MANIFEST}: Orbax's per-process OCDBT folders were never merged"
            )
        in_ocdbt = has_tree  # older metadata does not have this entry
    files = item.kvstore_spec()
    opening = {
        name: {
            "driver": "zarr3" if zarr3 else "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": files,
                "path": folder_of_leaf(name),
                "cache_pool": "cache_pool#ocdbt",
            }
            if in_ocdbt
            else (item / name).kvstore_spec(),
            # Older metadata does not have this entry. There, chunks equal to the fill value were not stored.
            "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value", False),
            "open": True,
        }
        for name in kinds
    }
    stores = _opened(item, opening, deadline, finds_metadata=not zarr3)
    impls = {name: entry.key_impl for name, entry in array_metadatas(item).items() if entry.key_impl}
    specs = {
        name: ArraySpec(
            name=name,
            kind="key" if name in impls else kinds[name],
            shape=tuple(store.shape),
            dtype=zarr_dtype(np.dtype(store.dtype.numpy_dtype)) or store.dtype.name,
            chunk=chunk_shape(store),
            key_impl=impls.get(name),
        )
        for name, store in stores.items()
    }
    return specs, StoredArrays(item, stores)


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """What Orbax records of a ``jax.Array`` in addition to zarr's own metadata.

    Attributes:
        write_shape: Shape of the part of a shard that one process wrote. None if it is not recorded.
        key_impl: The implementation of typed PRNG keys. None for other arrays.
    """

    write_shape: tuple[int, ...] | None
    key_impl: str | None


def array_metadatas(item: StoragePath) -> dict[str, ArrayMetadata]:
    """Returns what all processes recorded of each array, by the name of its leaf. Empty if nothing is recorded.

    Raises:
        CheckpointCorrupt: A file of array metadata cannot be read.
    """
    metadata = {}
    for path in layout.array_metadata_files(item):
        contents = json_object(path.read_bytes(), path)
        try:
            for array in (entry["array_metadata"] for entry in contents["array_metadatas"]):
                shape = array.get("write_shape")
                impl = (array.get("ext_metadata") or {}).get("random_key_impl")
                metadata[array["param_name"]] = ArrayMetadata(None if shape is None else tuple(shape), impl)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error!r}") from error
    return metadata


def _opened(
    item: StoragePath, opening: Mapping[str, dict[str, Any]], deadline: Deadline, *, finds_metadata: bool = False
) -> dict[str, ts.TensorStore]:
    """Returns the opened arrays. With ``finds_metadata``, the file of zarr's metadata may have an unusual name.

    Raises:
        CheckpointCorrupt: An array cannot be opened. The message names it.
        TimeoutError: The deadline passed. The message names the leaf.
    """
    # Values are not cached. All of OCDBT's B+tree is cached, as each array is looked up in it.
    context = ocdbt.context(cache_pool={"total_bytes_limit": 0})
    futures = {name: ts.open(spec, context=context, read=True) for name, spec in opening.items()}
    stores = {}
    for name, future in futures.items():
        try:
            try:
                stores[name] = future.result(timeout=deadline.remaining_s())
            except ValueError:
                elsewhere = _metadata_key(opening[name]["kvstore"], context, deadline) if finds_metadata else None
                if elsewhere is None:
                    raise
                opening_array = ts.open({**opening[name], "metadata_key": elsewhere}, context=context, read=True)
                stores[name] = opening_array.result(timeout=deadline.remaining_s())
        except ValueError as error:
            raise CheckpointCorrupt(f"{item}: array {name!r} cannot be opened: {error}") from error
        except TimeoutError:
            raise TimeoutError(f"leaf {name!r}") from None
    return stores


def _metadata_key(kvstore: Mapping[str, Any], context: ts.Context, deadline: Deadline) -> str | None:
    """Returns the name of zarr 2's metadata if it is not the usual one (see Orbax's ``metadata_key``), else None."""
    with contextlib.suppress(ValueError):  # if it cannot be read, no name is found
        store = ts.KvStore.open(dict(kvstore), context=context).result(timeout=deadline.remaining_s())
        for key in store.list().result(timeout=deadline.remaining_s()):
            name = key.decode()
            if "/" in name or _CHUNK_NAME.fullmatch(name):
                continue
            value = store.read(key).result(timeout=deadline.remaining_s()).value
            if value.startswith(b"{") and json.loads(value).get("zarr_format") == 2:
                return name
    return None


def json_object(data: bytes | bytearray, path: StoragePath) -> dict[str, Any]:
    """Returns the contents of a JSON file.

    Raises:
        CheckpointCorrupt: It is not a JSON object; names ``path``.
    """
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error!r}") from error
