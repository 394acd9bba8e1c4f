"""Checkpoints in this process's memory, in TensorStore's ``memory://`` store, with conditional writes and no files.

TensorStore's store has no directories, renames, links or locks. A folder is a prefix of keys. An empty value whose key
ends with a slash marks a folder that may be empty. ``publish`` moves all values in one TensorStore transaction, which
fails if another thread was faster. So ``renames`` is True, and steps are committed as in a file system.

TensorStore's threads do the work. The values belong to ``backend.shared_context`` and live as long as the process.
TensorStore keeps no times of values, so they are kept in a dict under a lock.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorstore as ts

from gracepoint.checkpoint.memory import ArrayBytes, crc32
from gracepoint.checkpoint.storage.backend import (
    HOT_BYTES,
    Child,
    Entry,
    Generation,
    StaleGeneration,
    Value,
    shared_context,
)
from gracepoint.checkpoint.storage.direct_io import BLOCK_BYTES, Buffer, Later

# The store answers at once. The timeout only keeps a defect from hanging the process.
_TIMEOUT_S = 60.0
_ATTEMPTS = 100


class MemoryBackend:
    """Values in TensorStore's memory store."""

    renames = True
    is_far = False
    look_every_s = 0.1

    def __init__(self) -> None:
        self._store = ts.KvStore.open({"driver": "memory"}, context=shared_context()).result(timeout=_TIMEOUT_S)
        # The generation that a read of a missing value returns. It is the condition "the value does not exist".
        self._absent = self._store.read("\0").result(timeout=_TIMEOUT_S).stamp.generation
        self._lock = threading.Lock()
        self._times: dict[str, tuple[bytes, float]] = {}  # by key: the generation, and when it was first seen

    def url(self, key: str) -> str:
        return f"memory://{key}"

    def local_path(self, key: str) -> str:
        raise TypeError(
            f"{self.url(key)} is not in a file system: expected a checkpoint directory that is a local path"
        )

    def kvstore_spec(self, key: str) -> dict[str, Any]:
        return {"driver": "memory", "path": key.lstrip("/")}

    def create(self, key: str, data: bytes) -> Generation:
        written = self._write(key, data, if_equal=self._absent)
        if written is None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key))
        return written

    def read(self, key: str) -> Value:
        value = self._read(key)
        if value is None:
            raise self._missing(key)
        return value

    def replace(self, key: str, data: bytes, generation: Generation) -> Generation:
        written = self._write(key, data, if_equal=bytes.fromhex(generation))
        if written is None:
            raise StaleGeneration(errno.ESTALE, "the value was replaced or deleted meanwhile", self.url(key))
        return written

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data)

    def touch(self, key: str) -> None:
        self._write(key, b"")

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
        checksum, whole = 0, bytearray(len(data))
        for offset in range(0, len(data), BLOCK_BYTES):
            go_on()
            block = buffer.bytes[: min(BLOCK_BYTES, len(data) - offset)]
            data.copy(offset, block)
            checksum = crc32(block.data, checksum)
            whole[offset : offset + len(block)] = block.data
        self._write(key, bytes(whole))
        return checksum

    def has_direct_io(self, key: str) -> bool:
        return False

    def volume(self, key: str) -> int:
        return 0

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[_ValueReader]:
        yield _ValueReader(self.read(key).data)

    def entry(self, key: str) -> Entry | None:
        value = self._read(key)
        return None if value is None else self._entry(key, key, value)

    def check_usable(self, key: str) -> None:
        """Does nothing, as every process may use its own memory."""

    def delete(self, key: str) -> None:
        self._store.write(key, None).result(timeout=_TIMEOUT_S)

    def delete_version(self, key: str, generation: Generation | None) -> bool:
        self.delete(key)
        return True

    def exists(self, key: str) -> bool:
        return self._read(key) is not None or self.is_folder(key)

    def is_folder(self, key: str) -> bool:
        return bool(self._keys(key))

    def is_link(self, key: str) -> bool:
        return False

    def children(self, key: str) -> list[Child]:
        keys = self._keys(key)
        if not keys:
            raise self._missing(key)
        is_folder: dict[str, bool] = {}
        for below in keys:
            name, slash, _ = below.partition("/")
            if name:
                is_folder[name] = is_folder.get(name, False) or bool(slash)
        return [Child(name, is_one) for name, is_one in is_folder.items()]

    def entries(self, key: str) -> list[Entry]:
        entries = []
        for below in self._keys(key):
            value = None if not below or below.endswith("/") else self._read(_join(key, below))
            if value is not None:
                entries.append(self._entry(_join(key, below), below, value))
        return entries

    def last_change_s(self, key: str) -> float:
        keys = [key, *(_join(key, below) for below in self._keys(key))]
        return max(
            (self._entry(name, name, value).changed_s for name in keys if (value := self._read(name))), default=0.0
        )

    def make_folder(self, key: str, *, parents: bool = True, exclusive: bool = False) -> None:
        if exclusive and self.is_folder(key):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key))
        if self._write(f"{key}/", b"", if_equal=self._absent) is None and exclusive:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(key))

    def make_folder_durably(self, key: str) -> None:
        self.make_folder(key)

    def delete_folder(self, key: str) -> None:
        self._store.delete_range(_range(key)).result(timeout=_TIMEOUT_S)

    def publish(self, source: str, target: str) -> None:
        for _ in range(_ATTEMPTS):
            if self._publish(source, target):
                return
        raise OSError(
            errno.EAGAIN, f"others kept changing {self.url(source)} while it was to be published", self.url(target)
        )

    def _publish(self, source: str, target: str) -> bool:
        """Moves all values in one transaction. Returns False if another writer changed one of them meanwhile."""
        mark = self._store.read(f"{target}/").result(timeout=_TIMEOUT_S).stamp.generation
        is_value = self._store.read(target).result(timeout=_TIMEOUT_S).state == "value"
        if is_value or any(self._keys(target)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.url(target))
        keys = self._keys(source)
        if not keys:
            raise self._missing(source)
        transaction = ts.Transaction(atomic=True)
        moving = self._store.with_transaction(transaction)
        # Every caller that publishes to this target or makes that folder writes the mark.
        writes = [moving.write(f"{target}/", b"", if_equal=mark)]
        for below in keys:
            value = self._store.read(_join(source, below)).result(timeout=_TIMEOUT_S)
            if value.state != "value":
                return False
            if below:
                writes.append(moving.write(_join(target, below), value.value))
            writes.append(moving.write(_join(source, below), None, if_equal=value.stamp.generation))
        try:
            transaction.commit_async().result(timeout=_TIMEOUT_S)
        except ValueError:  # a condition no longer holds
            return False
        return True

    @contextlib.contextmanager
    def staying(self, key: str) -> Iterator[Callable[[], bool]]:
        if not self.is_folder(key):
            raise self._missing(key)
        mark = f"{key}/"
        self._write(mark, b"", if_equal=self._absent)
        # A folder of the same name that is made later has a mark of another generation.
        before = self._store.read(mark).result(timeout=_TIMEOUT_S).stamp.generation
        yield lambda: self._store.read(mark).result(timeout=_TIMEOUT_S).stamp.generation == before

    def sync(self, keys: Iterable[str]) -> None:
        """Does nothing, as values in memory do not survive a crash of the process."""

    def at_once(self, acts: Iterable[Callable[[], object]]) -> None:
        for act in acts:
            act()

    def now_s(self, key: str) -> float:
        return time.time()

    def _missing(self, key: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url(key))

    def _read(self, key: str) -> Value | None:
        result = self._store.read(key).result(timeout=_TIMEOUT_S)
        return Value(result.value, Generation(result.stamp.generation.hex())) if result.state == "value" else None

    def _write(self, key: str, data: bytes, *, if_equal: bytes | None = None) -> Generation | None:
        """Returns the generation of the written value. None if the condition does not hold."""
        written = self._store.write(key, data, if_equal=if_equal).result(timeout=_TIMEOUT_S).generation
        if not written:
            return None
        with self._lock:
            self._times[key] = written, time.time()
        return Generation(written.hex())

    def _keys(self, folder: str) -> list[str]:
        """Returns all keys in a folder, relative to it. The folder's own mark is included as an empty key."""
        prefix = f"{folder}/" if folder else ""
        names = self._store.list(_range(folder), strip_prefix_length=len(prefix.encode())).result(timeout=_TIMEOUT_S)
        return [key.decode() for key in names]

    def _entry(self, key: str, name: str, value: Value) -> Entry:
        generation = bytes.fromhex(value.generation)
        with self._lock:
            times = self._times.get(key)
            if times is None or times[0] != generation:  # TensorStore's drivers also write values
                times = self._times[key] = generation, time.time()
        return Entry(name, len(value.data), value.generation, times[1])


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


MEMORY = MemoryBackend()
