"""A location in a store: the back end, and the key of a value or folder in it.

All modules of the engine use ``StoragePath`` for locations, and access the store through it. Only ``storage_path``
makes one from a location that a user gives. Paths are immutable and have no state.

The functions at the end look at or read many locations at once, as each may take a round trip and little bandwidth.
``look_at`` uses the threads of the store. ``read_all`` and ``read_existing`` read in the calling thread and in
additional threads, each of which takes the next path that no thread has taken. These end with the call. They are
daemons: if storage hangs, the process can still exit. If the system starts no more threads, as when the interpreter is
about to end, the threads that exist read all files.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from gracepoint.arguments import shown
from gracepoint.checkpoint.storage import backend, posix
from gracepoint.checkpoint.storage.backend import Backend, Child, Entry, Generation, Reader, Value
from gracepoint.checkpoint.storage.posix import POSIX
from gracepoint.errors import CheckpointRefused, SettingsError
from gracepoint.machine import LocalPath as LocalPath
from gracepoint.settings import location

#: A location as users give it.
UserPath = str | os.PathLike[str]


class StoragePath:
    """A location in a store.

    Attributes:
        backend: The store.
        key: The complete key in the store, without a slash at its end.
    """

    __slots__ = ("backend", "key")

    def __init__(self, backend: Backend, key: str) -> None:
        self.backend = backend
        self.key = key

    def __truediv__(self, name: str) -> StoragePath:
        """Returns the location of ``name`` in this folder. For an empty name, returns the folder itself."""
        if not name:
            return self
        return StoragePath(self.backend, f"{self.key.rstrip('/')}/{name}" if self.key else name)

    def __str__(self) -> str:
        return self.backend.url(self.key)

    def __repr__(self) -> str:
        return f"StoragePath({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the location: another process opens the store by itself."""
        return from_text, (str(self),)

    def __fspath__(self) -> str:
        return self.backend.local_path(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoragePath) and (self.backend, self.key) == (other.backend, other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __lt__(self, other: StoragePath) -> bool:
        return self.key.split("/") < other.key.split("/")

    @property
    def name(self) -> str:
        """The last part of the key. Empty at the top of the store."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> StoragePath:
        """The folder above. The top of the store is its own parent."""
        above, slash, _ = self.key.rpartition("/")
        return StoragePath(self.backend, above or slash)

    def with_name(self, name: str) -> StoragePath:
        return self.parent / name

    def below(self, top: StoragePath) -> str:
        """Returns the key relative to ``top``.

        Raises:
            ValueError: The location is not below ``top``.
        """
        prefix = f"{top.key.rstrip('/')}/" if top.key else ""
        if self.backend is not top.backend or not self.key.startswith(prefix):
            raise ValueError(f"{self} is not below {top}")
        return self.key.removeprefix(prefix)

    def folders_up_to(self, top: StoragePath) -> Iterator[StoragePath]:
        """Yields the folders above this location, from its parent up to and including ``top``.

        Raises:
            ValueError: The location is not below ``top``.
        """
        folder = self
        while folder != folder.parent:
            folder = folder.parent
            yield folder
            if folder == top:
                return
        raise ValueError(f"{self} is not below {top}")

    def for_users(self) -> LocalPath | str:
        """Returns the location in the type that public results use: a path, or a URI."""
        return LocalPath(self.key) if self.backend is POSIX else str(self)

    def local(self) -> LocalPath:
        """Returns the path in the local file system.

        Raises:
            TypeError: The store is not a file system.
        """
        return LocalPath(self.backend.local_path(self.key))

    def kvstore_spec(self) -> dict[str, Any]:
        """Returns TensorStore's spec of the values in this folder."""
        return self.backend.kvstore_spec(f"{self.key}/")

    # ``Backend`` documents these methods.

    def create(self, data: bytes) -> Generation:
        return self.backend.create(self.key, data)

    def read(self) -> Value:
        return self.backend.read(self.key)

    def read_bytes(self) -> bytes:
        return self.backend.read(self.key).data

    def replace(self, data: bytes, generation: Generation) -> Generation:
        return self.backend.replace(self.key, data, generation)

    def put(self, data: bytes) -> None:
        self.backend.put(self.key, data)

    def touch(self) -> None:
        self.backend.touch(self.key)

    def has_direct_io(self) -> bool:
        return self.backend.has_direct_io(self.key)

    def volume(self) -> int:
        return self.backend.volume(self.key)

    def open(self) -> AbstractContextManager[Reader]:
        return self.backend.open(self.key)

    def entry(self) -> Entry | None:
        return self.backend.entry(self.key)

    def is_value(self) -> bool:
        return self.backend.entry(self.key) is not None

    def delete(self) -> None:
        self.backend.delete(self.key)

    def exists(self) -> bool:
        return self.backend.exists(self.key)

    def is_folder(self) -> bool:
        return self.backend.is_folder(self.key)

    def is_link(self) -> bool:
        return self.backend.is_link(self.key)

    def children(self) -> list[Child]:
        return self.backend.children(self.key)

    def entries(self) -> list[Entry]:
        return self.backend.entries(self.key)

    def last_change_s(self) -> float:
        return self.backend.last_change_s(self.key)

    def make_folder(self, *, parents: bool = True, exclusive: bool = False) -> None:
        self.backend.make_folder(self.key, parents=parents, exclusive=exclusive)

    def make_folder_durably(self) -> None:
        self.backend.make_folder_durably(self.key)

    def delete_folder(self) -> None:
        """Deletes a folder and everything in it. Raises no error: what stays is noted in ``posix``."""
        with posix.telling(self):
            self.backend.delete_folder(self.key)

    def publish(self, target: StoragePath) -> None:
        self.backend.publish(self.key, target.key)

    def staying(self) -> AbstractContextManager[Callable[[], bool]]:
        return self.backend.staying(self.key)

    def sync(self) -> None:
        self.backend.sync([self.key])

    def now_s(self) -> float:
        return self.backend.now_s(self.key)

    def check_usable(self) -> None:
        self.backend.check_usable(self.key)


def sync_folders(folders: Iterable[StoragePath]) -> None:
    """Makes the entries of ``folders`` durable. Syncs each folder once."""
    for folder in sorted(set(folders)):
        folder.sync()


def storage_path(path: UserPath | StoragePath) -> StoragePath:
    """Returns the location that a user gave: an absolute path, which may begin with ``~``, or a URI.

    Known URIs are ``file://``, ``gs://bucket/name``, ``s3://bucket/name``, and ``memory://`` within one process.

    Raises:
        SettingsError: The location is another kind of URI, is not absolute, has a variable that nobody replaces, or its
            extra is not installed.
    """
    if isinstance(path, StoragePath):
        return path
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text:
        raise SettingsError(f"expected an absolute path, or a URI as gs://bucket/name, found {shown(path)}")
    text = location("checkpoint directory", text)
    scheme, rest, _ = text.partition("://")
    if not rest:
        local = Path(text)
        if not local.is_absolute():
            raise SettingsError(
                f"checkpoint directory {text!r}: expected an absolute path, or a URI as gs://bucket/name"
            )
        return local_path(local)
    opened = _SCHEMES.get(scheme)
    if opened is None:
        raise SettingsError(
            f"checkpoint directory {text!r}: {scheme}:// is not known; expected an absolute path, or one of "
            f"{', '.join(f'{known}://' for known in sorted(_SCHEMES))}"
        )
    return opened(text)


def local_path(path: UserPath) -> StoragePath:
    """Returns the location of a file or folder of this host, whatever is in its name. It need not come from a user."""
    return StoragePath(POSIX, str(Path(path)))


def from_text(text: str) -> StoragePath:
    """Returns the location that has this text (``str``)."""
    return storage_path(text) if "://" in text else local_path(text)


def local_folder(place: StoragePath, name: str) -> LocalPath:
    """Returns the folder of an item in the local file system, which its handler reads and writes.

    Raises:
        CheckpointRefused: The store is not a file system.
    """
    try:
        return place.local()
    except TypeError as error:
        raise CheckpointRefused(
            f"item {name!r}: its handler reads and writes files, and {place} is in no file system: save its values as "
            "leaves of the tree"
        ) from error


def _file(uri: str) -> StoragePath:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise SettingsError(f"checkpoint directory {uri!r}: expected file:///path, without a host")
    return local_path(unquote(parts.path))  # a dollar sign may be written as %24


def _memory(uri: str) -> StoragePath:
    from gracepoint.checkpoint.storage.in_memory import MEMORY  # it needs TensorStore

    parts = urlsplit(uri)
    return StoragePath(MEMORY, unquote(f"{parts.netloc}{parts.path}").strip("/"))


def _bucket(uri: str) -> StoragePath:
    from gracepoint.checkpoint.storage.objects.object_store import open_bucket

    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise SettingsError(
            f"checkpoint directory {uri!r}: expected {scheme}://bucket/name, found bucket {bucket!r}. Its name needs 3 "
            f"characters or more: lower-case letters, digits, '-', '_' and '.'"
        )
    if _ODD.search(key):
        raise SettingsError(f"checkpoint directory {uri!r}: expected no empty part, '.', '..', '?' or '#' in its name")
    return StoragePath(open_bucket(scheme, bucket), key.rstrip("/"))


_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]", re.ASCII)
_ODD = re.compile(r"(^|/)\.{1,2}(/|$)|//|[?#]|^/")
_SCHEMES: dict[str, Callable[[str], StoragePath]] = {"file": _file, "memory": _memory, "gs": _bucket, "s3": _bucket}


logger = logging.getLogger(__name__)

#: Files that are read at once. There may be many threads, as they only wait for the storage.
CONCURRENT_READS = 32


def read_all(paths: Sequence[StoragePath]) -> list[bytes] | None:
    """Returns the contents of all files in order. None if a file is missing; then no further reads are started.

    Raises:
        OSError: A file cannot be read.
    """
    work = _Work(paths, skip_missing=False)
    _read(work, len(paths))
    return None if work.missing else [work.found[position] for position in range(len(paths))]


def read_existing(paths: Sequence[StoragePath]) -> dict[StoragePath, bytes]:
    """Returns the contents of the files that exist, by path.

    Raises:
        OSError: A file cannot be read.
    """
    work = _Work(paths, skip_missing=True)
    _read(work, len(paths))
    return {paths[position]: data for position, data in work.found.items()}


def _read(work: _Work, count: int) -> None:
    limit = backend.current()

    def help_() -> None:
        with backend.ended_by(limit):
            work.run()

    helpers = []
    for number in range(1, min(count, CONCURRENT_READS)):
        helper = threading.Thread(target=help_, name=f"gracepoint: reads {number}", daemon=True)
        try:
            helper.start()
        except RuntimeError as error:
            logger.debug("%d threads read small files: %s", number, error)
            break
        helpers.append(helper)
    work.run()
    # Each helper ends with the file that it reads. In an object store the read ends with its timeout or with the limit.
    # In a file system it ends when the kernel returns: it has no other bound, in this thread either.
    for helper in helpers:
        helper.join()
    if work.error is not None:
        raise work.error


class _Work:
    """The paths to read, and the results. The threads share it without a lock.

    ``found`` has a separate entry for each path. ``missing`` and ``error`` are set and never reset, and end the work.
    With ``skip_missing``, a missing file has no entry, and the work continues.
    """

    def __init__(self, paths: Sequence[StoragePath], *, skip_missing: bool) -> None:
        self._paths = paths
        self._skip_missing = skip_missing
        self._next = itertools.count()  # each call takes one number, in any thread
        self.found: dict[int, bytes] = {}
        self.missing = False
        self.error: BaseException | None = None

    def run(self) -> None:
        while not self.missing and self.error is None and (position := next(self._next)) < len(self._paths):
            try:
                self.found[position] = self._paths[position].read_bytes()
            except FileNotFoundError:
                self.missing = not self._skip_missing
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread
                self.error = error


K = TypeVar("K")
V = TypeVar("V")


def look_at(root: StoragePath, keys: Iterable[K], look: Callable[[K], V]) -> dict[K, V]:
    """Returns what ``look`` finds for each of ``keys``, in their order. Raises its first error.

    In a store that is far, several threads call ``look``. They end with the call.
    """
    keys = list(keys)
    results: dict[K, V] = {}

    def note(key: K) -> None:
        results[key] = look(key)

    root.backend.at_once(functools.partial(note, key) for key in keys)
    return {key: results[key] for key in keys}
