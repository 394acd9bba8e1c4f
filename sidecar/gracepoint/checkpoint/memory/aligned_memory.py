"""Host memory that begins at such addresses as others ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: JAX's CPU backend takes over host memory with this alignment instead of copying it.
JAX_ALIGNMENT_BYTES = 64


def padded(size_bytes: int, alignment_bytes: int) -> int:
    """Returns ``size_bytes``, or how many more it takes up to a multiple of ``alignment_bytes``."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def aligned_empty(
    shape: Sequence[int], dtype: np.dtype[Any], alignment_bytes: int = JAX_ALIGNMENT_BYTES
) -> npt.NDArray[Any]:
    """Returns an array of undefined values that begins at a multiple of ``alignment_bytes``."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + alignment_bytes, np.uint8)
    start = -memory.ctypes.data % alignment_bytes
    return memory[start : start + size_bytes].view(dtype).reshape(shape)
