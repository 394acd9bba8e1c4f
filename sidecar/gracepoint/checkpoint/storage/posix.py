"""What the engine does with files itself: small ones durably, folders synced, sizes and checksums checked."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.errors import CheckpointCorrupt

_LOOK_EVERY_S = 0.1
_BLOCK_BYTES = 4 << 20  # large enough that the threads that compute checksums seldom meet in Python


def write_durably(path: Path, data: bytes) -> None:
    """Writes ``path`` as a whole: never seen half, on the disk on return (its folder's entry included).

    Several processes may write the same path with equal contents at once, on any machines: the name that it has
    meanwhile is drawn by lot, as host names and process ids are shared by pods in the host's network. The folder may
    be renamed meanwhile: the file stays in it.
    """
    partial = f".{path.name}.partial-{secrets.token_hex(8)}"
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644, dir_fd=folder)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial, dir_fd=folder)
            raise
        os.fsync(folder)
    finally:
        os.close(folder)


def must_not_write(error: OSError) -> bool:
    """True if the error says that this process may only read there."""
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


def make_folders(path: Path) -> None:
    """Makes ``path`` and the folders above it that are missing, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    sync_folders(folder.parent for folder in missing)


def sync_folders(folders: Iterable[Path]) -> None:
    """Makes the entries of ``folders`` durable."""
    for folder in sorted(set(folders)):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def folders_up_to(path: Path, top: Path) -> Iterable[Path]:
    """Yields the folders above ``path``, from its own up to and with ``top``."""
    for folder in path.parents:
        yield folder
        if folder == top:
            return
    raise ValueError(f"{path} is not below {top}")


def appears(path: Path, *, within_s: float, sleep: Callable[[float], object]) -> bool:
    """Returns whether ``path`` is there, or comes to be in about ``within_s``."""
    for _ in range(max(1, round(within_s / _LOOK_EVERY_S))):
        if os.access(path, os.F_OK):
            return True
        sleep(_LOOK_EVERY_S)
    return False


def check_size(path: Path, size_bytes: int) -> None:
    """Raises CheckpointCorrupt, naming ``path``, if it is missing or has another size."""
    try:
        found_bytes = path.stat().st_size
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{path} is missing") from None
    if found_bytes != size_bytes:
        raise CheckpointCorrupt(f"{path} has {found_bytes} bytes, expected {size_bytes}")


def crc32_of(path: Path) -> int:
    """Returns the CRC-32 of a file's contents, reading it in blocks."""
    checksum = 0
    buffer = bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = crc32(memoryview(buffer)[:count], checksum)
    return checksum


def check_contents(path: Path, size_bytes: int, checksum: int) -> None:
    """Raises CheckpointCorrupt, naming ``path``, if it is missing or has another size or checksum."""
    check_size(path, size_bytes)
    if crc32_of(path) != checksum:
        raise CheckpointCorrupt(f"{path}: its contents do not fit its checksum")


@contextlib.contextmanager
def staying(folder: Path) -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether ``folder`` is still the folder that had this name at the beginning."""
    # Open, as some file systems give a folder that nobody uses another number when it is looked at again.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def stayed() -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(folder))
        except FileNotFoundError:
            return False

    try:
        yield stayed
    finally:
        os.close(descriptor)
