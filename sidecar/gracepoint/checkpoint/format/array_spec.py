"""What is stored of a leaf: its array as zarr describes it, its chunks, and the bytes of its values.

Loads no JAX, as a worker process that writes saves does not need it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["array", "key", "numpy", "scalar"]
Index = tuple[tuple[int, int], ...]  # start and stop in each dimension


def folder_of_leaf(name: str) -> str:
    """Returns the folder of a leaf's files below the item's folder, with a trailing slash.

    It is empty if the state is a single leaf, which has no name.
    """
    return f"{name}/" if name else ""


@dataclasses.dataclass(frozen=True)
class Format:
    """How arrays are stored in files. All arrays of a checkpoint have the same format.

    Attributes:
        zarr: Version of zarr.
        ocdbt: If True, each process's chunks are in a separate B+tree (``ocdbt.process_<N>/``), and a merged tree
            refers to all of them. If False, each chunk is a file.
        zstd_level: Level at which chunks are compressed. None: chunks are not compressed.
    """

    zarr: Literal[2, 3] = 2
    ocdbt: bool = False
    zstd_level: int | None = None

    @property
    def files_hold_values(self) -> bool:
        """True if each chunk is a file of its values' bytes in C order. Then both have the same checksum."""
        return not self.ocdbt and self.zstd_level is None

    def to_json(self) -> list[Any]:
        return [self.zarr, self.ocdbt, self.zstd_level]


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """What is stored of a leaf. It is the same in all processes, and is all that opening the chunks needs.

    Attributes:
        name: Name of the leaf.
        kind: Kind of the leaf: a JAX array, a typed PRNG key, a numpy array, or a scalar of Python or numpy.
        shape: Shape of the whole array.
        dtype: Stored type, as zarr2 names it: "<f4", "bfloat16".
        chunk: Shape of one chunk. It divides the shape of every shard.
        key_impl: Implementation of a typed PRNG key, whose data is uint32 with one more axis. None for other leaves.
        write_shape: Shape of the part of a shard that one process writes. None if that part is one chunk.
        format: How all arrays of the checkpoint are stored.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    key_impl: str | None = None
    write_shape: tuple[int, ...] | None = None
    format: Format = Format()

    def to_json(self) -> list[Any]:
        write_shape, form = self.write_shape, self.format.to_json()
        return [self.name, self.kind, self.shape, self.dtype, self.chunk, self.key_impl, write_shape, form]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> ArraySpec:
        name, kind, shape, dtype, chunk, key_impl, write_shape, form = value
        written = None if write_shape is None else tuple(write_shape)
        return cls(name, kind, tuple(shape), dtype, tuple(chunk), key_impl, written, _format(*form))

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The type of the stored values."""
        return _numpy_dtype(self.dtype)

    @property
    def chunk_bytes(self) -> int:
        """Size of the values of one chunk in bytes."""
        return math.prod(self.chunk) * self.numpy_dtype.itemsize

    @property
    def metadata_file(self) -> str:
        """The path of the array's own metadata, below the item's folder."""
        return f"{folder_of_leaf(self.name)}{'.zarray' if self.format.zarr == 2 else 'zarr.json'}"

    def chunk_file(self, index: Index) -> str:
        """Returns the path of the chunk at ``index`` below the item's folder. In OCDBT, this is its key."""
        grid = [str(start // max(1, size)) for (start, _), size in zip(index, self.chunk, strict=True)]
        if self.format.zarr == 3:
            return folder_of_leaf(self.name) + "/".join(["c", *grid])
        return f"{folder_of_leaf(self.name)}{'.'.join(grid) or '0'}"

    @property
    def metadata(self) -> dict[str, Any]:
        """The array's own metadata, as Orbax's readers understand it."""
        return self._zarr2 if self.format.zarr == 2 else self._zarr3

    @property
    def _zarr2(self) -> dict[str, Any]:
        level = self.format.zstd_level
        return {
            "chunks": self._zarr_chunk,
            "compressor": None if level is None else {"id": "zstd", "level": level},
            "dimension_separator": ".",
            "dtype": self.dtype,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(self.shape),
            "zarr_format": 2,
        }

    @property
    def _zarr3(self) -> dict[str, Any]:
        endian = {"configuration": {"endian": "little"}} if self.numpy_dtype.itemsize > 1 else {}
        level = self.format.zstd_level
        compression = [] if level is None else [{"name": "zstd", "configuration": {"level": level}}]
        return {
            "zarr_format": 3,
            "node_type": "array",
            "shape": list(self.shape),
            "data_type": self.numpy_dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": self._zarr_chunk}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _ZERO.get(self.numpy_dtype.kind, 0.0),
            "codecs": [{"name": "bytes", **endian}, *compression],
        }

    @property
    def _zarr_chunk(self) -> list[int]:
        return [max(1, size) for size in self.chunk]  # zarr has no chunks without elements

    def opening(self, kvstore: dict[str, Any]) -> dict[str, Any]:
        """Returns a TensorStore spec of the array in ``kvstore``, its own folder. Opening it reads no metadata."""
        return {
            "driver": "zarr" if self.format.zarr == 2 else "zarr3",
            "kvstore": kvstore,
            "metadata": self.metadata,
            "assume_metadata": True,
        }


def tree_digest(specs: Sequence[ArraySpec]) -> str:
    """Returns a digest of ``specs``. Processes write files of one tree only if their digests are equal."""
    return hashlib.sha256(json.dumps([spec.to_json() for spec in specs]).encode()).hexdigest()


def zarr_dtype(dtype: np.dtype[Any]) -> str | None:
    """Returns zarr2's name of ``dtype``. None if zarr2 or TensorStore does not support the type."""
    if dtype.type.__module__ == "ml_dtypes":
        return dtype.name if _is_known(dtype.name) else None
    if (
        dtype.kind in "biu"
        or (dtype.kind == "f" and dtype.itemsize <= 8)
        or (dtype.kind == "c" and dtype.itemsize <= 16)
    ):
        return dtype.newbyteorder("<").str
    return None


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Returns the bytes of ``array`` in C order, without a copy if the array is in C order already."""
    flat = np.asarray(array, order="C").reshape(-1)
    return flat.view(np.uint8).data


# The fill value in zarr3's terms, by numpy's kind; other types (bfloat16, float8, int4, ...) take a number.
_ZERO: dict[str, Any] = {"b": False, "i": 0, "u": 0, "c": [0.0, 0.0]}


@functools.cache
def _is_known(name: str) -> bool:
    import tensorstore as ts  # imported here, as a worker process that writes saves does not need it

    try:
        ts.dtype(name)
    except ValueError:
        return False
    return True


@functools.cache
def _format(*values: Any) -> Format:
    return Format(*values)


@functools.cache
def _numpy_dtype(name: str) -> np.dtype[Any]:
    if name[0] in "<|":
        return np.dtype(name)
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return dtype


def chunk_count(spec: ArraySpec) -> int:
    """Returns the number of chunks of an array."""
    if 0 in spec.shape:
        return 0
    return math.prod(-(-length // size) for length, size in zip(spec.shape, spec.chunk, strict=True))


def grid(spec: ArraySpec) -> list[Index]:
    """Returns the indices of all chunks of an array."""
    if 0 in spec.shape:
        return []  # an array without elements has no chunks in zarr
    return chunks_within(tuple((0, length) for length in spec.shape), spec.chunk)


def chunks_within(region: Index, chunk: Sequence[int]) -> list[Index]:
    """Returns the indices of the chunks that ``region`` consists of. ``region`` must begin at a boundary of chunks."""
    axes = [
        [(start, min(start + size, stop)) for start in range(first, stop, size)]
        for (first, stop), size in zip(region, chunk, strict=True)
    ]
    return list(itertools.product(*axes))


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of the leaf ``leaves[leaf]`` that this process holds.

    Attributes:
        leaf: Index of the leaf.
        file: Path below the item's folder. In OCDBT, the key.
        index: Start and stop of the chunk in each axis of the array.
        mine: True if this process writes the chunk. If False, this process only records its checksum.
        bytes: Size of the chunk's values in the stored type.
    """

    leaf: int
    file: str
    index: Index
    mine: bool
    bytes: int
