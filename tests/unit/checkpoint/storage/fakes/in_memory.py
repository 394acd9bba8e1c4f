"""What the back ends in memory of the tests share."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from gracepoint.checkpoint.storage.backend import Value


class BytesReader:
    """Reads parts of bytes that are in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size_bytes = self.best_bytes = len(data)

    def read_into(self, out: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)


class InMemory:
    """A back end without a file system and without links, by a clock that a test moves.

    Attributes:
        time_s: Its clock, in seconds.
        before: Called with the name and the key of each operation before it is carried out. It may raise.
    """

    look_every_s = 0.1

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self.time_s = 1_000_000.0
        self.before: Callable[[str, str], None] = lambda operation, key: None

    def read(self, key: str) -> Value:
        raise NotImplementedError

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[BytesReader]:
        yield BytesReader(self.read(key).data)

    def local_path(self, key: str) -> str:
        raise TypeError(f"{key} is not in a file system")

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        raise TypeError(f"{key} is not a store of TensorStore's")

    def has_direct_io(self, key: str) -> bool:
        return False

    def check_usable(self, key: str) -> None:
        pass

    def at_once(self, acts: Iterable[Callable[[], object]]) -> None:
        for act in acts:
            act()

    def is_link(self, key: str) -> bool:
        return False
