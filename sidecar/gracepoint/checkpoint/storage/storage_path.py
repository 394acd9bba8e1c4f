"""A location in a store, and all that can be done there. File systems, buckets and memory implement it.

A store keeps **values** under keys, which are names joined by slashes. A **folder** is all values whose keys begin with
the folder's key and a slash. A file system has real directories for this; a bucket has only prefixes. A
``StoragePath`` is a key in one store. All modules of the engine use it for locations, and access the store through it.
Paths are immutable and have no state. ``locations`` makes one from what a user gives.

Every method may be called from any thread, and from any process that shares the store. Nobody owns a value: concurrent
writers of one value use the conditional methods. All stores raise the built-in errors ``FileNotFoundError``,
``FileExistsError`` and ``OSError``.

``ended_by`` ends the requests of a block of code when its time is over, without each function passing a deadline on.
The limit belongs to the thread that sets it. Stores that make requests ask for it in the thread that calls them
(``current_limit``), and pass it on to the threads that they start.

The functions at the end look at or read many locations at once, as each may take a round trip and little bandwidth.
``look_at`` uses the threads of the store. ``read_all`` and ``read_existing`` read in the calling thread and in
additional threads, each of which takes the next path that no thread has taken. These end with the call. They are
daemons: if storage hangs, the process can still exit. If the system starts no more threads, as when the interpreter is
about to end, the threads that exist read all files.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, NewType, Protocol, Self, TypeVar

from gracepoint.machine import LocalPath
from gracepoint.threads import NoThread, start_thread

if TYPE_CHECKING:
    from gracepoint.checkpoint.memory import ArrayBytes
    from gracepoint.checkpoint.storage.buffers import Buffer, Later

logger = logging.getLogger(__name__)

#: Identifies one version of a value. It changes with every write.
Generation = NewType("Generation", str)


#: Bytes of a value that are still in the cache of the core when their checksum is computed.
HOT_BYTES = 1 << 20


class StaleGeneration(OSError):
    """A value no longer has the expected generation: another writer replaced or deleted it."""


class NotAdmitted(OSError):
    """A store does not know who this process is, or the process may not read there.

    Its credentials are missing, wrong, expired or not sufficient. The error says nothing about what may be written:
    ``checks.must_not_write`` is False for it.
    """


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that was read.

    Attributes:
        data: The bytes of the value.
        generation: The version of the value.
    """

    data: bytes
    generation: Generation


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a store reports about a value without reading it.

    Attributes:
        key: Key of the value. In a listing, it is relative to the listed folder.
        bytes: Size of the value.
        generation: The version of the value.
        changed_s: Time of the last write, in seconds since the epoch by the store's clock.
    """

    key: str
    bytes: int
    generation: Generation
    changed_s: float


@dataclasses.dataclass(frozen=True)
class Child:
    """A name directly below a folder.

    Attributes:
        name: The name, which contains no slash.
        is_folder: True for folders. False for values and for symbolic links, which are never followed.
        is_link: True for symbolic links.
    """

    name: str
    is_folder: bool
    is_link: bool = False


class Reader(Protocol):
    """An open value, of which ranges can be read.

    Attributes:
        size_bytes: Size of the value when it was opened.
        best_bytes: How many bytes a caller of ``read_into`` should ask for at once. It is more than a few MiB only if
            the bytes are read in parallel.
    """

    size_bytes: int
    best_bytes: int

    def read_into(self, out: memoryview, offset: int) -> int:
        """Reads bytes from ``offset`` into ``out``. Returns the number of bytes read, 0 at the end of the value.

        Raises:
            StaleGeneration: The value was replaced or deleted, and the store does not keep what was opened.
            OSError: The value cannot be read.
        """


@dataclasses.dataclass(frozen=True)
class Noted:
    """What a store that cannot rename knows of a value.

    Attributes:
        generation: The version of the value.
        note: What its writer left with it. Empty if it left nothing.
    """

    generation: Generation
    note: str


class StoragePath(abc.ABC):
    """A location in a store.

    Attributes:
        store: The store. Two locations are equal only in the same store.
        key: The complete key in the store, without a slash at its end.
        renames: True if ``publish`` renames folders atomically, ``make_folder`` makes them, and ``staying`` notices
            when one is gone. Steps are then committed by a rename. False if folders are only prefixes of names. Steps
            are then committed by their manifest, and only ``create``, ``replace``, ``put`` and ``write_if`` write
            values.
        is_far: True if everything that is asked takes a round trip over a network. Then several looks are made at once,
            small values are read ahead, and what can wait is left to a thread.
        look_every_s: Seconds between two looks at what another process may write. Looks at some stores cost money.
    """

    __slots__ = ("key", "store")

    renames: ClassVar[bool] = True
    is_far: ClassVar[bool] = False
    look_every_s: ClassVar[float] = 0.1

    def __init__(self, store: object, key: str) -> None:
        self.store = store
        self.key = key

    # Locations.

    def at(self, key: str) -> Self:
        """Returns the location of another key in the same store."""
        return type(self)(self.store, key)

    def __truediv__(self, name: str) -> Self:
        """Returns the location of ``name`` in this folder. For an empty name, returns the folder itself."""
        if not name:
            return self
        return self.at(f"{self.key.rstrip('/')}/{name}" if self.key else name)

    @abc.abstractmethod
    def __str__(self) -> str:
        """Returns the location in the form that users write and messages show."""

    def __repr__(self) -> str:
        return f"StoragePath({str(self)!r})"

    def __fspath__(self) -> str:
        return str(self.local())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoragePath) and (self.store, self.key) == (other.store, other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __lt__(self, other: StoragePath) -> bool:
        return self.key.split("/") < other.key.split("/")

    @property
    def name(self) -> str:
        """The last part of the key. Empty at the top of the store."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        """The folder above. The top of the store is its own parent."""
        above, slash, _ = self.key.rpartition("/")
        return self.at(above or slash)

    def with_name(self, name: str) -> Self:
        return self.parent / name

    def below(self, top: StoragePath) -> str:
        """Returns the key relative to ``top``.

        Raises:
            ValueError: The location is not below ``top``.
        """
        prefix = f"{top.key.rstrip('/')}/" if top.key else ""
        if self.store is not top.store or not self.key.startswith(prefix):
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

    def local(self) -> LocalPath:
        """Returns the path in the local file system.

        Raises:
            TypeError: The store is not a file system.
        """
        raise TypeError(f"{self} is not in a file system: expected a local path")

    def for_users(self) -> LocalPath | str:
        """Returns the location in the type that public results use: a path, or a URI."""
        return str(self)

    @abc.abstractmethod
    def kvstore_spec(self) -> dict[str, Any]:
        """Returns TensorStore's key-value store spec of all values in this folder.

        It can be opened in contexts that ``in_memory.new_context`` makes.
        """

    @property
    def niceness(self) -> int:
        """How nice threads are that write here. 0: as nice as those that train."""
        return 0

    @property
    def tensorstore_error(self) -> str | None:
        """Why TensorStore cannot read from the store. None: it can, or that is not known."""
        return None

    # One value.

    @abc.abstractmethod
    def create(self, data: bytes) -> Generation:
        """Writes the value if there is none. If several callers do so at once, one succeeds.

        The value becomes visible immediately and as a whole. In a file system, a crash of the machine may lose it.

        Raises:
            FileExistsError: There is a value.
        """

    @abc.abstractmethod
    def read(self) -> Value:
        """Returns the value with its generation.

        Raises:
            FileNotFoundError: The value does not exist.
        """

    def read_bytes(self) -> bytes:
        return self.read().data

    @abc.abstractmethod
    def replace(self, data: bytes, generation: Generation) -> Generation:
        """Replaces the value if it still has ``generation``. If several callers do so at once, one succeeds.

        The value becomes visible immediately and as a whole. In a file system, a crash of the machine may lose it.

        Raises:
            StaleGeneration: The value has another generation, or was deleted.
        """

    @abc.abstractmethod
    def put(self, data: bytes) -> None:
        """Writes the value, even if there is one already. It becomes visible as a whole, and is durable on return.

        Several processes may write the same value at once. The folder may be published meanwhile. The value is then in
        the published folder.

        Raises:
            FileNotFoundError: The folder does not exist, and the store has real directories.
        """

    @abc.abstractmethod
    def touch(self) -> None:
        """Writes an empty value, even if there is a value already. A crash may lose it."""

    @abc.abstractmethod
    def write_large(
        self,
        data: ArrayBytes,
        buffer: Buffer,
        go_on: Callable[[], None],
        *,
        direct: bool,
        later: Later | None = None,
    ) -> int:
        """Writes the value from memory. Returns the CRC-32 of its bytes.

        Parts of the value may be visible while it is written. On return its bytes are durable, unless ``later`` was
        called. Its name is durable after ``sync`` of its folder.

        Args:
            data: Bytes of the value.
            buffer: Aligned memory for data that cannot be written in place.
            go_on: Called before each block. An error that it raises ends the write.
            direct: True to bypass the caches of this machine. Allowed only if ``has_direct_io`` returns True.
            later: Stores that sync files do not sync this one, but call ``later`` with it, once and in the calling
                thread. Other stores do not call ``later``. None: the value is durable on return.
        """

    def write_if(
        self,
        data: ArrayBytes,
        checksum: int,
        only_if: Generation | None,
        note: str,
        go_on: Callable[[], None] | None,
    ) -> Generation:
        """Writes the value with a note, and returns its generation. Only in stores that cannot rename.

        The value becomes visible as a whole, and is durable on return.

        Args:
            data: Bytes of the value.
            checksum: Their CRC-32.
            only_if: The generation that the value must have. None: there must be no value.
            note: The note. The store may add more at its end, so ``noted`` returns a note that begins with this one.
            go_on: Called again and again. An error that it raises ends the write. None: there is a timeout.

        Raises:
            FileExistsError: ``only_if`` is None, and there is a value.
            StaleGeneration: The value has another generation.
        """
        raise TypeError(f"{self}: only stores that cannot rename keep notes")

    def noted(self) -> Noted | None:
        """Returns the generation and the note of the value. None if it does not exist. Only as ``write_if``."""
        raise TypeError(f"{self}: only stores that cannot rename keep notes")

    def has_direct_io(self) -> bool:
        """Returns whether writes of values in this folder can bypass the caches of this machine."""
        return False

    def volume(self) -> int:
        """Returns a number that identifies the volume of this folder. ``has_direct_io`` is the same on all of it."""
        return -1

    @abc.abstractmethod
    def open(self) -> AbstractContextManager[Reader]:
        """Opens the value for reading ranges.

        Raises:
            FileNotFoundError: The value does not exist.
        """

    @abc.abstractmethod
    def entry(self) -> Entry | None:
        """Returns what the store reports about the value without reading it. None if the value does not exist."""

    def is_value(self) -> bool:
        return self.entry() is not None

    @abc.abstractmethod
    def delete(self) -> None:
        """Deletes the value. Does nothing if it does not exist."""

    def delete_version(self, generation: Generation | None, go_on: Callable[[], None] | None = None) -> bool:
        """Deletes the value if it has ``generation``, or ``generation`` is None. ``go_on``: as in ``write_if``.

        Where a request can arrive late or twice, another version is never deleted. Elsewhere there is no condition, and
        whichever version is there is deleted.

        Returns False if the store answers that the value has another generation. Not all stores say so: ``gs://``
        answers as if there were no value, and the result is True.
        """
        self.delete()
        return True

    @abc.abstractmethod
    def check_usable(self) -> None:
        """Checks that this process can write and read below the folder, and that conditions on writes hold.

        Raises:
            OSError: It cannot. The message says why, and what to do.
        """

    # Folders.

    @abc.abstractmethod
    def exists(self) -> bool:
        """Returns whether there is a value or a folder."""

    @abc.abstractmethod
    def is_folder(self) -> bool:
        """Returns whether there is a folder."""

    def is_link(self) -> bool:
        """Returns whether there is a symbolic link. Stores without links return False."""
        return False

    @abc.abstractmethod
    def children(self) -> list[Child]:
        """Returns the names directly below the folder, in any order.

        Raises:
            FileNotFoundError: The folder does not exist.
        """

    @abc.abstractmethod
    def entries(self) -> list[Entry]:
        """Returns all values below the folder, in any order. Empty if the folder does not exist.

        Values that are written or deleted meanwhile may be included or not. All other values are included.
        """

    @abc.abstractmethod
    def last_change_s(self) -> float:
        """Returns the time of the last change here or below, by the store's clock. 0 if nothing exists here."""

    @abc.abstractmethod
    def make_folder(self, *, parents: bool = True, exclusive: bool = False) -> None:
        """Makes the folder, if the store represents folders. It is durable only after ``sync``.

        Args:
            parents: True to make missing folders above it, too. If False, a store that has real directories raises
                FileNotFoundError for a missing parent.
            exclusive: True to fail if the folder exists already. If several callers do so at once, one succeeds.

        Raises:
            FileExistsError: The folder exists, and ``exclusive`` is True.
        """

    @abc.abstractmethod
    def make_folder_durably(self) -> None:
        """Makes the folder and the folders above it. They are durable on return."""

    @abc.abstractmethod
    def delete_folder(self) -> None:
        """Deletes the folder and everything in it. Does nothing if it does not exist.

        ``undeleted.delete_folder`` notes an error instead of raising it.

        Raises:
            OSError: Something cannot be deleted, and stays; the error of the first. All else is deleted.
        """

    def delete_entries(self, entries: Iterable[Entry], go_on: Callable[[], None] | None = None) -> None:
        """Deletes values below the folder as ``delete_version`` does, each with the generation of its entry.

        ``go_on`` is called before each request. An error that it raises ends the deletion.

        Raises:
            PermissionError: The store refuses to delete some of them. All others are deleted.
            OSError: The store cannot be reached, so that not all were tried.
        """
        refused: list[PermissionError] = []

        def delete(entry: Entry) -> None:
            try:
                (self / entry.key).delete_version(entry.generation, go_on)
            except PermissionError as error:  # a lock or a retention policy of one value says nothing of the others
                refused.append(error)

        self.at_once(functools.partial(delete, entry) for entry in entries)
        if refused:
            raise refused[0]

    @abc.abstractmethod
    def publish(self, target: StoragePath) -> None:
        """Renames the folder atomically: readers see all of it at ``target``, or nothing.

        If several callers publish to one target, one succeeds. Values that are written here meanwhile end up either
        here or in ``target``. The new name is durable after ``sync`` of the folder above.

        Raises:
            FileExistsError: ``target`` exists and is not an empty folder.
            FileNotFoundError: The folder does not exist.
        """

    @abc.abstractmethod
    def staying(self) -> AbstractContextManager[Callable[[], bool]]:
        """Yields a function that returns whether this is still the folder that had this name on entry.

        Raises:
            FileNotFoundError: The folder does not exist.
        """

    @abc.abstractmethod
    def sync(self) -> None:
        """Makes the entries of the folder durable: which names it has, and which files these names refer to."""

    # The store.

    def at_once(self, acts: Iterable[Callable[[], object]]) -> None:
        """Calls functions, and raises the first error. If the store is far, several at a time: each waits for it."""
        for act in acts:
            act()

    @abc.abstractmethod
    def now_s(self) -> float:
        """Returns the time by the clock that dates the values in the folder. It may differ from this machine's."""

    def sleep(self, seconds: float) -> None:
        """Returns after a number of seconds by the store's clock."""
        time.sleep(seconds)


def sync_folders(folders: Iterable[StoragePath]) -> None:
    """Makes the entries of ``folders`` durable. Syncs each folder once."""
    for folder in sorted(set(folders)):
        folder.sync()


_limits = threading.local()


@contextlib.contextmanager
def ended_by(go_on: Callable[[], None] | None) -> Iterator[None]:
    """Within the block, requests of this thread call ``go_on`` again and again. An error that it raises ends them.

    Until then, requests that fail are repeated. The limit of an outer block holds, too. None sets no further limit.
    """
    outer = current_limit()
    if go_on is None or outer is None:
        _limits.go_on = go_on or outer
    else:
        inner = go_on

        def both() -> None:
            outer()
            inner()

        _limits.go_on = both
    try:
        yield
    finally:
        _limits.go_on = outer


def current_limit() -> Callable[[], None] | None:
    """Returns what ends the requests of this thread. None if nothing does."""
    return getattr(_limits, "go_on", None)


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
    limit = current_limit()

    def help_() -> None:
        with ended_by(limit):
            work.run()

    helpers = []
    for number in range(1, min(count, CONCURRENT_READS)):
        helper = threading.Thread(target=help_, name=f"gracepoint: reads {number}", daemon=True)
        try:
            start_thread(helper)
        except NoThread as error:
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

    root.at_once(functools.partial(note, key) for key in keys)
    return {key: results[key] for key in keys}
