"""Where the objects of one save go in a store that cannot rename, and who may overwrite what.

Objects are **created** below the step's final name. A step's manifest, ``_GRACEPOINT``, is one value that is only
created and replaced with conditions. It is absent, a **claim**, or a manifest, and it decides who owns the step:

* Nobody overwrites an object of a step that has a manifest.
* An object of an earlier save without a manifest may be overwritten, but only by a save that has claimed the step. As
  the claim takes the place of the manifest, the earlier save can no longer be committed.
* A claim is taken over only by a later save. Each object has a note that names the save that wrote it. A save that
  finds an object or a claim of a later save gives up.
* The note is read before the claim, and the object is replaced only if it is still of the generation that the note
  had. If each write has a generation of its own (``gs://``), an overwritten object is always older than the claim. So a
  process that wakes up late changes nothing. On ``s3://`` the generation is a digest of the contents: the process could
  also overwrite an object of a later save that has the bytes of the object that it looked at.
* A claim that names trash is never taken over. The step is being deleted (``object_deletion``).

If a manifest of another save stands in the step, or the step is being deleted, objects go to the folder of the save.
They are moved once the save is durable (``manifest_commit``).

A ``Placement`` is the back end that the writers of one save see. The threads of the writer share it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.claim import Claim, is_claim
from gracepoint.checkpoint.format.layout import Temporary
from gracepoint.checkpoint.memory.array_bytes import ArrayBytes
from gracepoint.checkpoint.storage.backend import Generation, StaleGeneration
from gracepoint.checkpoint.storage.checksum import crc32
from gracepoint.checkpoint.storage.direct_io import Buffer, Later, checksum_of
from gracepoint.checkpoint.storage.flat_backend import FlatBackend
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import SaveFailed

_TRIES = 50


class Placement:
    """Writes the objects of one save.

    Args:
        temporary: The save.
        claim: The claim of the save, which also names it in notes.
        store: The store.
        staged: Whether the step has a manifest of another save, which stays until this save is durable, or is being
            deleted.

    Attributes:
        generations: The generation of each object below the step's final name, by path below it.
    """

    def __init__(self, temporary: Temporary, claim: Claim, store: FlatBackend, *, staged: bool) -> None:
        self._temporary = temporary
        self._claim = claim
        self._store = store
        self._staged = staged
        self._lock = threading.Lock()  # one thread at a time claims
        self.generations: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)  # all methods that do not write

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
        checksum = checksum_of(data, buffer, go_on)
        self.place(StoragePath(self._store, key).below(self._temporary.target), data, checksum, go_on)
        return checksum

    def put(self, key: str, data: bytes) -> None:
        raise TypeError(f"{self._store.url(key)}: the files of a save are written with write_large")

    create = replace = touch = put

    def place(self, name: str, data: ArrayBytes, checksum: int, go_on: Callable[[], None]) -> None:
        """Writes the object ``name`` of the step, or stages it.

        Raises:
            SaveFailed: A later save writes the step, or something that is not Gracepoint's is in the way.
        """
        if not self._staged:
            generation = self.put_in_place(name, data, checksum, go_on)
            if generation is not None:
                self.generations[name] = generation
                return
            self._staged = True
        where = self._temporary.path / name
        found: Generation | None = None
        for _ in range(_TRIES):
            try:
                self._store.write_if(where.key, data, checksum, found, self._claim.note, go_on)
            except (FileExistsError, StaleGeneration):  # an earlier run of this save wrote it
                noted = self._store.noted(where.key)
                found = None if noted is None else noted.generation
            else:
                return
        raise SaveFailed(f"{where} keeps changing")

    def put_in_place(
        self, name: str, data: ArrayBytes, checksum: int, go_on: Callable[[], None] | None
    ) -> Generation | None:
        """Writes the object ``name`` of the step. Returns its generation.

        Returns None if the step has got the manifest of a save meanwhile, or is being deleted.

        Raises:
            SaveFailed: A later save writes the step, or something that is not Gracepoint's is in the way.
        """
        where = self._temporary.target / name
        found: Generation | None = None
        for _ in range(_TRIES):
            try:
                return self._store.write_if(where.key, data, checksum, found, self._claim.note, go_on)
            except (FileExistsError, StaleGeneration):
                noted = self._store.noted(where.key)
            if noted is None:
                found = None  # deleted meanwhile
                continue
            other = Claim.noted(noted.note)
            if other is None:
                raise SaveFailed(f"{where} is in the way, and Gracepoint did not write it: delete it, or move it away")
            if other.is_later(self._claim):
                raise SaveFailed(
                    f"{where} is of a later save, by attempt {other.attempt}, which goes on without this one"
                )
            if not self.own():
                return None
            found = noted.generation
        raise SaveFailed(f"{where} keeps changing: does another job write to {self._temporary.target}?")

    def mark(self, name: str, data: bytes) -> None:
        """Writes a small object of a committed step, unless it is not Gracepoint's."""
        where = self._temporary.target / name
        found: Generation | None = None
        body = ArrayBytes(np.frombuffer(data, np.uint8), np.dtype(np.uint8))
        for _ in range(_TRIES):
            try:
                self._store.write_if(where.key, body, crc32(data), found, self._claim.note, None)
                return
            except (FileExistsError, StaleGeneration):
                noted = self._store.noted(where.key)
            if noted is not None and Claim.noted(noted.note) is None:
                return
            found = None if noted is None else noted.generation

    def own(self) -> bool:
        """Claims the step for this save. Returns False if the step has the manifest of a save, or is being deleted.

        Raises:
            SaveFailed: A later save has claimed it.
        """
        with self._lock:
            return take(self._temporary.target, self._claim) is not None


def take(target: StoragePath, claim: Claim) -> Generation | None:
    """Makes ``claim`` the claim on a step. Returns its generation.

    Returns None if the step has a manifest, or is being deleted.

    Raises:
        SaveFailed: A later save has claimed the step.
    """
    place = target / layout.MANIFEST
    for _ in range(_TRIES):
        try:
            found = place.read()
        except FileNotFoundError:
            try:
                return place.create(claim.to_bytes())
            except FileExistsError:
                continue
        if not is_claim(found.data):
            return None
        other = Claim.from_bytes(found.data, str(place))
        if other.trash is not None:
            return None
        if other.is_same(claim):
            return found.generation
        if other.is_later(claim):
            raise SaveFailed(f"{target} belongs to a later save, by attempt {other.attempt}")
        try:
            return place.replace(claim.to_bytes(), found.generation)
        except StaleGeneration:
            continue
    raise SaveFailed(f"{place} keeps changing: does another job write to {target}?")
