"""Numpy views of JAX arrays on CPU devices whose memory layout is not the usual row-major one.

JAX itself would copy such an array as a whole into row-major order, and keep the copy as long as the array lives.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

# Arrays up to this size may be copied: the cost does not matter.
_SMALL_BYTES = 1 << 20


def as_it_lies(array: jax.Array) -> Any:
    """Returns a read-only view of ``array``, which must be on one CPU device.

    Returns ``array`` itself if JAX can view it without a copy, or if it is small.
    """
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
        # numpy does not take types such as bfloat16 by DLPack, so the memory is described as a type of the same size.
        self.__array_interface__ = {
            "version": 3,
            "data": (array.unsafe_buffer_pointer(), True),
            "shape": array.shape,
            "strides": strides,
            "typestr": _typestr(array.dtype.itemsize),
        }


def _typestr(itemsize: int) -> str:
    return f"<u{itemsize}" if itemsize in (1, 2, 4, 8) else "<c16"
