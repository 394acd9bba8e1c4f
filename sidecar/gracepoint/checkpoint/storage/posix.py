"""Checkpoints in a file system. Files appear as a whole by a link or a rename, and are synced with their folders.

Keys are absolute paths. As a commit is one rename of a folder, ``check_mount`` checks that a mounted file system can
hold checkpoints. Linux says which file system is mounted where. On other systems only the renames are tried.

The module also notes what could not be deleted, in any store. A deletion that fails never fails a save or a start, but
it fills the storage. So each is logged once in each start, with path, owner and error, and ``listen`` reports all of
them.

This module has no threads, and any thread may call everything here. One lock guards the notes, which belong to the
process: all its checkpointers share them. ``listen``'s function is called by the thread whose deletion changed
something, without the lock.
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
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gracepoint.checkpoint.storage import direct_io
from gracepoint.checkpoint.storage.backend import HOT_BYTES, Child, Entry, Generation, StaleGeneration, Value

logger = logging.getLogger(__name__)

#: So many paths are kept, as a bucket may have any number of objects.
_MOST = 1000

_lock = threading.Lock()
_stays: dict[str, str] = {}  # path -> what is known of it, in the order in which it was found
_said: set[str] = set()
_listener: Callable[[list[str]], None] | None = None


def failed(path: str, error: OSError) -> None:
    """Notes that ``path`` could not be deleted."""
    message = f"{path} cannot be deleted: {error}{_owner(path, error)}"
    with _lock:
        is_new = path not in _stays and len(_stays) < _MOST
        is_unsaid = path not in _said and len(_said) < _MOST
        if is_new:
            _stays[path] = message
        if is_unsaid:
            _said.add(path)
    if is_unsaid:
        logger.warning("%s", message)
    if is_new:
        _tell()


def gone(path: str) -> None:
    """Notes that ``path`` is deleted."""
    if path in _stays:
        with _lock:
            _stays.pop(path, None)
        _tell()


def recheck(exists: Callable[[str], bool]) -> None:
    """Forgets what is not there any more, as somebody else has deleted it."""
    for path in list(_stays):
        if not exists(path):
            gone(path)


@contextlib.contextmanager
def telling(path: object) -> Iterator[None]:
    """The block deletes ``path``. An ``OSError`` is noted, not raised. What is not there counts as deleted."""
    try:
        yield
    except FileNotFoundError:
        gone(str(path))
    except OSError as error:
        failed(str(path), error)
    else:
        gone(str(path))


def listen(listener: Callable[[list[str]], None]) -> None:
    """Has ``listener`` called with all that stays, whenever that changes, and now if anything does."""
    global _listener
    _listener = listener
    if _stays:
        _tell()


def end() -> None:
    """Forgets everything, the listener too: what comes is another start."""
    global _listener
    with _lock:
        _listener = None
        _stays.clear()
        _said.clear()


def _tell() -> None:
    with _lock:
        stays, listener = list(_stays.values()), _listener
    if listener is not None:
        listener(stays)


def _owner(path: str, error: OSError) -> str:
    """Returns who owns what stays, as text, if it is in the local file system."""
    named = error.filename if isinstance(error.filename, str) else path
    if not named.startswith("/"):
        return ""
    owners = [
        f"{relation} {_of(status)}"
        for relation, place in (("it belongs to", named), ("its folder to", os.path.dirname(named)))
        if (status := _stat(place)) is not None
    ]
    return f" ({', '.join([*owners, f'this process is {_user(os.geteuid())}'])})"


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None


def _of(status: os.stat_result) -> str:
    return f"{_user(status.st_uid)}, group {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}"


def _user(uid: int) -> str:
    try:
        import pwd  # not on all systems

        return f"user {uid} ({pwd.getpwuid(uid).pw_name})"
    except (ImportError, KeyError):
        return f"user {uid}"


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
        with telling(probe):
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


#: How often the deletion of a folder is tried while others write to it.
_DELETES = 3

_LOCK_S = 5.0  # to wait for the lock; it is held for two calls to the file system
_LOOK_EVERY_S = 0.05
_lockable: set[int] = set()  # the descriptors of folders that are locked, or are about to be


class PosixBackend:
    """The local file system, and all file systems that are mounted in it."""

    renames = True
    is_far = False
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
                    current = _generation(os.stat(path))
                except FileNotFoundError:
                    raise StaleGeneration(errno.ESTALE, "the file was deleted meanwhile", key) from None
                if current != generation:
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
    read_ahead = staticmethod(advise_read_ahead)

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
            status = os.stat(key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return None if stat.S_ISDIR(status.st_mode) else _entry(key, status)

    def check_usable(self, key: str) -> None:
        check_mount(key)

    def delete(self, key: str) -> None:
        Path(key).unlink(missing_ok=True)

    def delete_version(self, key: str, generation: Generation | None) -> bool:
        self.delete(key)
        return True

    def exists(self, key: str) -> bool:
        return os.path.lexists(key)

    def is_folder(self, key: str) -> bool:
        return os.path.isdir(key)

    def is_link(self, key: str) -> bool:
        return os.path.islink(key)

    def children(self, key: str) -> list[Child]:
        children = []
        with _nothing_below_files(key):
            paths = list(Path(key).iterdir())
        for path in paths:
            is_link = path.is_symlink()
            children.append(Child(path.name, path.is_dir() and not is_link, is_link))
        return children

    def entries(self, key: str) -> list[Entry]:
        entries = []
        for directory, _, names in os.walk(key):
            for name in names:
                path = os.path.join(directory, name)
                try:
                    status = os.lstat(path)
                except FileNotFoundError:
                    continue
                if stat.S_ISREG(status.st_mode):
                    entries.append(_entry(os.path.relpath(path, key), status))
        return entries

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

        def note(function: object, path: str, failure: object) -> None:
            error = failure[1] if isinstance(failure, tuple) else failure
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

    def at_once(self, acts: Iterable[Callable[[], object]]) -> None:
        for act in acts:
            act()

    def now_s(self, key: str) -> float:
        # The clock of the file server dates its files. A hidden file shows the time. If a crash leaves it, a later
        # start deletes it (``steps.retention``).
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


def _generation(status: os.stat_result) -> Generation:
    # A file that replaces another has another inode number: it was made while the other file still existed.
    return Generation(f"{status.st_ino}.{status.st_mtime_ns}.{status.st_size}")


def _entry(key: str, status: os.stat_result) -> Entry:
    return Entry(key, status.st_size, _generation(status), status.st_mtime)


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
