"""The objects of a step in a store that cannot rename: where a save puts them, and how those of a condemned step go.

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
* A claim that names trash is never taken over. The step is being deleted.

If a manifest of another save stands in the step, or the step is being deleted, objects go to the folder of the save.
They are moved into the step once the save is durable (``manifest_commit``). One process moves all of them, through its
memory. The writers of one save hand each object to a ``Placement``, which their threads share.

A step is **condemned** when its manifest is replaced by a claim that names the trash (``manifest_commit``). One process
at a time **sweeps** such a step. It writes the time into the claim. Before a batch of deletions it writes the time
again if ``RENEWED_S`` have passed. This renewal is conditional, so a process that has lost the claim notices and ends.

Some stores distinguish versions by their contents. There, the condition of a late deletion would also hold for an
object of a later save that has the same bytes. Therefore:

* A sweeper makes no request later than ``LAST_REQUEST_S`` after it has renewed the claim.
* Another process takes the claim over ``FREE_S`` after its renewal at the earliest. The last request has ended by then.
* No save takes the step over while the claim stands. A save waits for the sweep, or sweeps itself.

An object is deleted only if it has a note of Gracepoint's, and if the save in the note began before the step was
condemned. The mark of a damaged step has no note, and is deleted with the step. All other objects stay, which is
logged.

Programs that **copy** a run from a file system, or between stores, may leave objects without notes. Those of a
committed step are known by its manifest. Before the step is condemned they are listed in the trash, with their
generations, and are then deleted like the others.

This module has no state, and no threads but those of the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import numpy as np

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.array_spec import grid
from gracepoint.checkpoint.format.layout import Claim, Temporary, is_claim
from gracepoint.checkpoint.format.records import Manifest, StoredFile, all_files, signs_of_ours
from gracepoint.checkpoint.memory import ArrayBytes, bytes_of
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.storage_path import Entry, Generation, StaleGeneration, StoragePath
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointCorrupt, SaveFailed

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


logger = logging.getLogger(__name__)

#: An object in the trash: the name of the step that is deleted, and of the folder of its save.
TOMBSTONE = "deletes"
_COPIED = "copied"  # an object in the trash: the objects without notes that are deleted, with their generations

#: Seconds after which a sweeper renews its claim before the next batch.
RENEWED_S = 10.0
#: Seconds after the renewal in which a sweeper makes requests.
LAST_REQUEST_S = 60.0
#: Seconds after the renewal from which another process may sweep. The time between is enough for one request to end.
FREE_S = 150.0
_BATCH = 64
_NAMED = 3  # objects that a message names
# A save that began so much after the condemnation still counts as before it: two processes may differ by a few seconds
# about the store's time. This is safe, as a save that begins while the claim stands writes nothing into the step.
_CLOCKS_DIFFER_NS = 60 * 10**9
_WITHOUT_NOTE = (layout.MANIFEST, layout.DAMAGE_MARK)


class _TooLate(Exception):
    """The sweeper was stopped for so long that another process may sweep."""


def refuse_foreign(folder: StoragePath, names: Iterable[str]) -> None:
    """Raises SaveFailed if one of the objects ``names`` below ``folder`` was not written by Gracepoint."""
    foreign: list[str] = []

    def look(name: str) -> None:
        noted = (folder / name).noted()
        if noted is not None and Claim.noted(noted.note) is None:
            foreign.append(name)

    folder.at_once(functools.partial(look, name) for name in names if name not in _WITHOUT_NOTE)
    if foreign:
        raise SaveFailed(
            f"{folder / min(foreign)} is in the way, and Gracepoint did not write it: delete it, or move it away. "
            f"{folder} is left as it is"
        )


def copied(folder: StoragePath, manifest: Manifest) -> dict[str, Generation]:
    """Returns the objects of a committed step that have no notes because the step was copied, with their generations.

    Objects with notes may be among them. Empty if the step was not copied, or if the copy has the notes: one small and
    one large object show that.
    """
    if all(_by(folder, name) is not None for name in _samples(manifest)):
        return {}
    files = dict(manifest.files)
    with contextlib.suppress(CheckpointCorrupt):  # a part of the manifest was not copied: its objects stay
        files |= all_files(folder, manifest)
    return {
        entry.key: entry.generation
        for entry in folder.entries()
        if (entry.key in files and files[entry.key].bytes == entry.bytes)
        or layout.is_beside_manifest(entry.key, manifest.item)
    }


def _samples(manifest: Manifest) -> set[str]:
    def size(item: tuple[str, StoredFile]) -> int:
        return item[1].bytes

    files = manifest.files.items()
    samples = {min(files, key=size)[0], max(files, key=size)[0]} if files else set()
    if manifest.is_in_parts and manifest.arrays and not manifest.arrays[0].format.ocdbt:
        spec = manifest.arrays[0]
        samples.add(layout.in_item(manifest.item, spec.chunk_file(next(iter(grid(spec))))))
    return samples


def _by(folder: StoragePath, name: str) -> Claim | None:
    """Returns the save that wrote an object. None if no note says so, or if there is no such object."""
    noted = (folder / name).noted()
    return None if noted is None else Claim.noted(noted.note)


def is_part_of_copy(folder: StoragePath, names: Collection[str]) -> bool:
    """Returns whether a step without a manifest is what a copy that was broken off has left of a step of Gracepoint's.

    ``names`` are the names that are directly in the step.
    """
    names = [name for name in names if name != layout.MANIFEST]  # there, it is a claim
    return any(_by(folder, sign) is None for sign in signs_of_ours(folder, names))


def copied_in_part(folder: StoragePath, manifest: Manifest) -> dict[str, Generation]:
    """Returns what a copy that was broken off has left of a step, with generations. ``manifest`` is of a later save."""
    entries = folder.entries()
    if not is_part_of_copy(folder, {entry.key.partition("/")[0] for entry in entries}):
        return {}
    items = tuple(f"{item}/" for item in (manifest.item, layout.HOST_STATE_ITEM) if item)
    return {
        entry.key: entry.generation
        for entry in entries
        if entry.key in manifest.files
        or layout.is_beside_manifest(entry.key, manifest.item)
        or (manifest.item and entry.key.startswith(items))
    }


def condemn(
    folder: StoragePath,
    trash: StoragePath,
    generation: Generation | None,
    save: Claim | None = None,
    without_note: Mapping[str, Generation] | None = None,
) -> None:
    """Replaces the manifest of a step by a claim that names ``trash``.

    Args:
        folder: The step.
        trash: The trash.
        generation: The generation of the manifest. None: there is none.
        save: The save that the manifest is of. None: it is of none.
        without_note: Objects that are deleted though they have no notes, with their generations. See ``copied``.
    """
    now_ns = int(folder.now_s() * 1e9)
    claim, place = Claim("deletes", 0, now_ns, trash=trash.name), folder / layout.MANIFEST
    if without_note:
        (trash / _COPIED).put(json.dumps(dict(without_note)).encode())
    try:
        if generation is None:
            place.create(claim.to_bytes())
        else:
            place.replace(claim.to_bytes(), generation)
    except (FileExistsError, StaleGeneration):
        return  # another process was faster
    # If this process ends here, ``find_condemned`` writes the tombstone.
    of_save = "" if save is None else f"{folder.name}.gracepoint-tmp.{save.attempt}.{save.ordinal}"
    (trash / TOMBSTONE).put(f"{folder.name}\n{of_save}".encode())


def delete_of_save(folder: StoragePath, save: Claim) -> None:
    """Deletes the objects below ``folder`` that a save has written."""
    entries = [entry for entry in folder.entries() if entry.key != layout.DAMAGE_MARK]  # which no save writes
    folder.delete_entries(list(_noted(folder, entries, {}, lambda by: by.is_same(save))))


def sweep(folder: StoragePath, trash: str) -> bool:
    """Deletes the objects of a step that was condemned to ``trash``, and its claim.

    Returns False if another process does so now, or if this process was too slow. Then a later call does the rest.

    Raises:
        PermissionError: The store refuses to delete some of them. All others are deleted, and the claim stays.
    """
    place = folder / layout.MANIFEST
    entries = folder.entries()  # before the claim is read: what a later save writes is not among them
    try:
        marker = place.read()
    except FileNotFoundError:
        return True  # another process has swept it
    claim = _condemned(marker.data, place)
    if claim is None or claim.trash != trash:
        return True
    if claim.swept_ns and folder.now_s() - claim.swept_ns / 1e9 < FREE_S:
        return False
    # Orbax's mark goes first, so that Orbax never takes a step without some of its objects for a finished one.
    success = [entry for entry in entries if entry.key == layout.COMMIT_SUCCESS]
    others = [entry for entry in entries if entry.key not in (layout.COMMIT_SUCCESS, layout.MANIFEST)]
    without_note, stays = _listed(folder.parent / trash), list[str]()
    refused: PermissionError | None = None
    try:
        turn = _Turn(folder, claim, marker.generation)
        for batch in (success, *(others[start : start + _BATCH] for start in range(0, len(others), _BATCH))):
            turn.renew()
            own_entries = list(
                _noted(folder, batch, without_note, lambda by: by.begun_ns <= claim.begun_ns + _CLOCKS_DIFFER_NS)
            )
            try:
                folder.delete_entries(own_entries, turn.go_on)
            except PermissionError as error:
                refused = refused or error
            deleted = {entry.key for entry in own_entries}
            stays += [entry.key for entry in batch if entry.key not in deleted]
        if refused is not None:
            raise refused
        turn.renew()
        if stays:
            logger.warning(
                "%s is deleted, but %d objects in it stay, as Gracepoint did not write them: %s",
                folder,
                len(stays),
                ", ".join(sorted(stays)[:_NAMED]),
            )
        return place.delete_version(turn.generation)
    except (StaleGeneration, _TooLate):
        return False


def finish(folder: StoragePath, trash: str, go_on: Callable[[], None] | None) -> None:
    """Waits until a condemned step is swept. Sweeps it if nobody else does.

    Raises:
        SaveFailed: Another process takes too long. What ``go_on`` raises is raised, too.
    """
    until_s = folder.now_s() + 2 * FREE_S
    while not sweep(folder, trash):
        if go_on is not None:
            go_on()
        if folder.now_s() > until_s:
            raise SaveFailed(
                f"{folder} was being deleted by another process, which did not end within {2 * FREE_S:.0f} s"
            )
        folder.sleep(folder.look_every_s)


class _Turn:
    """A sweeper's claim on a condemned step.

    Attributes:
        generation: The generation of the claim.
    """

    def __init__(self, folder: StoragePath, claim: Claim, generation: Generation) -> None:
        self._folder = folder
        self._claim = claim
        self.generation = generation
        self._since_s = 0.0

    def renew(self) -> None:
        """Writes the time into the claim if it is old. Raises StaleGeneration if the claim is lost."""
        now_s = self._folder.now_s()
        if now_s - self._since_s > RENEWED_S:
            fresh = dataclasses.replace(self._claim, swept_ns=int(now_s * 1e9), nonce=Claim.new_nonce())
            self.generation = (self._folder / layout.MANIFEST).replace(fresh.to_bytes(), self.generation)
            self._since_s = now_s

    def go_on(self) -> None:
        """Raises _TooLate if no request may be made any more."""
        if self._folder.now_s() - self._since_s > LAST_REQUEST_S:
            raise _TooLate


def _condemned(data: bytes, place: StoragePath) -> Claim | None:
    return Claim.from_bytes(data, str(place)) if is_claim(data) else None


def _listed(trash: StoragePath) -> Mapping[str, Generation]:
    """Returns the objects without notes that are deleted with the step of ``trash``, with their generations."""
    try:
        listed: dict[str, Generation] = json.loads((trash / _COPIED).read_bytes())
    except FileNotFoundError:
        return {}
    return listed


def _noted(
    folder: StoragePath,
    entries: Collection[Entry],
    without_note: Mapping[str, Generation],
    is_wanted: Callable[[Claim], bool],
) -> Iterator[Entry]:
    """Yields the entries whose note is ``is_wanted``, those in ``without_note``, and the mark of a damaged step."""
    wanted_keys: set[str] = set()

    def look(entry: Entry) -> None:
        noted = (folder / entry.key).noted()
        if noted is None or noted.generation != entry.generation:
            return
        by = Claim.noted(noted.note)
        if is_wanted(by) if by is not None else without_note.get(entry.key) == entry.generation:
            wanted_keys.add(entry.key)

    folder.at_once(functools.partial(look, entry) for entry in entries if entry.key not in _WITHOUT_NOTE)
    for entry in entries:
        if entry.key in wanted_keys or entry.key == layout.DAMAGE_MARK:
            yield entry
