"""Checkpoints in a file system. Files appear as a whole by a link or a rename, and are synced with their folders.

Keys are absolute paths. As a commit is one rename of a folder, ``check_mount`` checks that a mounted file system can
hold checkpoints. Linux says which file system is mounted where. On other systems only the renames are tried.

``write_large`` writes as fast as the storage allows, and computes the checksum meanwhile. If the file system has direct
I/O (``O_DIRECT``), writes bypass the page cache. New pages of the cache are slow to allocate, and training may need the
memory. Direct I/O needs aligned memory. Values that are not aligned are copied into a ``Buffer`` block by block, and
their checksum is computed while they are in the processor's cache. Without direct I/O (tmpfs, some network file
systems, macOS), write-back is started early, so that the sync at the end takes little time. With and without direct
I/O, values in another memory order or type than the stored one are copied through a ``Buffer``.

This module has no threads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.memory import ArrayBytes, padded
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.buffers import ALIGNMENT_BYTES, BLOCK_BYTES, Buffer, Later, UnsyncedFile, block_of
from gracepoint.checkpoint.storage.storage_path import (
    HOT_BYTES,
    Child,
    Entry,
    Generation,
    StaleGeneration,
    StoragePath,
    Value,
)
from gracepoint.checksum import crc32
from gracepoint.machine import LocalPath

logger = logging.getLogger(__name__)

# Size of a part that is copied and then added to the checksum. It stays in the cache of the core between the two
# steps, and is large enough to be worth releasing the GIL.
_PART_BYTES = 1 << 18
# For files up to this size, the page cache costs less than aligning the end of the file.
_SMALL_BYTES = 1 << 16

_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
# 0: the system has no direct I/O.
_DIRECT: int = getattr(os, "O_DIRECT", 0)
# Errors of a file system that has no direct I/O, or none for memory of this alignment.
_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP})

#: How often the deletion of a folder is tried while others write to it.
_DELETES = 3

_LOCK_S = 5.0  # to wait for the lock; it is held for two calls to the file system
_LOOK_EVERY_S = 0.05
_lockable: set[int] = set()  # the descriptors of folders that are locked, or are about to be


class PosixPath(StoragePath):
    """A path in the local file system, and in all file systems that are mounted in it."""

    __slots__ = ()

    def __init__(self, key: str) -> None:
        super().__init__(PosixPath, key)  # all paths are in one store

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key,)

    def at(self, key: str) -> Self:
        return type(self)(key)

    def __str__(self) -> str:
        return self.key

    def local(self) -> LocalPath:
        return LocalPath(self.key)

    def for_users(self) -> LocalPath:
        return LocalPath(self.key)

    def kvstore_spec(self) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self.key}/"}

    def create(self, data: bytes) -> Generation:
        path = Path(self.key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(data)
            # Read before the file has its name: another process may replace it right after. The inode stays the same.
            generation = _generation(os.stat(partial))
            _put_first(partial, path)
            return generation
        finally:
            partial.unlink(missing_ok=True)

    def read(self) -> Value:
        with _nothing_below_files(self.key), Path(self.key).open("rb") as file:
            return Value(file.read(), _generation(os.fstat(file.fileno())))

    def replace(self, data: bytes, generation: Generation) -> Generation:
        path = Path(self.key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(data)
            with _locked(path.parent):
                try:
                    current = _generation(os.stat(path))
                except FileNotFoundError:
                    raise StaleGeneration(errno.ESTALE, "the file was deleted meanwhile", self.key) from None
                if current != generation:
                    raise StaleGeneration(errno.ESTALE, "another process has replaced the file", self.key)
                written = _generation(os.stat(partial))
                os.replace(partial, path)
            return written
        finally:
            partial.unlink(missing_ok=True)

    def put(self, data: bytes) -> None:
        # The temporary name is random, as pods in the host's network share host names and process ids.
        path = Path(self.key)
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

    def touch(self) -> None:
        Path(self.key).write_bytes(b"")

    def write_large(
        self,
        data: ArrayBytes,
        buffer: Buffer,
        go_on: Callable[[], None],
        *,
        direct: bool,
        later: Later | None = None,
    ) -> int:
        direct = direct and len(data) > _SMALL_BYTES
        try:
            descriptor = os.open(self.key, _OPEN_NEW | (_DIRECT if direct else 0), 0o644)
            try:
                write = _write_directly if direct else _write_through_cache
                checksum = write(descriptor, data, buffer, go_on)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            if error.filename is None:
                error.filename = self.key
            raise
        file = UnsyncedFile(self.key, descriptor)
        if later is None:
            file.sync()
        else:
            later(file)
        return checksum

    def has_direct_io(self) -> bool:
        """Writes and removes a file. If a file system also accepts unaligned memory, the result is False: it keeps
        pages of its own.

        Raises:
            OSError: Nothing can be written there.
        """
        if not _DIRECT:
            return False
        probe = Path(self.key) / f".gracepoint-direct.{secrets.token_hex(8)}"
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

    def volume(self) -> int:
        return os.stat(self.key).st_dev

    @contextlib.contextmanager
    def open(self) -> Iterator[_FileReader]:
        with _nothing_below_files(self.key):
            descriptor = os.open(self.key, os.O_RDONLY)
        try:
            yield _FileReader(descriptor)
        finally:
            os.close(descriptor)

    def entry(self) -> Entry | None:
        try:
            status = os.stat(self.key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if stat.S_ISDIR(status.st_mode) else _entry(self.key, status)

    def check_usable(self) -> None:
        check_mount(self.key)

    def delete(self) -> None:
        Path(self.key).unlink(missing_ok=True)

    def exists(self) -> bool:
        return os.path.lexists(self.key)

    def is_folder(self) -> bool:
        return os.path.isdir(self.key)

    def is_link(self) -> bool:
        return os.path.islink(self.key)

    def children(self) -> list[Child]:
        children = []
        with _nothing_below_files(self.key):
            paths = list(Path(self.key).iterdir())
        for path in paths:
            is_link = path.is_symlink()
            children.append(Child(path.name, path.is_dir() and not is_link, is_link))
        return children

    def entries(self) -> list[Entry]:
        entries = []
        for directory, _, names in os.walk(self.key):
            for name in names:
                path = os.path.join(directory, name)
                try:
                    status = os.lstat(path)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    entries.append(_entry(os.path.relpath(path, self.key), status))
        return entries

    def last_change_s(self) -> float:
        try:
            newest = os.stat(self.key).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return 0.0
        for directory, _, names in os.walk(self.key):
            for path in [directory, *(os.path.join(directory, name) for name in names)]:
                try:
                    newest = max(newest, os.lstat(path).st_mtime)
                except FileNotFoundError:
                    continue  # renamed or deleted: the time of its folder shows it
        return newest

    def make_folder(self, *, parents: bool = True, exclusive: bool = False) -> None:
        Path(self.key).mkdir(parents=parents, exist_ok=not exclusive)

    def make_folder_durably(self) -> None:
        path = Path(self.key)
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in sorted({str(folder.parent) for folder in missing}):
            _sync(folder)

    def delete_folder(self) -> None:
        for _ in range(_DELETES):
            stays = self._delete_folder()
            if not any(error.errno == errno.ENOTEMPTY for error in stays):
                break  # otherwise somebody has written to it meanwhile
        if stays:
            raise stays[0]

    def _delete_folder(self) -> list[OSError]:
        """Returns the errors of what stays."""
        stays: list[OSError] = []

        def note(function: object, path: str, failure: object) -> None:
            error = failure[1] if isinstance(failure, tuple) else failure
            if not isinstance(error, OSError):
                raise error if isinstance(error, BaseException) else TypeError(f"{path}: {error!r}")
            if not isinstance(error, FileNotFoundError):  # another process deletes it, too
                stays.append(error)

        if sys.version_info >= (3, 12):
            shutil.rmtree(self.key, onexc=note)
        else:
            shutil.rmtree(self.key, onerror=note)
        return stays

    def publish(self, target: StoragePath) -> None:
        try:
            os.rename(self.key, target.key)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # some file systems return this, and others EEXIST
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target.key) from error
            if error.errno == errno.ENOTDIR and os.path.lexists(target.key):  # a file or a symbolic link has the name
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target.key) from error
            raise

    @contextlib.contextmanager
    def staying(self) -> Iterator[Callable[[], bool]]:
        # The folder is kept open, as some file systems assign another inode number to a folder that nobody uses.
        descriptor = os.open(self.key, os.O_RDONLY | os.O_DIRECTORY)

        def stayed() -> bool:
            try:
                return os.path.samestat(os.fstat(descriptor), os.stat(self.key))
            except FileNotFoundError:
                return False

        try:
            yield stayed
        finally:
            os.close(descriptor)

    def sync(self) -> None:
        _sync(self.key)

    def now_s(self) -> float:
        # The clock of the file server dates its files. A hidden file shows the time. If a crash leaves it, a later
        # start deletes it (``steps.retention``).
        probe = Path(self.key) / f".gracepoint-now.{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"")
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


def _write_directly(descriptor: int, data: ArrayBytes, buffer: Buffer, go_on: Callable[[], None]) -> int:
    is_aligned = data.in_place is not None and data.in_place.ctypes.data % ALIGNMENT_BYTES == 0
    checksum = 0
    for offset in range(0, len(data), BLOCK_BYTES):
        go_on()
        size_bytes = min(BLOCK_BYTES, len(data) - offset)
        if is_aligned and size_bytes % ALIGNMENT_BYTES == 0:
            block = block_of(data, offset, buffer)
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
    part_bytes = _PART_BYTES if data.in_place is not None else BLOCK_BYTES
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
        block = block_of(data, offset, buffer).data
        for first in range(0, len(block), _PART_BYTES):
            hot = block[first : first + _PART_BYTES]
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


class _FileReader:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self.best_bytes = HOT_BYTES

    def read_into(self, out: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, [out], offset)


def _generation(status: os.stat_result) -> Generation:
    # A file that replaces another has another inode number: it was made while the other file still existed.
    return Generation(f"{status.st_ino}.{status.st_mtime_ns}.{status.st_size}")


def _entry(key: str, status: os.stat_result) -> Entry:
    return Entry(key, status.st_size, _generation(status), status.st_mtime)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _nothing_below_files(key: str) -> Iterator[None]:
    """Says that there is nothing at ``key`` where the system says that a part of it is a file, and no folder."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, "no such file or folder, as a part of the path is a file", key) from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks ``folder``, so that one process at a time compares and replaces. A process that dies releases its lock.

    Without the lock, two replacements at once may both succeed, and the later one counts. So it is done without if the
    file system has no locks, or if another process, which may be stopped, holds the lock for ``_LOCK_S``.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    _lockable.add(descriptor)
    until_s = time.monotonic() + _LOCK_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if not isinstance(error, BlockingIOError) or time.monotonic() > until_s:
                    logger.debug("%s: no lock: %s", folder, error)
                    break
            time.sleep(_LOOK_EVERY_S)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                # A process that was forked meanwhile has the descriptor, too: closing it here would not release.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        _lockable.discard(descriptor)
        os.close(descriptor)


def _close_locks() -> None:
    """In a forked child: otherwise a parent that is killed would leave its lock to the child."""
    for descriptor in _lockable:
        os.close(descriptor)
    _lockable.clear()


os.register_at_fork(after_in_child=_close_locks)


def _put_first(partial: Path, path: Path) -> None:
    """Renames ``partial`` to ``path`` if ``path`` does not exist. If several processes do so at once, one succeeds.

    Raises:
        FileExistsError: ``path`` exists.
        OSError: The file cannot be written there.
    """
    try:
        os.link(partial, path)  # fails if path exists, unlike a rename
        return
    except FileExistsError:
        raise
    except OSError as error:
        # File systems refuse hard links with many errors: EPERM, EOPNOTSUPP, ENOSYS, EXDEV, EMLINK. If the error has
        # another cause, creating the file fails, too.
        logger.debug("%s: no hard link, so the file is created empty and replaced: %s", path, error)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.fsync(descriptor)  # some file systems on object stores create the file only now
    finally:
        os.close(descriptor)
    try:
        os.replace(partial, path)
    except OSError:
        path.unlink(missing_ok=True)
        raise


#: Types of mounts that are buckets, with the scheme of their URIs. A folder there is renamed object by object, or not.
_BUCKETS = {
    "fuse.gcsfuse": "gs",
    "fuse.mountpoint-s3": "s3",
    "fuse.s3fs": "s3",
    "fuse.goofys": "s3",
    "fuse.geesefs": "s3",
}
_MOUNTS = Path("/proc/self/mountinfo")


def check_mount(folder: str) -> None:
    """Checks that folders below ``folder``, which exists, can be renamed as a commit needs it.

    Raises:
        OSError: They cannot. The message says what to use instead.
    """
    kind, source = mounted_at(folder)
    if scheme := _BUCKETS.get(kind):
        # Some programs give their own name as the source of the mount.
        tells_bucket = source != kind.removeprefix("fuse.")
        raise OSError(
            errno.ENOTSUP,
            f"{folder} is {f'the bucket {source}' if tells_bucket else 'a bucket'}, mounted as {kind}. A crash in a "
            f"commit there could lose the save, as a folder is not renamed in one step. Use "
            f"{f'{scheme}://{source}/...' if tells_bucket else f'its {scheme}:// URI'} in place of the mount",
        )
    _check_renames(Path(folder))


def mounted_at(folder: str, mounts: Path = _MOUNTS) -> tuple[str, str]:
    """Returns the type and the source of the mount that holds ``folder``. Empty where the system does not say.

    Args:
        folder: The folder.
        mounts: The file in which the system lists its mounts.
    """
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return "", ""
    mount, longest = ("", ""), -1
    real = Path(os.path.realpath(folder))
    for line in lines:
        fields, _, rest = line.partition(" - ")
        # Spaces and some other characters are escaped as octal numbers.
        point = fields.split()[4].encode().decode("unicode_escape")
        if real.is_relative_to(point) and len(point) >= longest:  # of two at one point, the later hides the other
            kind, source = rest.split()[:2]
            mount, longest = (kind, source), len(point)
    return mount


def _check_renames(folder: Path) -> None:
    probe = folder / f".gracepoint-probe.{secrets.token_hex(8)}"
    try:
        (probe / "from").mkdir(parents=True)
        (probe / "from" / "file").write_bytes(b"probe")
        try:
            os.rename(probe / "from", probe / "to")
        except OSError as error:
            raise OSError(
                error.errno,
                f"{folder}: this file system does not rename a folder with a file in it ({error.strerror}), so no "
                "save could be committed. If it is a bucket, use its gs:// or s3:// URI in place of the mount",
            ) from error
    finally:
        with undeleted.deleting(probe):
            shutil.rmtree(probe)


#: For one request the kernel reads no more than the device's window of read-ahead, whatever was asked for. 128 KiB is
#: the default window of disks and of network file systems; larger ones only make the requests of a file overlap less.
_PIECE_BYTES = 128 << 10


def advise_read_ahead(key: str) -> None:
    """Asks the system to read a whole file into the page cache. Waits only while the device takes no more requests.

    Does nothing where the system takes no such advice (macOS).

    Args:
        key: The path of the file.

    Raises:
        OSError: The file cannot be opened.
    """
    if sys.platform != "linux":
        return
    descriptor = os.open(key, os.O_RDONLY)
    try:
        for offset in range(0, os.fstat(descriptor).st_size, _PIECE_BYTES):
            os.posix_fadvise(descriptor, offset, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)
