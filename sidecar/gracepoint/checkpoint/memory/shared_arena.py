"""Arrays in one piece of shared memory, which another process can map without a copy.

One thread reserves the arrays. The memory lives as long as an array in it, or the arena.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.async_calls.processes.shared_memory import Block
from gracepoint.checkpoint.memory.aligned_memory import JAX_ALIGNMENT_BYTES, padded


class SharedArena:
    """Shared memory of ``size_bytes`` in which arrays are reserved. ``room_for`` says how much an array needs.

    Attributes:
        block: The memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self.block = Block(max(1, size_bytes))
        self._memory = np.frombuffer(self.block.memory, np.uint8)
        self._used_bytes = 0

    @staticmethod
    def room_for(size_bytes: int, alignment_bytes: int = JAX_ALIGNMENT_BYTES) -> int:
        """Returns the bytes that an array of ``size_bytes`` takes at most."""
        return size_bytes + alignment_bytes

    def empty(
        self, shape: Sequence[int], dtype: np.dtype[Any], alignment_bytes: int = JAX_ALIGNMENT_BYTES
    ) -> npt.NDArray[Any]:
        """Returns an array of undefined values whose address is a multiple of ``alignment_bytes``."""
        start = padded(self._used_bytes, alignment_bytes)
        self._used_bytes = start + math.prod(shape) * dtype.itemsize
        return array_at(self._memory, start, shape, dtype)

    def offset_of(self, array: npt.NDArray[Any]) -> int:
        """Returns where an array of this arena begins in the memory."""
        return int(array.ctypes.data - self._memory.ctypes.data)


def array_at(
    memory: npt.NDArray[np.uint8], offset: int, shape: Sequence[int], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Returns the array that begins at ``offset`` of ``memory``."""
    size_bytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size_bytes].view(dtype).reshape(shape)
