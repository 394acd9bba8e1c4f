"""Allocates host memory with a given alignment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

#: JAX's CPU backend uses host memory with this alignment without copying it.
JAX_ALIGNMENT_BYTES = 64


def padded(size_bytes: int, alignment_bytes: int) -> int:
    """Returns ``size_bytes`` rounded up to a multiple of ``alignment_bytes``."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def aligned_empty(
    shape: Sequence[int], dtype: np.dtype[Any], alignment_bytes: int = JAX_ALIGNMENT_BYTES
) -> npt.NDArray[Any]:
    """Returns an array of undefined values whose address is a multiple of ``alignment_bytes``."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + alignment_bytes, np.uint8)
    start = -memory.ctypes.data % alignment_bytes
    return memory[start : start + size_bytes].view(dtype).reshape(shape)
