"""What is stored of a leaf: its array, in zarr's terms, and its bytes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Kind = Literal["array", "key", "numpy", "scalar", "empty"]


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """What is stored of a leaf: the same in all processes, and enough to open its chunks."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    dtype: str  # of zarr2: "<f4", "bfloat16"
    chunk: tuple[int, ...]  # shape of one chunk
    key_impl: str | None = None  # of a typed PRNG key, whose data is uint32 with one more axis

    def to_json(self) -> list[Any]:
        return [self.name, self.kind, self.shape, self.dtype, self.chunk, self.key_impl]

    @classmethod
    def from_json(cls, value: Sequence[Any]) -> ArraySpec:
        name, kind, shape, dtype, chunk, key_impl = value
        return cls(name, kind, tuple(shape), dtype, tuple(chunk), key_impl)

    @property
    def zarray(self) -> dict[str, Any]:
        """The array's metadata in zarr2, as Orbax writes it."""
        return {
            "chunks": [max(1, size) for size in self.chunk],
            "compressor": None,
            "dimension_separator": ".",
            "dtype": self.dtype,
            "fill_value": None,
            "filters": None,
            "order": "C",
            "shape": list(self.shape),
            "zarr_format": 2,
        }


def tree_digest(specs: Sequence[ArraySpec]) -> str:
    """Returns what must be equal in all processes for their files to be of one tree."""
    return hashlib.sha256(json.dumps([spec.to_json() for spec in specs]).encode()).hexdigest()


def zarr_dtype(dtype: np.dtype[Any]) -> str | None:
    """Returns zarr2's name of ``dtype``, or None if it has none."""
    if dtype.type.__module__ == "ml_dtypes":
        return dtype.name
    if (
        dtype.kind in "biu"
        or (dtype.kind == "f" and dtype.itemsize <= 8)
        or (dtype.kind == "c" and dtype.itemsize <= 16)
    ):
        return dtype.newbyteorder("<").str
    return None


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """Returns the bytes of ``array`` in C order, without a copy where they are so already."""
    flat = np.asarray(array, order="C").reshape(-1)
    return flat.view(np.uint8).data
