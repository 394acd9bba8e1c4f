"""Checks what is stored: sizes and checksums of values, whether they have appeared, and whether there is room for more.

How much room is left is known of file systems. Object stores show only by an error that a quota is used up. Of files
that the user's code wrote, ``record_files`` takes sizes and checksums once they are durable. This module has no threads
and no state.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gracepoint.checkpoint.storage.locations import local_path
from gracepoint.checkpoint.storage.storage_path import StaleGeneration, StoragePath, sync_folders
from gracepoint.checksum import crc32
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

    In a store that is far, the folder is listed.
    """
    if not folder.is_far:
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
        actual = crc32_of(path)
    if actual != checksum:
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


#: What systems and stores say of storage that cannot be reached now. That a bucket does not exist, and that credentials
#: fail, have other numbers.
_AWAY = frozenset(
    {
        errno.EAGAIN,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)


def is_away(error: BaseException) -> bool:
    """Returns whether ``error`` says that storage does not answer now: no connection, no answer, a mount that is gone.

    Nothing says that access to it is wrong, so it may succeed later.
    """
    return isinstance(error, OSError) and error.errno in _AWAY and not isinstance(error, StaleGeneration)


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_REASONS = {
    errno.ENOSPC: "the file system is full: delete something, make it larger, or keep fewer steps",
    errno.EDQUOT: "a quota is used up: raise it, delete something, or keep fewer steps",
    errno.EFBIG: "a file may not be so large here: see `ulimit -f` and the limits of the file system, or write smaller "
    "chunks",
    errno.EROFS: "the file system is mounted read-only: was that meant, or has it had an error?",
}
#: TensorStore's errors have no number.
_WORDS = {os.strerror(number): number for number in _REASONS}


@dataclasses.dataclass(frozen=True)
class Room:
    """What a file system has left for this user.

    Attributes:
        free_bytes: Bytes.
        free_files: Files. None if the file system does not count them.
        total_bytes: Bytes that it has in all.
    """

    free_bytes: int
    free_files: int | None
    total_bytes: int


def room_at(path: StoragePath) -> Room | None:
    """Returns the room of the file system of ``path``, or of its nearest folder that exists. None: it is not known."""
    try:
        place = os.fspath(path)
    except TypeError:
        return None
    while True:
        try:
            status = os.statvfs(place)
        except FileNotFoundError:
            place = os.path.dirname(place)
        except OSError:
            return None
        else:
            files = status.f_favail if status.f_files else None
            return Room(status.f_bavail * status.f_frsize, files, status.f_blocks * status.f_frsize)


def is_full(error: BaseException) -> bool:
    """Returns whether ``error`` says that storage has no room left, or a quota none."""
    return _number(error) in _FULL


def knows(error: BaseException) -> bool:
    """Returns whether ``explained`` has more to say of ``error`` than its own text."""
    return _number(error) is not None


def explained(error: BaseException, path: StoragePath, needed_bytes: int | None = None) -> str:
    """Returns the text of ``error``. If storage has no room or cannot be written to, with what is known of it.

    Args:
        error: The error.
        path: What was written.
        needed_bytes: Bytes of all that was to be written. None: it is not known.
    """
    number = _number(error)
    if number is None:
        return str(error)
    room = room_at(path)
    sentences = [f"{error}; {_REASONS[number]}. {path}"]
    if needed_bytes is not None:
        sentences.append(f"{needed_bytes} bytes are needed for the whole save, before any compression")
    if room is not None:
        sentences.append(f"{room.free_bytes} of {room.total_bytes} bytes are free there")
        if room.free_files is not None and room.free_files < _FEW_FILES:
            sentences.append(f"only {room.free_files} more files can be made")
    return ", ".join(sentences) if len(sentences) == 1 else f"{sentences[0]}: {', '.join(sentences[1:])}"


#: Fewer free files than this are worth a word.
_FEW_FILES = 1000


def _number(error: BaseException | None) -> int | None:
    """Returns what an error, or one that caused it, is about. None: none of what this module knows."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _REASONS:
            return error.errno
        for words, number in _WORDS.items():
            if words in str(error):
                return number
        error = error.__cause__
    return None


def record_files(where: StoragePath, above: StoragePath) -> Iterator[tuple[str, int, int]]:
    """Makes all files at and below ``where`` durable. Yields the path below ``above``, size and CRC-32 of each.

    All writes there must have ended.

    Raises:
        OSError: A file cannot be read.
    """
    path, top = Path(where), Path(above)  # handlers write to the local file system
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield file.relative_to(top).as_posix(), file.stat().st_size, crc32_of(local_path(file))
    above_it = {folder for folder in path.parents if folder == top or top in folder.parents}
    inside = {path, *(each for each in path.rglob("*") if each.is_dir())} if path.is_dir() else set()
    folders = above_it | inside
    sync_folders(local_path(folder) for folder in folders)
