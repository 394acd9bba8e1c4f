"""A JAX array of a CPU device as a numpy view of its memory, where its layout is another than the usual one.

JAX itself would copy such an array as a whole to put it into the usual order, and keep the copy as long as the array.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Up to here a copy is no matter.
_SMALL_BYTES = 1 << 20


def as_it_lies(array: jax.Array) -> Any:
    """Returns a read-only view of ``array``, which is on one CPU device; itself where JAX gives one without a copy."""
    if array.ndim < 2 or array.nbytes <= _SMALL_BYTES:
        return array
    layout = array.format.layout
    order = tuple(range(array.ndim)) if layout is None else tuple(layout.major_to_minor)
    if layout is None or order == tuple(range(array.ndim)) or layout.tiling or layout.sub_byte_element_size_in_bits:
        return array
    itemsize = array.dtype.itemsize
    strides, step = [0] * array.ndim, itemsize
    for axis in reversed(order):
        strides[axis], step = step, step * array.shape[axis]
    return np.asarray(_Memory(jax.block_until_ready(array), tuple(strides))).view(array.dtype)


class _Memory:
    """Keeps an array's memory from being freed or donated while a numpy view of it lives."""

    def __init__(self, array: jax.Array, strides: tuple[int, ...]) -> None:
        self._array = array
        self._hold = array.__dlpack__()
        # numpy takes no array of, say, bfloat16 by DLPack, so it is told of the memory as bytes of such a size.
        self.__array_interface__ = {
            "version": 3,
            "data": (array.unsafe_buffer_pointer(), True),
            "shape": array.shape,
            "strides": strides,
            "typestr": _typestr(array.dtype.itemsize),
        }


def _typestr(itemsize: int) -> str:
    return f"<u{itemsize}" if itemsize in (1, 2, 4, 8) else "<c16"
