"""What the stores in memory of the tests share."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gracepoint.checkpoint.storage.storage_path import StoragePath


class BytesReader:
    """Reads parts of bytes that are in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size_bytes = self.best_bytes = len(data)

    def read_into(self, out: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)


class FakeStore:
    """A store without a file system and without links, by a clock that a test moves.

    Attributes:
        time_s: Its clock, in seconds.
        before: Called with the name and the key of each operation before it is carried out. It may raise.
        lock: One operation at a time holds it.
        numbers: Numbers of versions.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.lock = threading.RLock()
        self.time_s = 1_000_000.0
        self.before: Callable[[str, str], None] = lambda operation, key: None

    def crash(self, *, keeps_names: bool) -> None:
        """Forgets what is not durable. Names that are not may be kept."""
        raise NotImplementedError

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds


class FakePath(StoragePath):
    """A location in such a store."""

    __slots__ = ()

    store: FakeStore

    def kvstore_spec(self) -> dict[str, Any]:
        raise TypeError(f"{self} is not in a store of TensorStore's")

    @contextlib.contextmanager
    def open(self) -> Iterator[BytesReader]:
        yield BytesReader(self.read_bytes())

    def check_usable(self) -> None:
        """Does nothing: the store is the test's own."""

    def now_s(self) -> float:
        return self.store.time_s

    def sleep(self, seconds: float) -> None:
        self.store.sleep(seconds)
