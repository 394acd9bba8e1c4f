"""A store of one dictionary that cannot rename: an object store, of which every request is one operation.

``before`` is called before each request, and may raise: the process has died, and the request was never made. ``after``
is called when the request was carried out, before the caller hears of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterable, Iterator

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.backend import Child, Entry, Generation, Noted, StaleGeneration, Value
from gracepoint.checkpoint.storage.direct_io import Buffer, Later, checksum_of
from tests.unit.checkpoint.storage.fakes.in_memory import InMemory


@dataclasses.dataclass(frozen=True)
class Object:
    data: bytes
    number: int
    changed_s: float
    note: str


class FlatStore(InMemory):
    """One bucket."""

    renames = False
    is_far = True
    tensorstore_error = None

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, Object] = {}
        self.after: Callable[[str, str], None] = lambda operation, key: None

    def crash(self, *, keeps_names: bool) -> None:
        """Does nothing: what the store has answered is durable."""

    @contextlib.contextmanager
    def _request(self, name: str, key: str) -> Iterator[None]:
        self.before(name, key)
        with self._lock:
            self.time_s += 1e-3
            yield
        self.after(name, key)

    def _set(self, key: str, data: bytes, note: str = "") -> Generation:
        self.objects[key] = Object(data, next(self._numbers), self.time_s, note)
        return Generation(str(self.objects[key].number))

    def url(self, key: str) -> str:
        return f"flat:{key}"

    def create(self, key: str, data: bytes) -> Generation:
        with self._request("create", key):
            if key in self.objects:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
            return self._set(key, data)

    def read(self, key: str) -> Value:
        with self._request("read", key):
            if key not in self.objects:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
            found = self.objects[key]
            return Value(found.data, Generation(str(found.number)))

    def replace(self, key: str, data: bytes, generation: Generation) -> Generation:
        with self._request("replace", key):
            self._check(key, generation)
            return self._set(key, data)

    def _check(self, key: str, generation: Generation) -> None:
        if key not in self.objects or str(self.objects[key].number) != generation:
            raise StaleGeneration(errno.ESTALE, "replaced meanwhile", key)

    def put(self, key: str, data: bytes) -> None:
        with self._request("put", key):
            self._set(key, data)

    def touch(self, key: str) -> None:
        self.put(key, b"")

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
        go_on()
        self.put(key, _bytes_of(data))
        return checksum_of(data, buffer, go_on)

    def write_if(
        self,
        key: str,
        data: ArrayBytes,
        checksum: int,
        only_if: Generation | None,
        note: str,
        go_on: Callable[[], None] | None,
    ) -> Generation:
        with self._request("write_if", key):
            if go_on is not None:
                go_on()
            if only_if is not None:
                self._check(key, only_if)
            elif key in self.objects:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
            return self._set(key, _bytes_of(data), note)

    def noted(self, key: str) -> Noted | None:
        with self._request("noted", key):
            found = self.objects.get(key)
            return None if found is None else Noted(Generation(str(found.number)), found.note)

    def volume(self, key: str) -> int:
        return -1

    def entry(self, key: str) -> Entry | None:
        with self._request("entry", key):
            found = self.objects.get(key)
            return None if found is None else _entry(key, found)

    def delete(self, key: str) -> None:
        with self._request("delete", key):
            self.objects.pop(key, None)

    def delete_version(self, key: str, generation: Generation | None, go_on: Callable[[], None] | None = None) -> bool:
        with self._request("delete", key):
            if go_on is not None:
                go_on()
            found = self.objects.get(key)
            if found is None:
                return True
            if generation is not None and str(found.number) != generation:
                return False
            del self.objects[key]
            return True

    def delete_all(self, entries: Iterable[Entry], go_on: Callable[[], None] | None = None) -> None:
        for entry in entries:
            self.delete_version(entry.key, entry.generation, go_on)

    def sleep(self, seconds: float) -> None:
        self.time_s += seconds

    def exists(self, key: str) -> bool:
        return self.entry(key) is not None or self.is_folder(key)

    def is_folder(self, key: str) -> bool:
        return bool(self.entries(key))

    def children(self, key: str) -> list[Child]:
        found: dict[str, bool] = {}
        for entry in self.entries(key):
            name, slash, _ = entry.key.partition("/")
            found[name] = bool(slash)
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return [Child(name, is_folder) for name, is_folder in found.items()]

    def entries(self, key: str) -> list[Entry]:
        with self._request("entries", key):
            prefix = f"{key}/" if key else ""
            return [
                _entry(name.removeprefix(prefix), found)
                for name, found in sorted(self.objects.items())
                if name.startswith(prefix)
            ]

    def last_change_s(self, key: str) -> float:
        return max((entry.changed_s for entry in self.entries(key)), default=0.0)

    def make_folder(self, key: str, *, parents: bool = True, exclusive: bool = False) -> None:
        assert not exclusive

    def make_folder_durably(self, key: str) -> None:
        pass

    def delete_folder(self, key: str) -> None:
        self.delete_all(dataclasses.replace(entry, key=f"{key}/{entry.key}") for entry in self.entries(key))

    def publish(self, source: str, target: str) -> None:
        raise TypeError("no renames")

    @contextlib.contextmanager
    def staying(self, key: str) -> Iterator[Callable[[], bool]]:
        yield lambda: True

    def sync(self, keys: Iterable[str]) -> None:
        pass

    def now_s(self, key: str) -> float:
        return self.time_s


def _entry(key: str, found: Object) -> Entry:
    return Entry(key, len(found.data), Generation(str(found.number)), found.changed_s)


def _bytes_of(data: ArrayBytes) -> bytes:
    assert data.in_place is not None
    return data.in_place.tobytes()
