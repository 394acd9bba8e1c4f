"""Writes files as fast as the storage allows, and computes their checksums meanwhile.

If the file system has direct I/O (``O_DIRECT``), writes bypass the page cache. New pages of the cache are slow to
allocate, and training may need the memory. Direct I/O needs aligned memory. Values that are not aligned are copied
into a ``Buffer`` block by block, and their checksum is computed while they are in the processor's cache.

Without direct I/O (tmpfs, some network file systems, macOS), write-back is started early, so that the sync at the end
takes little time. With and without direct I/O, values in another memory order or type than the stored one are copied
through a ``Buffer``.

This module has no threads and no state. A buffer belongs to one writer at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.memory import ArrayBytes, crc32, padded

#: Alignment of direct I/O, in memory and in the file. No storage in use has larger sectors.
ALIGNMENT_BYTES = 4096
#: Size of one write call. Larger blocks were no faster, and each thread has a buffer of this size.
BLOCK_BYTES = 1 << 21
# Size of a part that is copied and then added to the checksum. It stays in the cache of the core between the two
# steps, and is large enough to be worth releasing the GIL.
_HOT_BYTES = 1 << 18
# For files up to this size, the page cache costs less than aligning the end of the file.
_SMALL_BYTES = 1 << 16

_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
# 0: the system has no direct I/O.
_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Errors of a file system that has no direct I/O, or none for memory of this alignment.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


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


def has_direct_io(folder: Path) -> bool:
    """Returns whether writes to files in ``folder`` can bypass the page cache. Writes and removes a file.

    If a file system also accepts unaligned memory, the result is False: it keeps pages of its own.

    Raises:
        OSError: Nothing can be written there.
    """
    if not _DIRECT:
        return False
    probe = folder / f".gracepoint-direct.{secrets.token_hex(8)}"
    memory = np.frombuffer(mmap.mmap(-1, 2 * ALIGNMENT_BYTES), np.uint8)
    try:
        descriptor = os.open(probe, _OPEN_NEW | _DIRECT, 0o644)
        try:
            return _takes(descriptor, memory[:ALIGNMENT_BYTES].data) and not _takes(descriptor, memory[1:-1].data)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            probe.unlink()  # Linux makes the file before it refuses the flag


def write_file(
    key: str,
    data: ArrayBytes,
    buffer: Buffer,
    go_on: Callable[[], None],
    *,
    direct: bool,
    later: Later | None = None,
) -> int:
    """Writes ``data`` as the whole of the file ``key`` and syncs it, but not its folder.

    Args:
        key: Path of the file. Its folder must exist.
        data: Contents of the file.
        buffer: Memory for data that cannot be written in place.
        go_on: Called before each block. An error that it raises ends the write.
        direct: True to use direct I/O if the file is large enough. The file system must have it. False to write
            through the page cache.
        later: Called with the file in place of the sync. None: the file is synced.

    Returns:
        The CRC-32 of ``data``.

    Raises:
        OSError: The file cannot be written. The error names the path.
    """
    direct = direct and len(data) > _SMALL_BYTES
    try:
        descriptor = os.open(key, _OPEN_NEW | (_DIRECT if direct else 0), 0o644)
        try:
            write = _write_directly if direct else _write_through_cache
            checksum = write(descriptor, data, buffer, go_on)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        if error.filename is None:
            error.filename = key
        raise
    file = UnsyncedFile(key, descriptor)
    if later is None:
        file.sync()
    else:
        later(file)
    return checksum


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
        checksum = crc32(_block(data, offset, buffer).data, checksum)
    return checksum


def _block(data: ArrayBytes, offset: int, buffer: Buffer) -> npt.NDArray[np.uint8]:
    """Returns the block at ``offset``: in place if possible, else copied into ``buffer``."""
    if data.in_place is not None:
        return data.in_place[offset : offset + BLOCK_BYTES]
    block = buffer.bytes[: min(BLOCK_BYTES, len(data) - offset)]
    data.copy(offset, block)
    return block


def _write_directly(descriptor: int, data: ArrayBytes, buffer: Buffer, go_on: Callable[[], None]) -> int:
    is_aligned = data.in_place is not None and data.in_place.ctypes.data % ALIGNMENT_BYTES == 0
    checksum = 0
    for offset in range(0, len(data), BLOCK_BYTES):
        go_on()
        size_bytes = min(BLOCK_BYTES, len(data) - offset)
        if is_aligned and size_bytes % ALIGNMENT_BYTES == 0:
            block = _block(data, offset, buffer)
            checksum = crc32(block.data, checksum)
        else:
            block, checksum = _copied(data, offset, size_bytes, buffer.bytes, checksum)
        _write_block(descriptor, block, offset)
    if len(data) % ALIGNMENT_BYTES:
        os.ftruncate(descriptor, len(data))
    return checksum


def _copied(
    data: ArrayBytes, offset: int, size_bytes: int, memory: npt.NDArray[np.uint8], checksum: int
) -> tuple[npt.NDArray[np.uint8], int]:
    """Copies a block into ``memory``. Returns it padded with zeros to the alignment, and the updated checksum."""
    # Values in another memory order are traversed several times if they are copied in smaller parts.
    part_bytes = _HOT_BYTES if data.in_place is not None else BLOCK_BYTES
    for first in range(0, size_bytes, part_bytes):
        part = memory[first : min(first + part_bytes, size_bytes)]
        data.copy(offset + first, part)
        checksum = crc32(part.data, checksum)
    aligned_bytes = padded(size_bytes, ALIGNMENT_BYTES)
    memory[size_bytes:aligned_bytes] = 0
    return memory[:aligned_bytes], checksum


def _write_block(descriptor: int, block: npt.NDArray[np.uint8], offset: int) -> None:
    written_bytes = 0
    while written_bytes < len(block):
        try:
            count = os.pwrite(descriptor, block[written_bytes:].data, offset + written_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL or not _is_direct(descriptor):
                raise
            count = 0
        written_bytes += count
        if written_bytes % ALIGNMENT_BYTES or count == 0:
            # Near a limit, less than a block is written, or nothing. The page cache takes the rest, or an
            # error says why it cannot.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT)


def _write_through_cache(descriptor: int, data: ArrayBytes, buffer: Buffer, go_on: Callable[[], None]) -> int:
    checksum = 0
    for offset in range(0, len(data), BLOCK_BYTES):
        go_on()
        block = _block(data, offset, buffer).data
        for first in range(0, len(block), _HOT_BYTES):
            hot = block[first : first + _HOT_BYTES]
            checksum = crc32(hot, checksum)
            written_bytes = 0
            while written_bytes < len(hot):
                written_bytes += os.pwrite(descriptor, hot[written_bytes:], offset + first + written_bytes)
        if len(data) > BLOCK_BYTES and sys.platform == "linux":
            # With this advice Linux starts to write back these pages, and does not wait for it.
            os.posix_fadvise(descriptor, offset, len(block), os.POSIX_FADV_DONTNEED)
    return checksum


def _takes(descriptor: int, data: memoryview) -> bool:
    try:
        return os.pwrite(descriptor, data[:ALIGNMENT_BYTES], 0) == ALIGNMENT_BYTES
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
