"""What the checkpoint engine asks of a store, in words that a file system and an object store can both say.

A store keeps **values** under keys, which are names joined by slashes. A **folder** is all values whose keys begin with
the folder's key and a slash. A file system has real directories for this; an object store has only prefixes.

Implementations have no threads of their own. Every method may be called from any thread, and from any process that
shares the store. Nobody owns a value: writers that may meet use the conditional methods.

Errors are the built-in ``FileNotFoundError``, ``FileExistsError`` and ``OSError``, whatever the store.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NewType, Protocol

if TYPE_CHECKING:
    from gracepoint.checkpoint.memory.array_bytes import ArrayBytes
    from gracepoint.checkpoint.storage.direct_io import Buffer

#: Identifies one version of a value. It changes with every write.
Generation = NewType("Generation", str)


class StaleGeneration(OSError):
    """A value is not of the expected generation any more: another writer replaced or deleted it."""


@dataclasses.dataclass(frozen=True)
class Value:
    """A value that was read.

    Attributes:
        data: Its bytes.
        generation: Its version.
    """

    data: bytes
    generation: Generation


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a store tells of a value without reading it.

    Attributes:
        key: Of the value; in a listing, relative to the folder that was listed.
        bytes: Its size.
        generation: Its version.
        changed_s: When it was last written, seconds since the epoch by the store's clock.
    """

    key: str
    bytes: int
    generation: Generation
    changed_s: float


@dataclasses.dataclass(frozen=True)
class Child:
    """A name directly below a folder.

    Attributes:
        name: Without any slash.
        is_folder: False for values and for symbolic links, which are never followed.
        is_link: True for symbolic links.
    """

    name: str
    is_folder: bool
    is_link: bool = False


class Reader(Protocol):
    """An open value, for reading ranges of it.

    Attributes:
        size_bytes: Size of the value when it was opened.
    """

    size_bytes: int

    def read_into(self, out: memoryview, offset: int) -> int:
        """Reads bytes from ``offset`` into ``out``; returns how many, 0 at the end of the value."""


class Backend(Protocol):
    """A store. Keys are complete: they begin at the top of the store."""

    def url(self, key: str) -> str:
        """Returns the location as users write it, and as messages show it."""

    def local_path(self, key: str) -> str:
        """Returns the path in the local file system.

        Raises:
            TypeError: The store is not a file system.
        """

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        """Returns TensorStore's key-value store spec of all values whose keys begin with ``key``.

        ``tensorstore_context.new_context`` makes the contexts that it can be opened in.
        """

    # One value.

    def create(self, key: str, data: bytes) -> Generation:
        """Writes a value if there is none. Of several callers at once, one succeeds.

        The value is visible at once and as a whole, and survives a crash only after ``sync``.

        Raises:
            FileExistsError: There is one.
        """

    def read(self, key: str) -> Value:
        """Returns a value with its generation.

        Raises:
            FileNotFoundError: There is none.
        """

    def replace(self, key: str, data: bytes, generation: Generation) -> Generation:
        """Replaces a value if it is still of ``generation``. Of several callers at once, one succeeds.

        The value is visible at once and as a whole, and survives a crash only after ``sync``.

        Raises:
            StaleGeneration: It is not.
        """

    def put(self, key: str, data: bytes) -> None:
        """Writes a value whether or not there is one. It is visible as a whole, and on return it is durable.

        Several processes may write the same value at once. The folder may be published meanwhile: the value stays in
        it.

        Raises:
            FileNotFoundError: The folder does not exist, in a store that has folders of their own.
        """

    def touch(self, key: str) -> None:
        """Writes a value of no bytes whether or not there is one. A crash may lose it."""

    def write_large(
        self, key: str, data: ArrayBytes, buffer: Buffer, go_on: Callable[[], None], *, direct: bool
    ) -> int:
        """Writes a value from memory; returns the CRC-32 of its bytes.

        The value need not be visible as a whole while it is written. On return its bytes are durable; its name is so
        after ``sync`` of its folder.

        Args:
            key: Of the value.
            data: Its bytes.
            buffer: Aligned memory for data that cannot be written as it lies.
            go_on: Called before each block. What it raises ends the write.
            direct: Whether to bypass caches of this machine; only where ``has_direct_io`` says that it is possible.
        """

    def has_direct_io(self, key: str) -> bool:
        """Returns whether values in the folder can be written past the caches of this machine."""

    def volume(self, key: str) -> int:
        """Returns a number of the medium that the folder is on. ``has_direct_io`` is the same for all of a medium."""

    def open(self, key: str) -> AbstractContextManager[Reader]:
        """Opens a value for reading ranges.

        Raises:
            FileNotFoundError: There is none.
        """

    def entry(self, key: str) -> Entry | None:
        """Returns what is known of a value without reading it; None if there is none."""

    def delete(self, key: str) -> None:
        """Deletes a value, if there is one."""

    # Folders.

    def exists(self, key: str) -> bool:
        """Returns whether there is a value or a folder."""

    def is_folder(self, key: str) -> bool:
        """Returns whether there is a folder."""

    def is_link(self, key: str) -> bool:
        """Returns whether there is a symbolic link. Stores without links return False."""

    def children(self, key: str) -> list[Child]:
        """Returns the names directly below a folder, in any order.

        Raises:
            FileNotFoundError: There is no folder.
        """

    def entries(self, key: str) -> list[Entry]:
        """Returns all values below a folder, in any order; none if there is no folder.

        Values that are written or deleted meanwhile may be in it or not. All others are.
        """

    def last_change_s(self, key: str) -> float:
        """Returns when anything at or below ``key`` changed last, by the store's clock; 0 if there is nothing."""

    def make_folder(self, key: str, *, parents: bool = True, exclusive: bool = False) -> None:
        """Makes a folder, where the store has folders of their own. It is not durable before ``sync``.

        Args:
            key: Of the folder.
            parents: Whether missing folders above it are made, too. Without, a store that has folders of their own
                raises FileNotFoundError.
            exclusive: Whether it is an error that there is such a folder. Of several callers at once, one succeeds.

        Raises:
            FileExistsError: With ``exclusive``, there is one.
        """

    def make_folder_durably(self, key: str) -> None:
        """Makes a folder and those above it; they are durable on return."""

    def delete_folder(self, key: str) -> None:
        """Deletes a folder with all that is in it. What cannot be deleted is left; nothing is raised."""

    def publish(self, source: str, target: str) -> None:
        """Gives a folder another name, atomically: readers see all of it at ``target``, or nothing.

        Of several callers with one target, one succeeds. Values that are written to ``source`` meanwhile are at one of
        the two. The new name is durable after ``sync`` of the folder above.

        Raises:
            FileExistsError: There is something at ``target`` that is not an empty folder.
            FileNotFoundError: There is no ``source``.
        """

    def staying(self, key: str) -> AbstractContextManager[Callable[[], bool]]:
        """Yields a function that tells whether ``key`` is still the folder that had this name at the beginning.

        Raises:
            FileNotFoundError: There is no folder.
        """

    def sync(self, keys: Iterable[str]) -> None:
        """Makes durable which names are directly below these folders, and what was created or replaced there."""

    def now_s(self, key: str) -> float:
        """Returns the time by the clock that dates the values in a folder, which may differ from this machine's."""
