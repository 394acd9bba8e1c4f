"""What large values are written with: aligned memory for one block, and files that are synced later.

Values are written and added to their checksum block by block. A block that is not in memory as it is stored, or not
aligned as direct I/O needs it, is copied into a ``Buffer``. A buffer belongs to one writer at a time. This module has
no threads and no state.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checksum import crc32

#: Alignment of direct I/O, in memory and in the file. No storage in use has larger sectors.
ALIGNMENT_BYTES = 4096
#: Size of one write call. Larger blocks were no faster, and each thread has a buffer of this size.
BLOCK_BYTES = 1 << 21


class Buffer:
    """Aligned memory for one block. It is allocated and touched at its first use, or by ``make_ready``."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] | None = None

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The memory."""
        if self._memory is None:
            self._memory = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
            self._memory.fill(0)
        return self._memory

    def make_ready(self) -> None:
        """Allocates and touches the memory."""
        _ = self.bytes


def checksum_of(data: ArrayBytes, buffer: Buffer, go_on: Callable[[], None]) -> int:
    """Returns the CRC-32 of ``data``.

    Args:
        data: The values.
        buffer: Memory for data in another order or type than the stored one.
        go_on: Called before each block. An error that it raises ends the calculation.
    """
    checksum = 0
    for offset in range(0, len(data), BLOCK_BYTES):
        go_on()
        checksum = crc32(block_of(data, offset, buffer).data, checksum)
    return checksum


def block_of(data: ArrayBytes, offset: int, buffer: Buffer) -> npt.NDArray[np.uint8]:
    """Returns the block at ``offset``: in place if possible, else copied into ``buffer``."""
    if data.in_place is not None:
        return data.in_place[offset : offset + BLOCK_BYTES]
    block = buffer.bytes[: min(BLOCK_BYTES, len(data) - offset)]
    data.copy(offset, block)
    return block


class UnsyncedFile:
    """A file that is written, open and not yet synced. It belongs to one thread at a time.

    The descriptor that wrote the file is kept, as an error of the disk may be reported to it alone.
    """

    def __init__(self, key: str, descriptor: int) -> None:
        """``key`` is the path of the file. The object closes ``descriptor``."""
        self._key = key
        self._descriptor = descriptor

    def sync(self) -> None:
        """Makes the contents durable, and closes the file.

        Raises:
            OSError: The file cannot be synced. The error names the path.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.filename is None:
                error.filename = self._key
            raise
        finally:
            os.close(self._descriptor)

    def drop(self) -> None:
        """Closes the file. A crash may lose its contents."""
        os.close(self._descriptor)


#: Called with a file that is written. Has the file synced later.
Later = Callable[[UnsyncedFile], None]
