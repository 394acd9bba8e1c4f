"""Compares stored values with their recorded sizes and checksums, and waits for values to appear.

This module has no threads and no state.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator, Mapping

from gracepoint.checkpoint.storage.backend import StaleGeneration
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointCorrupt

_LOOK_EVERY_S = 0.1
_BLOCK_BYTES = 4 << 20  # large enough that the threads that compute checksums seldom wait for the GIL


def must_not_write(error: OSError) -> bool:
    """Returns whether the error says that this process may not write there. Credentials that fail do not say so."""
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


def appears(path: StoragePath, *, within_s: float, sleep: Callable[[float], object]) -> bool:
    """Returns whether ``path`` exists, or appears within about ``within_s`` seconds."""
    for _ in range(max(1, round(within_s / _LOOK_EVERY_S))):
        if path.exists():
            return True
        sleep(_LOOK_EVERY_S)
    return False


def check_size(path: StoragePath, size_bytes: int) -> None:
    """Raises CheckpointCorrupt if ``path`` is missing or has another size. The message names it."""
    entry = path.entry()
    _compare(path, None if entry is None else entry.bytes, size_bytes)


def check_sizes(folder: StoragePath, sizes_bytes: Mapping[str, int]) -> None:
    """Does as ``check_size`` for several paths below a folder.

    In a store that cannot rename, each look takes a round trip. There the folder is listed.
    """
    if folder.backend.renames:
        for path, size_bytes in sizes_bytes.items():
            check_size(folder / path, size_bytes)
        return
    listed = {entry.key: entry.bytes for entry in folder.entries()}
    for path, size_bytes in sizes_bytes.items():
        _compare(folder / path, listed.get(path), size_bytes)


def _compare(path: StoragePath, found_bytes: int | None, size_bytes: int) -> None:
    if found_bytes is None:
        raise CheckpointCorrupt(f"{path} is missing")
    if found_bytes != size_bytes:
        raise CheckpointCorrupt(f"{path} has {found_bytes} bytes, expected {size_bytes}")


def size_of(path: StoragePath) -> int:
    """Returns the size of a value.

    Raises:
        FileNotFoundError: The value does not exist.
    """
    entry = path.entry()
    if entry is None:
        raise FileNotFoundError(errno.ENOENT, "expected a file, found none", str(path))
    return entry.bytes


def crc32_of(path: StoragePath) -> int:
    """Returns the CRC-32 of a value, reading it in blocks."""
    checksum = offset = 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with path.open() as reader:
        while count := reader.read_into(buffer, offset):
            checksum = crc32(buffer[:count], checksum)
            offset += count
    return checksum


@contextlib.contextmanager
def _staying(path: StoragePath) -> Iterator[None]:
    """Raises CheckpointCorrupt if ``path`` is missing, or is replaced or deleted while it is read."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing") from None
    except StaleGeneration as error:
        raise CheckpointCorrupt(f"{path} was replaced or deleted while it was read") from error


def check_contents(path: StoragePath, size_bytes: int, checksum: int) -> None:
    """Compares all of ``path`` with its recorded size and checksum.

    Raises:
        CheckpointCorrupt: As ``read_checked``.
    """
    check_size(path, size_bytes)
    with _staying(path):
        found = crc32_of(path)
    if found != checksum:
        raise CheckpointCorrupt(f"{path}: its contents do not fit its checksum")


def read_checked(path: StoragePath, size_bytes: int, expected: int, out: memoryview) -> None:
    """Reads all of ``path`` into ``out``.

    Args:
        path: Location of the value.
        size_bytes: The recorded size of the value.
        expected: The recorded CRC-32 of the value.
        out: Memory of the same size.

    Raises:
        CheckpointCorrupt: The value is missing, has another size or checksum, or was replaced or deleted while it was
            read. The message names the path.
    """
    with _staying(path), path.open() as reader:
        if reader.size_bytes != size_bytes:
            raise CheckpointCorrupt(f"{path} has {reader.size_bytes} bytes, expected {size_bytes}")
        if size_bytes != len(out):
            raise CheckpointCorrupt(f"{path} has {size_bytes} bytes, expected {len(out)} by its array's type and shape")
        position = checksum = 0
        while position < len(out):
            count = reader.read_into(out[position : position + reader.best_bytes], position)
            if count == 0:
                raise CheckpointCorrupt(f"{path} has {position} bytes, expected {size_bytes}")
            checksum = crc32(out[position : position + count], checksum)
            position += count
    if checksum != expected:
        raise CheckpointCorrupt(f"{path}: its contents do not fit its checksum")
