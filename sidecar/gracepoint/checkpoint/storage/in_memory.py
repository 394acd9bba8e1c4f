"""Checkpoints in this process's memory, in TensorStore's ``memory://`` store, with conditional writes and no files.

TensorStore's store has no directories, renames, links or locks. A folder is a prefix of keys. An empty value whose key
ends with a slash marks a folder that may be empty. ``publish`` moves all values in one TensorStore transaction, which
fails if another thread was faster. So ``renames`` is True, and steps are committed as in a file system.

``new_context`` makes TensorStore contexts, which all share these values. TensorStore's threads belong to the contexts
and do the work. The values live as long as the process. TensorStore keeps no times of values, so they are kept in a
dict under a lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

import tensorstore as ts

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.buffers import BLOCK_BYTES, Buffer, Later
from gracepoint.checkpoint.storage.storage_path import (
    HOT_BYTES,
    Child,
    Entry,
    Generation,
    StaleGeneration,
    StoragePath,
    Value,
)
from gracepoint.checksum import crc32
from gracepoint.machine import LocalPath

# The store answers at once. The timeout only keeps a defect from hanging the process.
_TIMEOUT_S = 60.0
_ATTEMPTS = 100


# Holds the values of ``memory://``, for the life of the process. Files are not locked, as some file systems have no
# locks: each file has one writer, or writers of which any may win (``format.ocdbt``), and appears by a rename.
_SHARED = ts.Context({"memory_key_value_store": {}, "file_io_locking": {"mode": "none"}})


def new_context(resources: dict[str, Any]) -> ts.Context:
    """Returns a context with its own ``resources``. The ``kvstore_spec`` of every path can be opened in it."""
    return ts.Context(resources, _SHARED)


def read_alone(kvstore: dict[str, Any], timeout_s: float) -> bytes:
    """Returns the value whose key is all of the path of ``kvstore``, as TensorStore reads it.

    Raises:
        ValueError: TensorStore cannot read it, or there is no such value.
        TimeoutError: It took too long.
    """
    store = ts.KvStore.open(kvstore, context=new_context({})).result(timeout=timeout_s)
    result = store.read("").result(timeout=timeout_s)
    if result.state != "value":
        raise ValueError(f"it finds no value at {kvstore}")
    return bytes(result.value)


class _MemoryStore:
    """The values of this process."""

    def __init__(self) -> None:
        self.store = ts.KvStore.open({"driver": "memory"}, context=_SHARED).result(timeout=_TIMEOUT_S)
        # The generation that a read of a missing value returns. It is the condition "the value does not exist".
        self.absent = self.state("\0").stamp.generation
        self._lock = threading.Lock()
        self._times: dict[str, tuple[bytes, float]] = {}  # by key: the generation, and when it was first seen

    def state(self, key: str) -> ts.KvStore.ReadResult:
        """Returns what TensorStore has at ``key``."""
        return self.store.read(key).result(timeout=_TIMEOUT_S)

    def read(self, key: str) -> Value | None:
        result = self.state(key)
        return Value(result.value, Generation(result.stamp.generation.hex())) if result.state == "value" else None

    def write(self, key: str, data: bytes, *, if_equal: bytes | None = None) -> Generation | None:
        """Returns the generation of the written value. None if the condition does not hold."""
        written = self.store.write(key, data, if_equal=if_equal).result(timeout=_TIMEOUT_S).generation
        if not written:
            return None
        with self._lock:
            self._times[key] = written, time.time()
        return Generation(written.hex())

    def keys(self, folder: str) -> list[str]:
        """Returns all keys in a folder, relative to it. The folder's own mark is included as an empty key."""
        prefix = f"{folder}/" if folder else ""
        names = self.store.list(_range(folder), strip_prefix_length=len(prefix.encode())).result(timeout=_TIMEOUT_S)
        return [key.decode() for key in names]

    def entry(self, key: str, name: str, value: Value) -> Entry:
        generation = bytes.fromhex(value.generation)
        with self._lock:
            times = self._times.get(key)
            if times is None or times[0] != generation:  # TensorStore's drivers also write values
                times = self._times[key] = generation, time.time()
        return Entry(name, len(value.data), value.generation, times[1])


_MEMORY = _MemoryStore()


class MemoryPath(StoragePath):
    """A key in this process's memory."""

    __slots__ = ()

    def __init__(self, key: str) -> None:
        super().__init__(_MEMORY, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.key,)

    def at(self, key: str) -> Self:
        return type(self)(key)

    def __str__(self) -> str:
        return f"memory://{self.key}"

    def local(self) -> LocalPath:
        raise TypeError(f"{self} is not in a file system: expected a checkpoint directory that is a local path")

    def kvstore_spec(self) -> dict[str, Any]:
        return {"driver": "memory", "path": f"{self.key}/".lstrip("/")}

    def create(self, data: bytes) -> Generation:
        written = _MEMORY.write(self.key, data, if_equal=_MEMORY.absent)
        if written is None:
            raise self._exists()
        return written

    def read(self) -> Value:
        value = _MEMORY.read(self.key)
        if value is None:
            raise self._missing()
        return value

    def replace(self, data: bytes, generation: Generation) -> Generation:
        written = _MEMORY.write(self.key, data, if_equal=bytes.fromhex(generation))
        if written is None:
            raise StaleGeneration(errno.ESTALE, "the value was replaced or deleted meanwhile", str(self))
        return written

    def put(self, data: bytes) -> None:
        _MEMORY.write(self.key, data)

    def touch(self) -> None:
        _MEMORY.write(self.key, b"")

    def write_large(
        self,
        data: ArrayBytes,
        buffer: Buffer,
        go_on: Callable[[], None],
        *,
        direct: bool,
        later: Later | None = None,
    ) -> int:
        checksum, whole = 0, bytearray(len(data))
        for offset in range(0, len(data), BLOCK_BYTES):
            go_on()
            block = buffer.bytes[: min(BLOCK_BYTES, len(data) - offset)]
            data.copy(offset, block)
            checksum = crc32(block.data, checksum)
            whole[offset : offset + len(block)] = block.data
        _MEMORY.write(self.key, bytes(whole))
        return checksum

    @contextlib.contextmanager
    def open(self) -> Iterator[_ValueReader]:
        yield _ValueReader(self.read().data)

    def entry(self) -> Entry | None:
        value = _MEMORY.read(self.key)
        return None if value is None else _MEMORY.entry(self.key, self.key, value)

    def delete(self) -> None:
        _MEMORY.store.write(self.key, None).result(timeout=_TIMEOUT_S)

    def check_usable(self) -> None:
        """Does nothing, as every process may use its own memory."""

    def exists(self) -> bool:
        return _MEMORY.read(self.key) is not None or self.is_folder()

    def is_folder(self) -> bool:
        return bool(_MEMORY.keys(self.key))

    def children(self) -> list[Child]:
        keys = _MEMORY.keys(self.key)
        if not keys:
            raise self._missing()
        is_folder: dict[str, bool] = {}
        for below in keys:
            name, slash, _ = below.partition("/")
            if name:
                is_folder[name] = is_folder.get(name, False) or bool(slash)
        return [Child(name, is_one) for name, is_one in is_folder.items()]

    def entries(self) -> list[Entry]:
        entries = []
        for below in _MEMORY.keys(self.key):
            key = _join(self.key, below)
            value = None if not below or below.endswith("/") else _MEMORY.read(key)
            if value is not None:
                entries.append(_MEMORY.entry(key, below, value))
        return entries

    def last_change_s(self) -> float:
        keys = [self.key, *(_join(self.key, below) for below in _MEMORY.keys(self.key))]
        return max(
            (_MEMORY.entry(key, key, value).changed_s for key in keys if (value := _MEMORY.read(key))), default=0.0
        )

    def make_folder(self, *, parents: bool = True, exclusive: bool = False) -> None:
        if exclusive and self.is_folder():
            raise self._exists()
        if _MEMORY.write(f"{self.key}/", b"", if_equal=_MEMORY.absent) is None and exclusive:
            raise self._exists()

    def make_folder_durably(self) -> None:
        self.make_folder()

    def delete_folder(self) -> None:
        _MEMORY.store.delete_range(_range(self.key)).result(timeout=_TIMEOUT_S)

    def publish(self, target: StoragePath) -> None:
        for _ in range(_ATTEMPTS):
            if self._publish(target):
                return
        raise OSError(errno.EAGAIN, f"others kept changing {self} while it was to be published", str(target))

    def _publish(self, target: StoragePath) -> bool:
        """Moves all values in one transaction. Returns False if another writer changed one of them meanwhile."""
        mark = _MEMORY.state(f"{target.key}/").stamp.generation
        is_value = _MEMORY.state(target.key).state == "value"
        if is_value or any(_MEMORY.keys(target.key)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        keys = _MEMORY.keys(self.key)
        if not keys:
            raise self._missing()
        transaction = ts.Transaction(atomic=True)
        moving = _MEMORY.store.with_transaction(transaction)
        # Every caller that publishes to this target or makes that folder writes the mark.
        writes = [moving.write(f"{target.key}/", b"", if_equal=mark)]
        for below in keys:
            value = _MEMORY.state(_join(self.key, below))
            if value.state != "value":
                return False
            if below:
                writes.append(moving.write(_join(target.key, below), value.value))
            writes.append(moving.write(_join(self.key, below), None, if_equal=value.stamp.generation))
        try:
            transaction.commit_async().result(timeout=_TIMEOUT_S)
        except ValueError:  # a condition no longer holds
            return False
        return True

    @contextlib.contextmanager
    def staying(self) -> Iterator[Callable[[], bool]]:
        if not self.is_folder():
            raise self._missing()
        mark = f"{self.key}/"
        _MEMORY.write(mark, b"", if_equal=_MEMORY.absent)
        # A folder of the same name that is made later has a mark of another generation.
        before = _MEMORY.state(mark).stamp.generation
        yield lambda: _MEMORY.state(mark).stamp.generation == before

    def sync(self) -> None:
        """Does nothing, as values in memory do not survive a crash of the process."""

    def now_s(self) -> float:
        return time.time()

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def _exists(self) -> FileExistsError:
        return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(self))


class _ValueReader:
    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.size_bytes = len(data)
        self.best_bytes = HOT_BYTES

    def read_into(self, out: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(out)]
        out[: len(part)] = part
        return len(part)


def _join(folder: str, below: str) -> str:
    return f"{folder}/{below}" if folder else below


def _range(folder: str) -> ts.KvStore.KeyRange:
    """Returns the range of all keys that begin with the folder and a slash. "0" is the character after the slash."""
    return ts.KvStore.KeyRange(f"{folder}/", f"{folder}0") if folder else ts.KvStore.KeyRange()
