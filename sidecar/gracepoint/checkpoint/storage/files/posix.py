"""Checkpoints in a file system. Files appear as a whole by a link or a rename, and are synced with their folders.

This module has no threads and no state. Keys are absolute paths.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gracepoint.checkpoint.storage import direct_io
from gracepoint.checkpoint.storage.backend import HOT_BYTES, Child, Entry, Generation, StaleGeneration, Value
from gracepoint.checkpoint.storage.files import page_cache
from gracepoint.checkpoint.storage.files.mounts import check_mount

logger = logging.getLogger(__name__)

#: How often the deletion of a folder is tried while others write to it.
_DELETES = 3

_LOCK_S = 5.0  # to wait for the lock; it is held for two calls to the file system
_LOOK_EVERY_S = 0.05
_lockable: set[int] = set()  # the descriptors of folders that are locked, or are about to be


class PosixBackend:
    """The local file system, and all file systems that are mounted in it."""

    renames = True
    look_every_s = 0.1

    def url(self, key: str) -> str:
        return key

    def local_path(self, key: str) -> str:
        return key

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        return {"driver": "file", "path": key}

    def create(self, key: str, data: bytes) -> Generation:
        path = Path(key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(data)
            # Read before the file has its name: another process may replace it right after. The inode stays the same.
            generation = _generation(os.stat(partial))
            _put_first(partial, path)
            return generation
        finally:
            partial.unlink(missing_ok=True)

    def read(self, key: str) -> Value:
        with _nothing_below_files(key), Path(key).open("rb") as file:
            return Value(file.read(), _generation(os.fstat(file.fileno())))

    def replace(self, key: str, data: bytes, generation: Generation) -> Generation:
        path = Path(key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
        try:
            partial.write_bytes(data)
            with _locked(path.parent):
                try:
                    found = _generation(os.stat(path))
                except FileNotFoundError:
                    raise StaleGeneration(errno.ESTALE, "the file was deleted meanwhile", key) from None
                if found != generation:
                    raise StaleGeneration(errno.ESTALE, "another process has replaced the file", key)
                written = _generation(os.stat(partial))
                os.replace(partial, path)
            return written
        finally:
            partial.unlink(missing_ok=True)

    def put(self, key: str, data: bytes) -> None:
        # The temporary name is random, as pods in the host's network share host names and process ids.
        path = Path(key)
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

    def touch(self, key: str) -> None:
        Path(key).write_bytes(b"")

    write_large = staticmethod(direct_io.write_file)
    read_ahead = staticmethod(page_cache.read_ahead)

    def has_direct_io(self, key: str) -> bool:
        return direct_io.has_direct_io(Path(key))

    def volume(self, key: str) -> int:
        return os.stat(key).st_dev

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[_FileReader]:
        with _nothing_below_files(key):
            descriptor = os.open(key, os.O_RDONLY)
        try:
            yield _FileReader(descriptor)
        finally:
            os.close(descriptor)

    def entry(self, key: str) -> Entry | None:
        try:
            found = os.stat(key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if stat.S_ISDIR(found.st_mode) else _entry(key, found)

    def check_usable(self, key: str) -> None:
        check_mount(key)

    def delete(self, key: str) -> None:
        Path(key).unlink(missing_ok=True)

    def exists(self, key: str) -> bool:
        return os.path.lexists(key)

    def is_folder(self, key: str) -> bool:
        return os.path.isdir(key)

    def is_link(self, key: str) -> bool:
        return os.path.islink(key)

    def children(self, key: str) -> list[Child]:
        found = []
        with _nothing_below_files(key):
            paths = list(Path(key).iterdir())
        for path in paths:
            is_link = path.is_symlink()
            found.append(Child(path.name, path.is_dir() and not is_link, is_link))
        return found

    def entries(self, key: str) -> list[Entry]:
        found = []
        for directory, _, names in os.walk(key):
            for name in names:
                path = os.path.join(directory, name)
                try:
                    status = os.lstat(path)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    found.append(_entry(os.path.relpath(path, key), status))
        return found

    def last_change_s(self, key: str) -> float:
        try:
            newest = os.stat(key).st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return 0.0
        for directory, _, names in os.walk(key):
            for path in [directory, *(os.path.join(directory, name) for name in names)]:
                try:
                    newest = max(newest, os.lstat(path).st_mtime)
                except FileNotFoundError:
                    continue  # renamed or deleted: the time of its folder shows it
        return newest

    def make_folder(self, key: str, *, parents: bool = True, exclusive: bool = False) -> None:
        Path(key).mkdir(parents=parents, exist_ok=not exclusive)

    def make_folder_durably(self, key: str) -> None:
        path = Path(key)
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self.sync(sorted({str(folder.parent) for folder in missing}))

    def delete_folder(self, key: str) -> None:
        for _ in range(_DELETES):
            stays = self._delete_folder(key)
            if not any(error.errno == errno.ENOTEMPTY for error in stays):
                break  # otherwise somebody has written to it meanwhile
        if stays:
            raise stays[0]

    def _delete_folder(self, key: str) -> list[OSError]:
        """Returns the errors of what stays."""
        stays: list[OSError] = []

        def note(function: object, path: str, found: object) -> None:
            error = found[1] if isinstance(found, tuple) else found
            if not isinstance(error, OSError):
                raise error if isinstance(error, BaseException) else TypeError(f"{path}: {error!r}")
            if not isinstance(error, FileNotFoundError):  # another process deletes it, too
                stays.append(error)

        if sys.version_info >= (3, 12):
            shutil.rmtree(key, onexc=note)
        else:
            shutil.rmtree(key, onerror=note)
        return stays

    def publish(self, source: str, target: str) -> None:
        try:
            os.rename(source, target)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:  # some file systems return this, and others EEXIST
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
            if error.errno == errno.ENOTDIR and os.path.lexists(target):  # a file or a symbolic link has the name
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from error
            raise

    @contextlib.contextmanager
    def staying(self, key: str) -> Iterator[Callable[[], bool]]:
        # The folder is kept open, as some file systems assign another inode number to a folder that nobody uses.
        descriptor = os.open(key, os.O_RDONLY | os.O_DIRECTORY)

        def stayed() -> bool:
            try:
                return os.path.samestat(os.fstat(descriptor), os.stat(key))
            except FileNotFoundError:
                return False

        try:
            yield stayed
        finally:
            os.close(descriptor)

    def sync(self, keys: Iterable[str]) -> None:
        for key in keys:
            descriptor = os.open(key, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def now_s(self, key: str) -> float:
        # The clock of the file server dates its files. A hidden file shows the time. If a crash leaves it, a later
        # start deletes it (``steps.cleanup``).
        probe = Path(key) / f".gracepoint-now.{os.uname().nodename}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            probe.write_bytes(b"")
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)


POSIX = PosixBackend()


class _FileReader:
    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.size_bytes = os.fstat(descriptor).st_size
        self.best_bytes = HOT_BYTES

    def read_into(self, out: memoryview, offset: int) -> int:
        return os.preadv(self._descriptor, [out], offset)


def _generation(found: os.stat_result) -> Generation:
    # A file that replaces another has another inode number: it was made while the other file still existed.
    return Generation(f"{found.st_ino}.{found.st_mtime_ns}.{found.st_size}")


def _entry(key: str, found: os.stat_result) -> Entry:
    return Entry(key, found.st_size, _generation(found), found.st_mtime)


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
