"""Where the objects of one save go in a store that cannot rename, and who may overwrite what.

Objects are **created** below the step's final name. A step's manifest, ``_GRACEPOINT``, is one value that is only
created and replaced with conditions. It is absent, a **claim**, or a manifest, and it decides who owns the step:

* Nobody overwrites an object of a step that has a manifest.
* An object of an earlier save without a manifest may be overwritten, but only by a save that has claimed the step. As
  the claim takes the place of the manifest, the earlier save can no longer be committed.
* A claim is taken over only by a later save. Each object has a note that names the save that wrote it. A save that
  finds an object or a claim of a later save gives up.
* The note is read before the claim, and the object is replaced only if it is still of the generation that the note
  had. If each write has a separate generation (``gs://``), an overwritten object is always older than the claim. So a
  process that wakes up late changes nothing. On ``s3://`` the generation is a digest of the contents: the process could
  also overwrite an object of a later save that has the bytes of the object that it looked at.
* A claim that names trash is never taken over. The step is being deleted (``object_deletion``).

If a manifest of another save stands in the step, or the step is being deleted, objects go to the folder of the save.
They are moved into the step once the save is durable (``manifest_commit``). One process moves all of them, through its
memory.

The writers of one save hand each object to a ``Placement``, which their threads share. This module has no threads.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.layout import Claim, Temporary, is_claim
from gracepoint.checkpoint.format.manifest import Manifest, StoredFile
from gracepoint.checkpoint.memory import ArrayBytes, bytes_of
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.storage_path import Generation, StaleGeneration, StoragePath
from gracepoint.checksum import crc32
from gracepoint.errors import SaveFailed

_LAYOUT_TRIES = 50


class Placement:
    """Writes the objects of one save.

    Args:
        temporary: The save.
        claim: The claim of the save, which also names it in notes.
        staged: Whether the step has a manifest of another save, which stays until this save is durable, or is being
            deleted.

    Attributes:
        generations: The generation of each object below the step's final name, by path below it.
    """

    def __init__(self, temporary: Temporary, claim: Claim, *, staged: bool) -> None:
        self._temporary = temporary
        self._claim = claim
        self._staged = staged
        self._lock = threading.Lock()  # one thread at a time claims
        self.generations: dict[str, str] = {}

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
        staged: Generation | None = None
        for _ in range(_LAYOUT_TRIES):
            try:
                where.write_if(data, checksum, staged, self._claim.note, go_on)
            except (FileExistsError, StaleGeneration):  # an earlier run of this save wrote it
                noted = where.noted()
                staged = None if noted is None else noted.generation
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
        generation: Generation | None = None
        for _ in range(_LAYOUT_TRIES):
            try:
                return where.write_if(data, checksum, generation, self._claim.note, go_on)
            except (FileExistsError, StaleGeneration):
                noted = where.noted()
            if noted is None:
                generation = None  # deleted meanwhile
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
            generation = noted.generation
        raise SaveFailed(f"{where} keeps changing: does another job write to {self._temporary.target}?")

    def mark(self, name: str, data: bytes) -> None:
        """Writes a small object of a committed step, unless it is not Gracepoint's."""
        where = self._temporary.target / name
        generation: Generation | None = None
        for _ in range(_LAYOUT_TRIES):
            try:
                where.write_if(bytes_of(data), crc32(data), generation, self._claim.note, None)
                return
            except (FileExistsError, StaleGeneration):
                noted = where.noted()
            if noted is not None and Claim.noted(noted.note) is None:
                return
            generation = None if noted is None else noted.generation

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
    for _ in range(_LAYOUT_TRIES):
        try:
            marker = place.read()
        except FileNotFoundError:
            try:
                return place.create(claim.to_bytes())
            except FileExistsError:
                continue
        if not is_claim(marker.data):
            return None
        other = Claim.from_bytes(marker.data, str(place))
        if other.trash is not None:
            return None
        if other.is_same(claim):
            return marker.generation
        if other.is_later(claim):
            raise SaveFailed(f"{target} belongs to a later save, by attempt {other.attempt}")
        try:
            return place.replace(claim.to_bytes(), marker.generation)
        except StaleGeneration:
            continue
    raise SaveFailed(f"{place} keeps changing: does another job write to {target}?")


#: Bytes that a process has in memory while it moves the objects of a save, unless one object is larger.
MOVED_AT_ONCE_BYTES = 64 << 20


def move(
    temporary: Temporary, claim: Claim, staged: Mapping[str, StoredFile], go_on: Callable[[], None] | None
) -> dict[str, Generation] | None:
    """Moves objects from the save's folder into the step's. Returns their generations.

    Returns None if the step was committed meanwhile.
    """
    placement = Placement(temporary, claim, staged=False)
    moved: dict[str, Generation | None] = {}

    def move_one(path: str, file: StoredFile) -> None:
        noted = (temporary.target / path).noted()
        by = None if noted is None else Claim.noted(noted.note)
        if noted is not None and by is not None and by.is_same(claim):
            moved[path] = noted.generation  # an earlier try has moved it
            return
        data = np.empty(file.bytes, np.uint8)
        read_checked(temporary.path / path, file.bytes, file.crc32, data.data)
        moved[path] = placement.put_in_place(path, ArrayBytes(data, data.dtype), file.crc32, go_on)

    for batch in _batches(staged):
        if go_on is not None:
            go_on()
        temporary.target.at_once(functools.partial(move_one, path, staged[path]) for path in batch)
        if None in moved.values():
            return None
    return {path: generation for path, generation in moved.items() if generation is not None}


def _batches(files: Mapping[str, StoredFile]) -> Iterator[list[str]]:
    """Yields all paths, as many at a time as fit into the memory for a move, and at least one."""
    batch: list[str] = []
    size_bytes = 0
    for path, file in files.items():
        if batch and size_bytes + file.bytes > MOVED_AT_ONCE_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(path)
        size_bytes += file.bytes
    if batch:
        yield batch


def merge_trees(temporary: Temporary, claim: Claim, manifest: Manifest, go_on: Callable[[], None] | None) -> bool:
    """Merges the OCDBT trees of all processes into one. Returns False if the step was committed meanwhile."""
    below = layout.in_item(manifest.item, "")
    trees = [
        path.removeprefix(below).removesuffix(f"/{ocdbt.MANIFEST}")
        for path in manifest.files
        if path.startswith(below) and path.endswith(f"/{ocdbt.MANIFEST}")
    ]
    item, placement = temporary.target / manifest.item, Placement(temporary, claim, staged=False)
    noted = (item / ocdbt.MANIFEST).noted()
    by = None if noted is None else Claim.noted(noted.note)
    if by is not None and by.is_same(claim):
        return True  # an earlier try has merged them
    files = ocdbt.merged_apart(item, trees)
    for path in sorted(files, key=lambda path: path == ocdbt.MANIFEST):  # the manifest last
        name = layout.in_item(manifest.item, path)
        if placement.put_in_place(name, bytes_of(files[path]), crc32(files[path]), go_on) is None:
            return False
    return True
