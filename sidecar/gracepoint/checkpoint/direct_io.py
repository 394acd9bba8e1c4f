"""Files written as fast as the storage takes them, with their checksums computed on the way.

Where the file system has direct I/O (``O_DIRECT``), values go to the disk past the page cache, whose pages are slow
to come by for the first time and which training may need. Direct I/O wants aligned memory, so each block is copied
into a ``Buffer`` first, and its checksum is computed while it is in the processor's cache. Elsewhere (tmpfs, some
network file systems) blocks are written from where they are, and write-back is started early, so that little is left
to wait for at the end.

Nothing here has threads or state; a buffer belongs to one writer at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.checksum import crc32

#: What direct I/O is aligned to, in memory and in the file: no storage in use has larger sectors.
ALIGNMENT_BYTES = 4096
#: What is written in one call.
BLOCK_BYTES = 4 << 20
# Copied and summed at once: stays in a core's own cache between the two, and is worth letting other threads run.
_HOT_BYTES = 1 << 18
# Up to here the page cache costs less than aligning the file's end.
_SMALL_BYTES = 1 << 16

_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
# How a file system says that it has no direct I/O, or not for memory of this alignment.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class Buffer:
    """Aligned memory for one block, touched."""

    def __init__(self) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, BLOCK_BYTES), np.uint8)
        self.bytes.fill(0)


def has_direct_io(folder: Path) -> bool:
    """Returns whether files in ``folder`` can be written past the page cache; writes and removes one.

    A file system that takes unaligned memory all the same keeps pages of its own.

    Raises:
        OSError: Nothing can be written there.
    """
    probe = folder / f".gracepoint-direct.{secrets.token_hex(8)}"
    memory = np.frombuffer(mmap.mmap(-1, 2 * ALIGNMENT_BYTES), np.uint8)
    try:
        descriptor = os.open(probe, _OPEN_NEW | os.O_DIRECT, 0o644)
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


def write_file(path: Path, data: memoryview, buffer: Buffer | None, go_on: Callable[[], None]) -> int:
    """Writes ``data`` as the whole of ``path`` and syncs it, but not its folder.

    Args:
        path: Of the file; its folder exists.
        data: Its bytes.
        buffer: For direct I/O, which the file system must have; None: through the page cache.
        go_on: Called before each block; what it raises ends the writing.

    Returns:
        The CRC-32 of ``data``.

    Raises:
        OSError: It cannot be written; names the path.
    """
    direct = buffer is not None and len(data) > _SMALL_BYTES
    try:
        descriptor = os.open(path, _OPEN_NEW | (os.O_DIRECT if direct else 0), 0o644)
        try:
            checksum = (
                _write_directly(descriptor, data, buffer, go_on)
                if buffer is not None and direct
                else _write_through_cache(descriptor, data, go_on)
            )
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
    return checksum


def _write_directly(descriptor: int, data: memoryview, buffer: Buffer, go_on: Callable[[], None]) -> int:
    source, block = np.frombuffer(data, np.uint8), buffer.bytes
    checksum = 0
    for offset in range(0, len(source), BLOCK_BYTES):
        go_on()
        size_bytes = min(BLOCK_BYTES, len(source) - offset)
        for first in range(0, size_bytes, _HOT_BYTES):
            hot = block[first : min(first + _HOT_BYTES, size_bytes)]
            np.copyto(hot, source[offset + first :][: len(hot)])  # lets other threads run, as assigning a slice doesn't
            checksum = crc32(hot.data, checksum)
        aligned_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        block[size_bytes:aligned_bytes] = 0
        _write_block(descriptor, block[:aligned_bytes], offset)
    if len(source) % ALIGNMENT_BYTES:
        os.ftruncate(descriptor, len(source))
    return checksum


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
            # Near a limit less than a block is taken, or nothing: the page cache takes the rest, or says why not.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)


def _is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _write_through_cache(descriptor: int, data: memoryview, go_on: Callable[[], None]) -> int:
    checksum = 0
    for offset in range(0, len(data), BLOCK_BYTES):
        go_on()
        block = data[offset : offset + BLOCK_BYTES]
        for first in range(0, len(block), _HOT_BYTES):
            hot = block[first : first + _HOT_BYTES]
            checksum = crc32(hot, checksum)
            written_bytes = 0
            while written_bytes < len(hot):
                written_bytes += os.pwrite(descriptor, hot[written_bytes:], offset + first + written_bytes)
        if len(data) > BLOCK_BYTES:
            # Linux begins to write back what it is told will not be read, and does not wait for it.
            os.posix_fadvise(descriptor, offset, len(block), os.POSIX_FADV_DONTNEED)
    return checksum


def _takes(descriptor: int, data: memoryview) -> bool:
    try:
        return os.pwrite(descriptor, data[:ALIGNMENT_BYTES], 0) == ALIGNMENT_BYTES
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return False
