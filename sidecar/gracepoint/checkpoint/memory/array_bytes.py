"""The bytes of an array as they are stored, in C order and in the stored type, without a copy of the whole array.

Arrays with a transposed device layout are strided views, whose memory is in another order. ``SaveArgs`` may ask for
another type. Such values are copied in parts. Each part is as large as the memory that the caller provides.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.memory.parallel_copy import copy


class ArrayBytes:
    """The stored bytes of one array. Several threads may use it.

    Attributes:
        in_place: A view of all bytes. None if the values are in another order or type in memory.
    """

    def __init__(self, values: npt.NDArray[Any], dtype: np.dtype[Any]) -> None:
        """``dtype`` is the type that is stored."""
        self._values = values
        self._dtype = dtype
        self._size_bytes = values.size * dtype.itemsize
        as_stored = values.dtype == dtype and values.flags.c_contiguous
        self.in_place: npt.NDArray[np.uint8] | None = values.reshape(-1).view(np.uint8) if as_stored else None

    def __len__(self) -> int:
        return self._size_bytes

    def copy(self, start: int, into: npt.NDArray[np.uint8]) -> None:
        """Fills ``into`` with the bytes from ``start`` on. The range must begin and end at boundaries of values."""
        if self.in_place is not None:
            np.copyto(into, self.in_place[start : start + len(into)])  # releases the GIL
        else:
            _copy(self._values, start // self._dtype.itemsize, into.view(self._dtype))


def stored_values(values: npt.NDArray[Any], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Returns ``values`` as ``dtype`` in C order: the same object if possible, else a copy."""
    if values.dtype == dtype and values.flags.c_contiguous:
        return values
    stored = np.empty(values.shape, dtype)
    copy(values, stored)
    return stored


def _copy(values: npt.NDArray[Any], start: int, into: npt.NDArray[Any]) -> None:
    """Fills ``into``, which is flat, with the values from ``start`` on in C order. Copies whole rows at once."""
    if values.ndim < 2:
        copy(values.reshape(-1)[start : start + into.size], into)
        return
    row_size, done = math.prod(values.shape[1:]), 0
    while done < into.size:
        row, begun = divmod(start + done, row_size)
        rows = 0 if begun else (into.size - done) // row_size
        if rows:
            size = rows * row_size
            copy(values[row : row + rows], into[done : done + size].reshape(rows, *values.shape[1:]))
        else:
            size = min(row_size - begun, into.size - done)
            _copy(values[row], begun, into[done : done + size])
        done += size
