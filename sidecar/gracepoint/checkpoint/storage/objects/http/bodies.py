"""What requests send: the bytes of an array, whole or a part of them.

A body can be sent several times, and by several threads at once. This module has no threads and no state.
"""

from __future__ import annotations

from collections.abc import Iterable

from gracepoint.checkpoint.memory.array_bytes import ArrayBytes
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.checkpoint.storage.direct_io import BLOCK_BYTES, Buffer
from gracepoint.checkpoint.storage.objects.http.connection import Bytes


class ArrayBody:
    """The bytes of an array. If they are not in place, each sender copies them block by block.

    Args:
        data: The array.
        first: The first byte that is sent.
        stop: The byte after the last one. None: the end of the array.
    """

    def __init__(self, data: ArrayBytes, first: int = 0, stop: int | None = None) -> None:
        self._data = data
        self._first = first
        self._stop = len(data) if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._first

    def part(self, first: int, stop: int) -> ArrayBody:
        """Returns the part from ``first`` to ``stop``, which must be boundaries of values."""
        return ArrayBody(self._data, self._first + first, self._first + stop)

    def crc32(self) -> int:
        """Returns the CRC-32 of the bytes."""
        checksum = 0
        for block in self.blocks():
            checksum = crc32(block, checksum)
        return checksum

    def blocks(self) -> Iterable[memoryview]:
        """Yields the bytes in order."""
        if self._data.in_place is not None:
            yield from Bytes(self._data.in_place.data[self._first : self._stop]).blocks()
            return
        buffer = Buffer().bytes
        for offset in range(self._first, self._stop, BLOCK_BYTES):
            block = buffer[: min(BLOCK_BYTES, self._stop - offset)]
            self._data.copy(offset, block)
            yield from Bytes(block.data).blocks()
