"""Files of snapshots, in the memory of snapshot servers: one process's part of a save, or the steps that were found.

A ``SnapshotPath`` has one of two stores. In an ``OwnPart``, a process writes its part of one save after the other; the
keys are ``STEP/SAVE/FILE``, and nothing is read. In ``FoundSteps``, any process reads what was found at a start; the
keys are ``STEP/FILE``, as in a directory of steps, and nothing is written. Each file is read from the nearest copy that
is whole. There are no other folders, no renames and no conditions: a save there needs none (``steps.snapshot_steps``).

Any thread may use both stores. There are no threads here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Never

import numpy as np

from gracepoint.checkpoint.memory import ArrayBytes, bytes_of
from gracepoint.checkpoint.storage.buffers import Buffer, Later
from gracepoint.checkpoint.storage.storage_path import Child, Entry, Generation, StoragePath, Value, current_limit
from gracepoint.checksum import crc32
from gracepoint.snapshots.snapshot_servers import PartCopies, PartName, SentFile, ServerAt, SnapshotServers

#: How nice threads are that send beside training. Nicer ones would hold Python's lock for long on a busy machine.
_BESIDE_TRAINING = 10
_ROW_BYTES = 8192
_ROWS_AT_ONCE = 256


class OwnPart:
    """What this process writes of snapshots.

    Args:
        servers: The servers.
        part: Index of this process.

    Attributes:
        is_urgent: Whether somebody waits for the part, so that threads which send it do not leave the CPU to others.
        leaving: Nodes that go away, so that their servers are not used if there are others.
    """

    def __init__(self, servers: SnapshotServers, part: int) -> None:
        self._servers = servers
        self._part = part
        self._lock = threading.Lock()
        self._begun: dict[str, PartCopies] = {}  # by key of the save; one at a time, but for those that were left
        self._before: Mapping[str, SentFile] = {}  # the files of the newest part that was finished
        self.is_urgent = False
        self.leaving: frozenset[str] = frozenset()

    def begin(self, step: int, save: str) -> str:
        """Begins the part of a save. Returns the key of its folder.

        Raises:
            OSError: There is no server.
        """
        copies = self._servers.begin(step, self._part, save, self._before, fingerprint, self.leaving)
        key = f"{step}/{save}"
        with self._lock:
            self._begun[key] = copies
        return key

    def put(self, key: str, data: ArrayBytes, checksum: int, go_on: Callable[[], None]) -> None:
        """Writes a file of a part that was begun.

        Raises:
            OSError: No server has it.
        """
        step, save, path = key.split("/", 2)
        self.part_of(f"{step}/{save}").put(path, _contents(data), checksum, go_on)

    def finish(self, key: str, record: bytes, go_on: Callable[[], None]) -> None:
        """Writes the done-record of a part.

        Raises:
            OSError: No server has it.
        """
        copies = self.part_of(key)
        copies.finish(record, go_on)
        self._before = copies.sent

    def drop(self, key: str) -> None:
        """Drops a part that is not wanted any more."""
        with self._lock:
            copies = self._begun.pop(key, None)
        if copies is not None:
            for folder in (copies.name.done, copies.name.folder):
                self._servers.drop(folder=folder)

    def end(self, key: str) -> None:
        """Ends the use of a part here. It stays in the servers."""
        with self._lock:
            self._begun.pop(key, None)

    def part_of(self, key: str) -> PartCopies:
        """Returns the part that was begun with a key.

        Raises:
            FileNotFoundError: It has ended.
        """
        with self._lock:
            copies = self._begun.get(key)
        if copies is None:
            raise FileNotFoundError(errno.ENOENT, "this part of a snapshot is not written any more", key)
        return copies


def fingerprint(data: memoryview) -> bytes:
    """Returns what tells contents apart that have one CRC-32, at a seventh of the cost of a SHA-256.

    It is made of the sums of all rows and of all columns of a table of 64-bit integers, and of what is left. No change
    of values keeps all of these and the CRC-32, unless somebody computes such a change: whoever writes the state.
    """
    whole_bytes = len(data) // _ROW_BYTES * _ROW_BYTES
    table = np.frombuffer(data[:whole_bytes], np.uint64).reshape(-1, _ROW_BYTES // 8)
    hasher = hashlib.sha256(data[whole_bytes:])
    for first in range(0, len(table), _ROWS_AT_ONCE):  # so that both sums find the rows in a cache
        rows = table[first : first + _ROWS_AT_ONCE]
        hasher.update(rows.sum(axis=0).data)
        hasher.update(rows.sum(axis=1).data)
    return hasher.digest()


def _contents(data: ArrayBytes) -> memoryview:
    if data.in_place is not None:
        return data.in_place.data
    copied = np.empty(len(data), np.uint8)
    data.copy(0, copied)
    return copied.data


@dataclasses.dataclass(frozen=True)
class FoundStep:
    """A step whose parts are all there.

    Attributes:
        attempt: The attempt of the workload that wrote it.
        save: The save.
        manifest: Contents of the manifest that its done-records make.
        parts: The servers that have each part.
        owner_of: Returns the part that has a file, by its path. Raises KeyError if there is no such file.
    """

    attempt: int
    save: str
    manifest: bytes
    parts: Sequence[Sequence[ServerAt]]
    owner_of: Callable[[str], int]


class FoundSteps:
    """The steps that were found.

    Args:
        servers: The servers.
        steps: The steps.
        manifest: Name of the manifest's file.
    """

    def __init__(self, servers: SnapshotServers, steps: Mapping[int, FoundStep], manifest: str) -> None:
        self.servers = servers
        self.steps = steps
        self.manifest = manifest

    def step_of(self, key: str) -> tuple[FoundStep, int, str]:
        """Returns the step of a file, its number, and the file's path.

        Raises:
            FileNotFoundError: There is no such step.
        """
        number, _, path = key.partition("/")
        if not number.isdecimal() or int(number) not in self.steps:
            raise FileNotFoundError(errno.ENOENT, "no such step was found in the snapshot servers", key)
        return self.steps[int(number)], int(number), path

    def copies(self, key: str) -> tuple[str, Sequence[ServerAt]]:
        """Returns the key of a file in the servers, and the servers that have it.

        Raises:
            FileNotFoundError: The step has no such file.
        """
        step, number, path = self.step_of(key)
        try:
            part = step.owner_of(path)
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "the snapshot has no such file", key) from None
        return PartName(number, step.attempt, part, step.save).file(path), step.parts[part]


class SnapshotPath(StoragePath):
    """A file or a folder of snapshots. ``store`` is an ``OwnPart`` or ``FoundSteps``."""

    __slots__ = ()

    renames = False
    is_far = True

    def __str__(self) -> str:
        return f"snapshot:{self.key or 'all'}"

    @property
    def niceness(self) -> int:
        return _BESIDE_TRAINING if isinstance(self.store, OwnPart) and not self.store.is_urgent else 0

    @property
    def own(self) -> OwnPart:
        """The store, if it can be written to.

        Raises:
            TypeError: It cannot.
        """
        if not isinstance(self.store, OwnPart):
            raise TypeError(f"{self}: a snapshot that was found is only read")
        return self.store

    def send(self, data: ArrayBytes, checksum: int, go_on: Callable[[], None]) -> None:
        """Writes the file, of a part that was begun. ``checksum`` is the CRC-32 of its bytes.

        Raises:
            OSError: No server has it.
        """
        self.own.put(self.key, data, checksum, go_on)

    def put(self, data: bytes) -> None:
        self.send(bytes_of(data), crc32(data), current_limit() or _nothing)

    def read(self) -> Value:
        steps = self._found()
        step, _, path = steps.step_of(self.key)
        if path == steps.manifest:
            return Value(step.manifest, Generation(step.save))
        with self.open() as reader:
            data = bytearray(reader.size_bytes)
            reader.read_into(memoryview(data), 0)
        return Value(bytes(data), Generation(step.save))

    @contextlib.contextmanager
    def open(self) -> Iterator[_SnapshotReader]:
        steps = self._found()
        key, servers = steps.copies(self.key)
        yield _SnapshotReader(steps.servers, key, servers)

    def entry(self) -> Entry | None:
        try:
            steps = self._found()
            key, servers = steps.copies(self.key)
            value = steps.servers.look(key, servers)
        except FileNotFoundError:
            return None
        return Entry(self.key, value.bytes, Generation(value.generation), 0.0)

    def exists(self) -> bool:
        return self.is_folder() or self.is_value()

    def is_folder(self) -> bool:
        return isinstance(self.store, FoundSteps) and self.key in map(str, self.store.steps)

    def make_folder(self, *, parents: bool = True, exclusive: bool = False) -> None:
        """Does nothing: a folder is a part of names."""

    def make_folder_durably(self) -> None:
        """Does nothing: a folder is a part of names."""

    def sync(self) -> None:
        """Does nothing: memory is never more durable than it is at once."""

    def now_s(self) -> float:
        return time.time()

    def _found(self) -> FoundSteps:
        if not isinstance(self.store, FoundSteps):
            raise FileNotFoundError(errno.ENOENT, "who writes a part of a snapshot reads nothing", str(self))
        return self.store

    # What neither a save nor a restore of snapshots does.

    def kvstore_spec(self) -> dict[str, Any]:
        self._refuse()

    def create(self, data: bytes) -> Generation:
        self._refuse()

    def replace(self, data: bytes, generation: Generation) -> Generation:
        self._refuse()

    def touch(self) -> None:
        self._refuse()

    def write_large(
        self,
        data: ArrayBytes,
        buffer: Buffer,
        go_on: Callable[[], None],
        *,
        direct: bool,
        later: Later | None = None,
    ) -> int:
        self._refuse()

    def delete(self) -> None:
        self._refuse()

    def check_usable(self) -> None:
        self._refuse()

    def children(self) -> list[Child]:
        self._refuse()

    def entries(self) -> list[Entry]:
        self._refuse()

    def last_change_s(self) -> float:
        self._refuse()

    def delete_folder(self) -> None:
        self._refuse()

    def publish(self, target: StoragePath) -> None:
        self._refuse()

    def staying(self) -> AbstractContextManager[Callable[[], bool]]:
        self._refuse()

    def _refuse(self) -> Never:
        raise TypeError(f"{self}: a snapshot is written as a part and read by its files, and nothing else")


def _nothing() -> None:
    pass


class _SnapshotReader:
    """A file of a snapshot. It is read whole where possible, as only then one copy is compared with its checksum."""

    def __init__(self, servers: SnapshotServers, key: str, copies: Sequence[ServerAt]) -> None:
        self._servers = servers
        self._key = key
        self._copies = copies
        self.size_bytes = servers.look(key, copies).bytes
        self.best_bytes = max(1, self.size_bytes)

    def read_into(self, out: memoryview, offset: int) -> int:
        part = out[: max(0, self.size_bytes - offset)]
        if part.nbytes:
            self._servers.read_into(self._key, part, self._copies, offset)
        return part.nbytes
