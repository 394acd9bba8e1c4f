"""The interface of a store for the checkpoint engine. File systems and object stores implement it.

A store keeps **values** under keys, which are names joined by slashes. A **folder** is all values whose keys begin with
the folder's key and a slash. A file system has real directories for this; an object store has only prefixes.

Implementations have no threads. Every method may be called from any thread, and from any process that
shares the store. Nobody owns a value: concurrent writers of one value use the conditional methods.

All stores raise the built-in errors ``FileNotFoundError``, ``FileExistsError`` and ``OSError``.

``FlatBackend`` is what stores that cannot rename offer besides ``Backend``: writes with conditions and notes.

``ended_by`` ends the requests of a block of code when its time is over, without each function passing a deadline on.
The limit belongs to the thread that sets it. Stores that make requests ask for it in the thread that calls them
(``current``), and pass it on to the threads that they start.

``new_context`` makes TensorStore contexts, which all share the same values in memory. TensorStore's threads belong to
the contexts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NewType, Protocol

if TYPE_CHECKING:
    import tensorstore as ts

    from gracepoint.checkpoint.memory import ArrayBytes
    from gracepoint.checkpoint.storage.direct_io import Buffer, Later

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


class Backend(Protocol):
    """A store. All keys are complete, which means relative to the top of the store.

    Attributes:
        renames: True if ``publish`` renames folders atomically, ``make_folder`` makes them, and ``staying`` notices
            when one is gone. Steps are then committed by a rename. False if folders are only prefixes of names. Steps
            are then committed by their manifest, and only ``create``, ``replace`` and ``put`` write values.
        is_far: True if everything that is asked takes a round trip over a network. Then several looks are made at once,
            small values are read ahead, and what can wait is left to a thread.
        look_every_s: Seconds between two looks at what another process may write. Looks at some stores cost money.
    """

    renames: bool
    is_far: bool
    look_every_s: float

    def url(self, key: str) -> str:
        """Returns the location in the form that users write and messages show."""

    def local_path(self, key: str) -> str:
        """Returns the path in the local file system.

        Raises:
            TypeError: The store is not a file system.
        """

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        """Returns TensorStore's key-value store spec of all values whose keys begin with ``key``.

        It can be opened in contexts that ``new_context`` makes.
        """

    # One value.

    def create(self, key: str, data: bytes) -> Generation:
        """Writes a value if the key has none. If several callers do so at once, one succeeds.

        The value becomes visible immediately and as a whole. In a file system, a crash of the machine may lose it.

        Raises:
            FileExistsError: The key already has a value.
        """

    def read(self, key: str) -> Value:
        """Returns a value with its generation.

        Raises:
            FileNotFoundError: The value does not exist.
        """

    def replace(self, key: str, data: bytes, generation: Generation) -> Generation:
        """Replaces a value if it still has ``generation``. If several callers do so at once, one succeeds.

        The value becomes visible immediately and as a whole. In a file system, a crash of the machine may lose it.

        Raises:
            StaleGeneration: The value has another generation, or was deleted.
        """

    def put(self, key: str, data: bytes) -> None:
        """Writes a value, even if the key has one already. It becomes visible as a whole, and is durable on return.

        Several processes may write the same value at once. The folder may be published meanwhile. The value is then in
        the published folder.

        Raises:
            FileNotFoundError: The folder does not exist, and the store has real directories.
        """

    def touch(self, key: str) -> None:
        """Writes an empty value, even if the key has a value already. A crash may lose it."""

    def write_large(
        self,
        key: str,
        data: ArrayBytes,
        buffer: Buffer,
        go_on: Callable[[], None],
        *,
        direct: bool,
        later: Later | None = None,
    ) -> int:
        """Writes a value from memory. Returns the CRC-32 of its bytes.

        Parts of the value may be visible while it is written. On return its bytes are durable, unless ``later`` was
        called. Its name is durable after ``sync`` of its folder.

        Args:
            key: Key of the value.
            data: Bytes of the value.
            buffer: Aligned memory for data that cannot be written in place.
            go_on: Called before each block. An error that it raises ends the write.
            direct: True to bypass the caches of this machine. Allowed only if ``has_direct_io`` returns True.
            later: Stores that sync files do not sync this one, but call ``later`` with it, once and in the calling
                thread. Other stores do not call ``later``. None: the value is durable on return.
        """

    def has_direct_io(self, key: str) -> bool:
        """Returns whether writes of values in the folder can bypass the caches of this machine."""

    def volume(self, key: str) -> int:
        """Returns a number that identifies the volume of the folder. ``has_direct_io`` is the same on all of it."""

    def open(self, key: str) -> AbstractContextManager[Reader]:
        """Opens a value for reading ranges.

        Raises:
            FileNotFoundError: The value does not exist.
        """

    def entry(self, key: str) -> Entry | None:
        """Returns what the store reports about a value without reading it. None if the value does not exist."""

    def delete(self, key: str) -> None:
        """Deletes a value. Does nothing if it does not exist."""

    def delete_version(self, key: str, generation: Generation | None) -> bool:
        """Deletes a value if it has ``generation``, or ``generation`` is None.

        Where a request can arrive late or twice, another version is never deleted. Elsewhere there is no condition, and
        whichever version is there is deleted.

        Returns False if the store answers that the value has another generation. Not all stores say so: ``gs://``
        answers as if there were no value, and the result is True.
        """

    def check_usable(self, key: str) -> None:
        """Checks that this process can write and read below a folder, and that conditions on writes hold.

        Raises:
            OSError: It cannot. The message says why, and what to do.
        """

    # Folders.

    def exists(self, key: str) -> bool:
        """Returns whether ``key`` is a value or a folder."""

    def is_folder(self, key: str) -> bool:
        """Returns whether ``key`` is a folder."""

    def is_link(self, key: str) -> bool:
        """Returns whether ``key`` is a symbolic link. Stores without links return False."""

    def children(self, key: str) -> list[Child]:
        """Returns the names directly below a folder, in any order.

        Raises:
            FileNotFoundError: The folder does not exist.
        """

    def entries(self, key: str) -> list[Entry]:
        """Returns all values below a folder, in any order. Empty if the folder does not exist.

        Values that are written or deleted meanwhile may be included or not. All other values are included.
        """

    def last_change_s(self, key: str) -> float:
        """Returns the time of the last change at or below ``key``, by the store's clock. 0 if nothing exists there."""

    def make_folder(self, key: str, *, parents: bool = True, exclusive: bool = False) -> None:
        """Makes a folder, if the store represents folders. It is durable only after ``sync``.

        Args:
            key: Key of the folder.
            parents: True to make missing folders above it, too. If False, a store that has real directories raises
                FileNotFoundError for a missing parent.
            exclusive: True to fail if the folder exists already. If several callers do so at once, one succeeds.

        Raises:
            FileExistsError: The folder exists, and ``exclusive`` is True.
        """

    def make_folder_durably(self, key: str) -> None:
        """Makes a folder and the folders above it. They are durable on return."""

    def delete_folder(self, key: str) -> None:
        """Deletes a folder and everything in it. Does nothing if it does not exist.

        Raises:
            OSError: Something cannot be deleted, and stays; the error of the first. All else is deleted.
        """

    def publish(self, source: str, target: str) -> None:
        """Renames a folder atomically: readers see all of it at ``target``, or nothing.

        If several callers publish to one target, one succeeds. Values that are written to ``source`` meanwhile end up
        either in ``source`` or in ``target``. The new name is durable after ``sync`` of the folder above.

        Raises:
            FileExistsError: ``target`` exists and is not an empty folder.
            FileNotFoundError: ``source`` does not exist.
        """

    def staying(self, key: str) -> AbstractContextManager[Callable[[], bool]]:
        """Yields a function that returns whether ``key`` is still the folder that had this name on entry.

        Raises:
            FileNotFoundError: The folder does not exist.
        """

    def sync(self, keys: Iterable[str]) -> None:
        """Makes the entries of these folders durable: which names they have, and which files these names refer to."""

    def at_once(self, acts: Iterable[Callable[[], object]]) -> None:
        """Calls functions, and raises the first error. If the store is far, several at a time: each waits for it."""

    def now_s(self, key: str) -> float:
        """Returns the time by the clock that dates the values in a folder. It may differ from this machine's clock."""


@dataclasses.dataclass(frozen=True)
class Noted:
    """What a store that cannot rename knows of a value.

    Attributes:
        generation: The version of the value.
        note: What its writer left with it. Empty if it left nothing.
    """

    generation: Generation
    note: str


class FlatBackend(Backend, Protocol):
    """A store whose ``renames`` is False. Its values are visible as a whole and durable when a call returns.

    Attributes:
        tensorstore_error: Why TensorStore cannot read from the store. None: it can, or that is not known.
    """

    tensorstore_error: str | None

    def write_if(
        self,
        key: str,
        data: ArrayBytes,
        checksum: int,
        only_if: Generation | None,
        note: str,
        go_on: Callable[[], None] | None,
    ) -> Generation:
        """Writes a value with a note, and returns its generation.

        Args:
            key: Key of the value.
            data: Bytes of the value.
            checksum: Their CRC-32.
            only_if: The generation that the value must have. None: there must be no value.
            note: The note. The store may add more at its end, so ``noted`` returns a note that begins with this one.
            go_on: Called again and again. An error that it raises ends the write. None: there is a timeout.

        Raises:
            FileExistsError: ``only_if`` is None, and there is a value.
            StaleGeneration: The value has another generation.
        """

    def noted(self, key: str) -> Noted | None:
        """Returns the generation and the note of a value. None if it does not exist."""

    def delete_all(self, entries: Iterable[Entry], go_on: Callable[[], None] | None = None) -> None:
        """Deletes values, each only if it has the generation of its entry. The keys of the entries are complete.

        ``go_on`` is called before each request. An error that it raises ends the deletion.

        Raises:
            PermissionError: The store refuses to delete some of them. All others are deleted.
            OSError: The store cannot be reached, so that not all were tried.
        """

    def sleep(self, seconds: float) -> None:
        """Returns after a number of seconds by the store's clock."""


_limits = threading.local()


@contextlib.contextmanager
def ended_by(go_on: Callable[[], None] | None) -> Iterator[None]:
    """Within the block, requests of this thread call ``go_on`` again and again. An error that it raises ends them.

    Until then, requests that fail are repeated. The limit of an outer block holds, too. None sets no further limit.
    """
    outer = current()
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


def current() -> Callable[[], None] | None:
    """Returns what ends the requests of this thread. None if nothing does."""
    return getattr(_limits, "go_on", None)


# A worker process imports TensorStore only if a save needs it.


@functools.cache
def shared_context() -> ts.Context:
    """Returns the context that holds the values of ``memory://``, for the life of the process.

    Files are not locked, as some file systems have no locks: each file has one writer, or writers of which any may win
    (``format.ocdbt``), and appears by a rename.
    """
    import tensorstore as ts

    return ts.Context({"memory_key_value_store": {}, "file_io_locking": {"mode": "none"}})


def new_context(resources: dict[str, Any]) -> ts.Context:
    """Returns a context with its own ``resources``. The ``kvstore_spec`` of every back end can be opened in it."""
    import tensorstore as ts

    return ts.Context(resources, shared_context())


def read_alone(kvstore: dict[str, Any], timeout_s: float) -> bytes:
    """Returns the value whose key is all of the path of ``kvstore``, as TensorStore reads it.

    Raises:
        ValueError: TensorStore cannot read it, or there is no such value.
        TimeoutError: It took too long.
    """
    import tensorstore as ts

    store = ts.KvStore.open(kvstore, context=new_context({})).result(timeout=timeout_s)
    result = store.read("").result(timeout=timeout_s)
    if result.state != "value":
        raise ValueError(f"it finds no value at {kvstore}")
    return bytes(result.value)
