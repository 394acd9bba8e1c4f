"""What stores that cannot rename offer beside ``Backend``: writes with conditions and notes, conditional deletion."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from gracepoint.checkpoint.storage.backend import Backend, Entry, Generation

if TYPE_CHECKING:
    from gracepoint.checkpoint.memory.array_bytes import ArrayBytes


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

    def delete_version(self, key: str, generation: Generation | None) -> bool:
        """Deletes a value if it has ``generation``, or ``generation`` is None. Another version is never deleted.

        Returns False if the store answers that the value has another generation. Not all stores say so: ``gs://``
        answers as if there were no value, and the result is True.
        """

    def delete_all(self, entries: Iterable[Entry], go_on: Callable[[], None] | None = None) -> None:
        """Deletes values, each only if it has the generation of its entry. The keys of the entries are complete.

        ``go_on`` is called before each request. An error that it raises ends the deletion.

        Raises:
            PermissionError: The store refuses to delete some of them. All others are deleted.
            OSError: The store cannot be reached, so that not all were tried.
        """

    def sleep(self, seconds: float) -> None:
        """Returns after a number of seconds by the store's clock."""

    def at_once(self, acts: Iterable[Callable[[], object]]) -> None:
        """Calls functions, several at a time, as each mostly waits for the store. Raises the first error."""
