"""Sizes and checksums of chunks from a manifest in parts. Each part is read when a chunk in it is first asked for.

Any thread may ask. Each part is read once, by the first thread that needs it. Other threads wait only if they need the
same part. What was read is kept in arrays of numpy, because a process that restores much reads many parts.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import numpy as np

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec, chunk_count
from gracepoint.checkpoint.format.manifest import Manifest, ManifestPart, StoredFile
from gracepoint.checkpoint.planning import chunk_owners
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointCorrupt

T = TypeVar("T")

# The place of a chunk in the grid, at the end of its path. In zarr3 it begins with "c".
_PLACE = {2: re.compile(r"(?:(.*)/)?(\d+(?:\.\d+)*)", re.ASCII), 3: re.compile(r"(?:(.*)/)?c((?:/\d+)*)", re.ASCII)}


class ManifestParts:
    """The parts of one manifest.

    Attributes:
        files: Size and checksum of the file of each chunk, by path below the train state's folder.
        values: CRC-32 of the values of each chunk that has no file, or whose file holds encoded values, by that path.
    """

    def __init__(self, folder: StoragePath, manifest: Manifest) -> None:
        """Reads the table of writers, and no part yet.

        Raises:
            CheckpointCorrupt: The table is missing or damaged.
        """
        self._folder = folder
        self._manifest = manifest
        self._specs = {spec.name: spec for spec in manifest.arrays}
        counts = [chunk_count(spec) for spec in manifest.arrays]
        self._first: dict[str, int] = dict(zip(self._specs, np.cumsum([0, *counts]).tolist(), strict=False))
        total = sum(counts)
        where = folder / layout.CHUNK_WRITERS
        try:
            self._writers = chunk_owners.from_table(bytes(self._read(layout.CHUNK_WRITERS)))
        except ValueError as error:
            raise CheckpointCorrupt(f"{where} cannot be read: {error}") from error
        if len(self._writers) != total or self._writers.max(initial=0) >= manifest.process_count:
            raise CheckpointCorrupt(
                f"{where} has {len(self._writers)} chunks, expected {total} of {manifest.process_count} processes"
            )
        self._counts = np.bincount(self._writers, minlength=manifest.process_count)
        self._bytes = np.zeros(total, np.int64)
        self._crc32 = np.zeros(total, np.uint32)
        self._values = np.zeros(total, np.uint32)
        self._reading = threading.Lock()  # protects ``_locks``
        self._locks: dict[int, threading.Lock] = {}  # by process
        self._known: set[int] = set()  # processes whose part is in the arrays
        self.files = _Chunks(self._file_of)
        self.values = _Chunks(self._value_of)

    def _file_of(self, path: str) -> StoredFile:
        number = self._number(path)
        return StoredFile(int(self._bytes[number]), int(self._crc32[number]))

    def _value_of(self, path: str) -> int:
        return int(self._values[self._number(path)])

    def _number(self, path: str) -> int:
        """Returns the number of a chunk among all chunks, once the part that has it is in the arrays."""
        number = self._number_of(path)
        process = int(self._writers[number])
        if process not in self._known:
            with self._reading:
                lock = self._locks.setdefault(process, threading.Lock())
            with lock:
                if process not in self._known:
                    self._take_in(process)
        return number

    def _number_of(self, path: str) -> int:
        zarr = next(iter(self._specs.values())).format.zarr if self._specs else 2
        found = _PLACE[zarr].fullmatch(path)
        spec = None if found is None else self._specs.get(found[1] or "")
        if found is None or spec is None:
            raise KeyError(path)
        place = [int(at) for at in re.split(r"[./]", found[2]) if at][-len(spec.shape) :] if spec.shape else []
        return self._first[spec.name] + _flat(place, spec)

    def _take_in(self, process: int) -> None:
        name = layout.manifest_part(process)
        part = ManifestPart.from_bytes(bytes(self._read(name)), str(self._folder / name))
        below = len(layout.in_item(self._manifest.item, ""))
        expected = int(self._counts[process])
        if max(len(part.files), len(part.values)) != expected:
            raise CheckpointCorrupt(
                f"{self._folder / name} has {max(len(part.files), len(part.values))} chunks, expected {expected}"
            )
        for path, file in part.files.items():
            number = self._number_of(path[below:])
            self._bytes[number], self._crc32[number] = file.bytes, file.crc32
        for path, checksum in part.values.items():
            self._values[self._number_of(path[below:])] = checksum
        self._known.add(process)  # last, as other threads then read the arrays without a lock

    def _read(self, name: str) -> bytearray:
        file = self._manifest.files[name]
        data = bytearray(file.bytes)
        read_checked(self._folder / name, len(data), file.crc32, memoryview(data))
        return data


class _Chunks(Generic[T]):
    """What is known of each chunk, by path."""

    def __init__(self, find: Callable[[str], T]) -> None:
        self._find = find

    def __getitem__(self, path: str) -> T:
        return self._find(path)


def _flat(place: list[int], spec: ArraySpec) -> int:
    number = 0
    for at, length, size in zip(place, spec.shape, spec.chunk, strict=True):
        number = number * -(-length // max(1, size)) + at
    return number if math.prod(spec.shape) else 0
