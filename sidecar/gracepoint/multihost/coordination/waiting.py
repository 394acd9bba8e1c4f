"""At which barriers this process waits now, and for whom. The threads that wait say so; any thread may ask."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

from gracepoint.multihost.coordination.arrivals import PLAIN
from gracepoint.multihost.coordination.store import KeyValueStore

_ALL = "all"


def missing(store: KeyValueStore, key: str, who: str, participants: Sequence[int]) -> list[int]:
    """Returns which of the participants have not come to a barrier.

    Args:
        store: The store.
        key: The barrier's key.
        who: The name of the set of participants.
        participants: The processes that take part.
    """
    marks = PLAIN.marks(store.list(f"{key}/.arrived/{who}"), len(participants))
    return [process for process, mark in zip(participants, marks, strict=True) if not mark]


class Waiting:
    """See the module.

    Args:
        store: The store of all processes.
        process_index: This process.
        process_count: How many processes there are.
    """

    def __init__(self, store: KeyValueStore, process_index: int, process_count: int) -> None:
        self._store = store
        self._process_index = process_index
        self._process_count = process_count
        self._awaited: dict[str, Callable[[], Sequence[int]]] = {}
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def at(self, key: str, awaited: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Notes that a thread waits within the block.

        Args:
            key: What it waits for.
            awaited: Returns the processes that have not come yet.
        """
        with self._lock:
            self._awaited[key] = awaited
        try:
            yield
        finally:
            with self._lock:
                del self._awaited[key]

    @contextlib.contextmanager
    def expecting(self, key: str) -> Iterator[None]:
        """Notes that this process has come to a point at which other code, such as JAX's, waits for all processes.

        Within the block this process waits for those that have not come to that point. Every process has such a block.

        Args:
            key: Unique, as for a barrier. The keys below it stay until the caller removes them.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        PLAIN.arrive(self._store, f"{key}/.arrived/{_ALL}", self._process_index, self._process_count)
        with self.at(key, lambda: missing(self._store, key, _ALL, range(self._process_count))):
            yield

    def awaited(self) -> list[int]:
        """Returns the processes for which any thread waits, sorted.

        Raises:
            StoreUnavailable: The store cannot be reached.
        """
        with self._lock:
            asked = list(self._awaited.values())
        return sorted({process for ask in asked for process in ask()})
