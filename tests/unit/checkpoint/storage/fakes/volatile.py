"""A store of dictionaries that can crash: it tells what was synced from what was only written.

It stands for the worst file system that POSIX allows. At a crash, names may have been kept in any way (the caller says
whether those that were not synced are), and a value that was not synced is empty.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
from collections.abc import Callable, Iterator

from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage.buffers import Buffer, Later
from gracepoint.checkpoint.storage.storage_path import Child, Entry, Generation, StaleGeneration, StoragePath, Value
from gracepoint.checksum import crc32
from tests.unit.checkpoint.storage.fakes.fake_store import FakePath, FakeStore


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


class VolatileStore(FakeStore):
    """One machine's disk."""

    def __init__(self) -> None:
        super().__init__()
        self.top = Folder(0, self.time_s)

    def crash(self, *, keeps_names: bool) -> None:
        """Forgets what was not synced: contents always, and names unless ``keeps_names``."""
        self._forget(self.top, keeps_names=keeps_names)

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
    def operation(self, name: str, key: str) -> Iterator[None]:
        with self.lock:
            self.before(name, key)
            self.time_s += 1e-3
            yield

    def node(self, key: str) -> File | Folder | None:
        node: File | Folder | None = self.top
        for name in key.strip("/").split("/") if key.strip("/") else ():
            node = node.names.get(name) if isinstance(node, Folder) else None
        return node

    def folder(self, key: str) -> Folder:
        node = self.node(key)
        if not isinstance(node, Folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return node

    def file(self, key: str) -> File:
        node = self.node(key)
        if not isinstance(node, File):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
        return node

    def place(self, key: str) -> tuple[Folder, str]:
        above, _, name = key.rpartition("/")
        return self.folder(above), name

    def new(self, key: str, data: bytes) -> tuple[Folder, str, File]:
        folder, name = self.place(key)
        file = File(data, next(self.numbers), self.time_s)
        folder.names[name] = file
        folder.changed_s = self.time_s
        return folder, name, file


class VolatilePath(FakePath):
    """A location there. Every method is one operation, at which ``before`` may raise ``Crash``."""

    __slots__ = ()

    store: VolatileStore

    def __str__(self) -> str:
        return f"volatile:{self.key}"

    def create(self, data: bytes) -> Generation:
        with self.store.operation("create", self.key):
            if self.store.node(self.key) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.key)
            return _generation(self.store.new(self.key, data)[2])

    def read(self) -> Value:
        with self.store.operation("read", self.key):
            file = self.store.file(self.key)
            return Value(file.data, _generation(file))

    def replace(self, data: bytes, generation: Generation) -> Generation:
        with self.store.operation("replace", self.key):
            file = self.store.node(self.key)
            if not isinstance(file, File) or _generation(file) != generation:
                raise StaleGeneration(errno.ESTALE, "replaced meanwhile", self.key)
            return _generation(self.store.new(self.key, data)[2])

    def put(self, data: bytes) -> None:
        with self.store.operation("put", self.key):
            folder, name, file = self.store.new(self.key, data)
            file.durable = data
            folder.durable[name] = file

    def touch(self) -> None:
        with self.store.operation("touch", self.key):
            self.store.new(self.key, b"")

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
        block = bytearray(len(data))
        for offset in range(0, len(data), len(buffer.bytes)):
            part = buffer.bytes[: min(len(buffer.bytes), len(data) - offset)]
            data.copy(offset, part)
            block[offset : offset + len(part)] = part.data
        with self.store.operation("write_large", self.key):
            file = self.store.new(self.key, bytes(block))[2]
            file.durable = file.data
        return crc32(block)

    def entry(self) -> Entry | None:
        with self.store.operation("entry", self.key):
            node = self.store.node(self.key)
            return _entry(self.key, node) if isinstance(node, File) else None

    def delete(self) -> None:
        with self.store.operation("delete", self.key):
            if isinstance(self.store.node(self.key), File):
                folder, name = self.store.place(self.key)
                del folder.names[name]
                folder.changed_s = self.store.time_s

    def exists(self) -> bool:
        with self.store.operation("exists", self.key):
            return self.store.node(self.key) is not None

    def is_folder(self) -> bool:
        with self.store.operation("is_folder", self.key):
            return isinstance(self.store.node(self.key), Folder)

    def children(self) -> list[Child]:
        with self.store.operation("children", self.key):
            return [Child(name, isinstance(node, Folder)) for name, node in self.store.folder(self.key).names.items()]

    def entries(self) -> list[Entry]:
        with self.store.operation("entries", self.key):
            node = self.store.node(self.key)
            return [_entry(name, file) for name, file in _files(node, "")] if isinstance(node, Folder) else []

    def last_change_s(self) -> float:
        with self.store.operation("last_change_s", self.key):
            node = self.store.node(self.key)
            return 0.0 if node is None else _newest(node)

    def make_folder(self, *, parents: bool = True, exclusive: bool = False) -> None:
        with self.store.operation("make_folder", self.key):
            if self.store.node(self.key) is not None:
                if exclusive:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self.key)
                return
            node = self.store.top
            names = self.key.strip("/").split("/")
            for depth, name in enumerate(names):
                below = node.names.get(name)
                if below is None:
                    if depth + 1 < len(names) and not parents:
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.key)
                    below = node.names[name] = Folder(next(self.store.numbers), self.store.time_s)
                    node.changed_s = self.store.time_s
                assert isinstance(below, Folder)
                node = below

    def make_folder_durably(self) -> None:
        self.make_folder()
        with self.store.operation("sync", self.key):
            node = self.store.top
            for name in self.key.strip("/").split("/"):
                below = node.names[name]
                assert isinstance(below, Folder)
                node.durable[name] = below
                node = below

    def delete_folder(self) -> None:
        with self.store.operation("delete_folder", self.key):
            if isinstance(self.store.node(self.key), Folder):
                folder, name = self.store.place(self.key)
                del folder.names[name]
                folder.changed_s = self.store.time_s

    def publish(self, target: StoragePath) -> None:
        with self.store.operation("publish", self.key):
            moved = self.store.folder(self.key)
            there = self.store.node(target.key)
            if there is not None and (isinstance(there, File) or there.names):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target.key)
            (old, old_name), (new, new_name) = self.store.place(self.key), self.store.place(target.key)
            del old.names[old_name]
            new.names[new_name] = moved
            old.changed_s = new.changed_s = self.store.time_s

    @contextlib.contextmanager
    def staying(self) -> Iterator[Callable[[], bool]]:
        with self.store.operation("staying", self.key):
            folder = self.store.folder(self.key)
        yield lambda: self.store.node(self.key) is folder

    def sync(self) -> None:
        with self.store.operation("sync", self.key):
            folder = self.store.folder(self.key)
            folder.durable = dict(folder.names)
            for node in folder.names.values():
                if isinstance(node, File):
                    node.durable = node.data

    def now_s(self) -> float:
        with self.store.operation("now_s", self.key):
            return self.store.time_s


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
