"""A store of one dictionary that cannot rename: an object store, of which every request is one operation.

``before`` is called before each request, and may raise: the process has died, and the request was never made. ``after``
is called when the request was carried out, before the caller hears of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterator

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.buffers import Buffer, Later, checksum_of
from gracepoint.checkpoint.storage.storage_path import (
    Child,
    Entry,
    Generation,
    Noted,
    StaleGeneration,
    StoragePath,
    Value,
)
from tests.unit.checkpoint.storage.fakes.fake_store import FakePath, FakeStore


@dataclasses.dataclass(frozen=True)
class Object:
    data: bytes
    number: int
    changed_s: float
    note: str


class FlatStore(FakeStore):
    """One bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Object] = {}
        self.after: Callable[[str, str], None] = lambda operation, key: None

    def crash(self, *, keeps_names: bool) -> None:
        """Does nothing: what the store has answered is durable."""

    @contextlib.contextmanager
    def request(self, name: str, key: str) -> Iterator[None]:
        self.before(name, key)
        with self.lock:
            self.time_s += 1e-3
            yield
        self.after(name, key)

    def set(self, key: str, data: bytes, note: str = "") -> Generation:
        self.objects[key] = Object(data, next(self.numbers), self.time_s, note)
        return Generation(str(self.objects[key].number))


class FlatPath(FakePath):
    """The name of an object, or a prefix of names."""

    __slots__ = ()

    renames = False
    is_far = True
    store: FlatStore

    def __str__(self) -> str:
        return f"flat:{self.key}"

    def create(self, data: bytes) -> Generation:
        with self.store.request("create", self.key):
            if self.key in self.store.objects:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.key)
            return self.store.set(self.key, data)

    def read(self) -> Value:
        with self.store.request("read", self.key):
            if self.key not in self.store.objects:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.key)
            found = self.store.objects[self.key]
            return Value(found.data, Generation(str(found.number)))

    def replace(self, data: bytes, generation: Generation) -> Generation:
        with self.store.request("replace", self.key):
            self._check(generation)
            return self.store.set(self.key, data)

    def _check(self, generation: Generation) -> None:
        if self.key not in self.store.objects or str(self.store.objects[self.key].number) != generation:
            raise StaleGeneration(errno.ESTALE, "replaced meanwhile", self.key)

    def put(self, data: bytes) -> None:
        with self.store.request("put", self.key):
            self.store.set(self.key, data)

    def touch(self) -> None:
        self.put(b"")

    def write_large(
        self,
        data: ArrayBytes,
        buffer: Buffer,
        go_on: Callable[[], None],
        *,
        direct: bool,
        later: Later | None = None,
    ) -> int:
        go_on()
        self.put(_bytes_of(data))
        return checksum_of(data, buffer, go_on)

    def write_if(
        self,
        data: ArrayBytes,
        checksum: int,
        only_if: Generation | None,
        note: str,
        go_on: Callable[[], None] | None,
    ) -> Generation:
        with self.store.request("write_if", self.key):
            if go_on is not None:
                go_on()
            if only_if is not None:
                self._check(only_if)
            elif self.key in self.store.objects:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.key)
            return self.store.set(self.key, _bytes_of(data), note)

    def noted(self) -> Noted | None:
        with self.store.request("noted", self.key):
            found = self.store.objects.get(self.key)
            return None if found is None else Noted(Generation(str(found.number)), found.note)

    def entry(self) -> Entry | None:
        with self.store.request("entry", self.key):
            found = self.store.objects.get(self.key)
            return None if found is None else _entry(self.key, found)

    def delete(self) -> None:
        with self.store.request("delete", self.key):
            self.store.objects.pop(self.key, None)

    def delete_version(self, generation: Generation | None, go_on: Callable[[], None] | None = None) -> bool:
        with self.store.request("delete", self.key):
            if go_on is not None:
                go_on()
            found = self.store.objects.get(self.key)
            if found is None:
                return True
            if generation is not None and str(found.number) != generation:
                return False
            del self.store.objects[self.key]
            return True

    def exists(self) -> bool:
        return self.entry() is not None or self.is_folder()

    def is_folder(self) -> bool:
        return bool(self.entries())

    def children(self) -> list[Child]:
        found: dict[str, bool] = {}
        for entry in self.entries():
            name, slash, _ = entry.key.partition("/")
            found[name] = bool(slash)
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.key)
        return [Child(name, is_folder) for name, is_folder in found.items()]

    def entries(self) -> list[Entry]:
        with self.store.request("entries", self.key):
            prefix = f"{self.key}/" if self.key else ""
            return [
                _entry(name.removeprefix(prefix), found)
                for name, found in sorted(self.store.objects.items())
                if name.startswith(prefix)
            ]

    def last_change_s(self) -> float:
        return max((entry.changed_s for entry in self.entries()), default=0.0)

    def make_folder(self, *, parents: bool = True, exclusive: bool = False) -> None:
        assert not exclusive

    def make_folder_durably(self) -> None:
        pass

    def delete_folder(self) -> None:
        self.delete_entries(self.entries())

    def publish(self, target: StoragePath) -> None:
        raise TypeError("no renames")

    @contextlib.contextmanager
    def staying(self) -> Iterator[Callable[[], bool]]:
        yield lambda: True

    def sync(self) -> None:
        pass


def _entry(key: str, found: Object) -> Entry:
    return Entry(key, len(found.data), Generation(str(found.number)), found.changed_s)


def _bytes_of(data: ArrayBytes) -> bytes:
    assert data.in_place is not None
    return data.in_place.tobytes()
