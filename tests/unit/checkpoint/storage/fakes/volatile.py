"""A back end of dictionaries that can crash: it tells what was synced from what was only written.

It stands for the worst file system that POSIX allows. At a crash, names may have been kept in any way (the caller says
whether those that were not synced are), and a value that was not synced is empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterable, Iterator

from gracepoint.checkpoint.memory import ArrayBytes, crc32
from gracepoint.checkpoint.storage.backend import Child, Entry, Generation, StaleGeneration, Value
from gracepoint.checkpoint.storage.direct_io import Buffer, Later
from tests.unit.checkpoint.storage.fakes.in_memory import InMemory


class Crash(BaseException):
    """The machine has crashed. No code of the engine catches it."""


@dataclasses.dataclass(eq=False)
class File:
    data: bytes
    number: int
    changed_s: float
    durable: bytes = b""  # what is left of it after a crash


@dataclasses.dataclass(eq=False)
class Folder:
    number: int
    changed_s: float
    names: dict[str, File | Folder] = dataclasses.field(default_factory=dict)
    durable: dict[str, File | Folder] = dataclasses.field(default_factory=dict)


class VolatileBackend(InMemory):
    """One machine's disk. Every method is one operation, at which ``before`` may raise ``Crash``."""

    renames = True
    is_far = False

    def __init__(self) -> None:
        super().__init__()
        self._top = Folder(0, self.time_s)

    def crash(self, *, keeps_names: bool) -> None:
        """Forgets what was not synced: contents always, and names unless ``keeps_names``."""
        self._forget(self._top, keeps_names=keeps_names)

    def _forget(self, folder: Folder, *, keeps_names: bool) -> None:
        if not keeps_names:
            folder.names = dict(folder.durable)
        folder.durable = dict(folder.names)
        for node in folder.names.values():
            if isinstance(node, Folder):
                self._forget(node, keeps_names=keeps_names)
            else:
                node.data = node.durable

    @contextlib.contextmanager
    def _operation(self, name: str, key: str) -> Iterator[None]:
        with self._lock:
            self.before(name, key)
            self.time_s += 1e-3
            yield

    def _node(self, key: str) -> File | Folder | None:
        node: File | Folder | None = self._top
        for name in key.strip("/").split("/") if key.strip("/") else ():
            node = node.names.get(name) if isinstance(node, Folder) else None
        return node

    def _folder(self, key: str) -> Folder:
        node = self._node(key)
        if not isinstance(node, Folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return node

    def _file(self, key: str) -> File:
        node = self._node(key)
        if not isinstance(node, File):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return node

    def _place(self, key: str) -> tuple[Folder, str]:
        above, _, name = key.rpartition("/")
        return self._folder(above), name

    def _new(self, key: str, data: bytes) -> tuple[Folder, str, File]:
        folder, name = self._place(key)
        file = File(data, next(self._numbers), self.time_s)
        folder.names[name] = file
        folder.changed_s = self.time_s
        return folder, name, file

    def url(self, key: str) -> str:
        return f"volatile:{key}"

    def create(self, key: str, data: bytes) -> Generation:
        with self._operation("create", key):
            if self._node(key) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
            return _generation(self._new(key, data)[2])

    def read(self, key: str) -> Value:
        with self._operation("read", key):
            file = self._file(key)
            return Value(file.data, _generation(file))

    def replace(self, key: str, data: bytes, generation: Generation) -> Generation:
        with self._operation("replace", key):
            file = self._node(key)
            if not isinstance(file, File) or _generation(file) != generation:
                raise StaleGeneration(errno.ESTALE, "replaced meanwhile", key)
            return _generation(self._new(key, data)[2])

    def put(self, key: str, data: bytes) -> None:
        with self._operation("put", key):
            folder, name, file = self._new(key, data)
            file.durable = data
            folder.durable[name] = file

    def touch(self, key: str) -> None:
        with self._operation("touch", key):
            self._new(key, b"")

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
        block = bytearray(len(data))
        for offset in range(0, len(data), len(buffer.bytes)):
            part = buffer.bytes[: min(len(buffer.bytes), len(data) - offset)]
            data.copy(offset, part)
            block[offset : offset + len(part)] = part.data
        with self._operation("write_large", key):
            file = self._new(key, bytes(block))[2]
            file.durable = file.data
        return crc32(block)

    def volume(self, key: str) -> int:
        return 0

    def entry(self, key: str) -> Entry | None:
        with self._operation("entry", key):
            node = self._node(key)
            return _entry(key, node) if isinstance(node, File) else None

    def delete(self, key: str) -> None:
        with self._operation("delete", key):
            if isinstance(self._node(key), File):
                folder, name = self._place(key)
                del folder.names[name]
                folder.changed_s = self.time_s

    def delete_version(self, key: str, generation: Generation | None) -> bool:
        self.delete(key)
        return True

    def exists(self, key: str) -> bool:
        with self._operation("exists", key):
            return self._node(key) is not None

    def is_folder(self, key: str) -> bool:
        with self._operation("is_folder", key):
            return isinstance(self._node(key), Folder)

    def children(self, key: str) -> list[Child]:
        with self._operation("children", key):
            return [Child(name, isinstance(node, Folder)) for name, node in self._folder(key).names.items()]

    def entries(self, key: str) -> list[Entry]:
        with self._operation("entries", key):
            node = self._node(key)
            return [_entry(name, file) for name, file in _files(node, "")] if isinstance(node, Folder) else []

    def last_change_s(self, key: str) -> float:
        with self._operation("last_change_s", key):
            node = self._node(key)
            return 0.0 if node is None else _newest(node)

    def make_folder(self, key: str, *, parents: bool = True, exclusive: bool = False) -> None:
        with self._operation("make_folder", key):
            if self._node(key) is not None:
                if exclusive:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), key)
                return
            node = self._top
            names = key.strip("/").split("/")
            for depth, name in enumerate(names):
                below = node.names.get(name)
                if below is None:
                    if depth + 1 < len(names) and not parents:
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
                    below = node.names[name] = Folder(next(self._numbers), self.time_s)
                    node.changed_s = self.time_s
                assert isinstance(below, Folder)
                node = below

    def make_folder_durably(self, key: str) -> None:
        self.make_folder(key)
        with self._operation("sync", key):
            node = self._top
            for name in key.strip("/").split("/"):
                below = node.names[name]
                assert isinstance(below, Folder)
                node.durable[name] = below
                node = below

    def delete_folder(self, key: str) -> None:
        with self._operation("delete_folder", key):
            if isinstance(self._node(key), Folder):
                folder, name = self._place(key)
                del folder.names[name]
                folder.changed_s = self.time_s

    def publish(self, source: str, target: str) -> None:
        with self._operation("publish", source):
            moved = self._folder(source)
            there = self._node(target)
            if there is not None and (isinstance(there, File) or there.names):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            (old, old_name), (new, new_name) = self._place(source), self._place(target)
            del old.names[old_name]
            new.names[new_name] = moved
            old.changed_s = new.changed_s = self.time_s

    @contextlib.contextmanager
    def staying(self, key: str) -> Iterator[Callable[[], bool]]:
        with self._operation("staying", key):
            folder = self._folder(key)
        yield lambda: self._node(key) is folder

    def sync(self, keys: Iterable[str]) -> None:
        for key in keys:
            with self._operation("sync", key):
                folder = self._folder(key)
                folder.durable = dict(folder.names)
                for node in folder.names.values():
                    if isinstance(node, File):
                        node.durable = node.data

    def now_s(self, key: str) -> float:
        with self._operation("now_s", key):
            return self.time_s


def _generation(file: File) -> Generation:
    return Generation(str(file.number))


def _entry(key: str, file: File) -> Entry:
    return Entry(key, len(file.data), _generation(file), file.changed_s)


def _files(folder: Folder, prefix: str) -> Iterator[tuple[str, File]]:
    for name, node in folder.names.items():
        if isinstance(node, File):
            yield prefix + name, node
        else:
            yield from _files(node, f"{prefix}{name}/")


def _newest(node: File | Folder) -> float:
    below = node.names.values() if isinstance(node, Folder) else ()
    return max([node.changed_s, *map(_newest, below)])
