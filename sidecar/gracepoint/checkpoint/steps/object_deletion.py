"""Deletes the objects of a condemned step in a store that cannot rename.

A step is condemned when its manifest is replaced by a claim that names the trash (``manifest_commit``). One process
at a time **sweeps** such a step. It writes the time into the claim. Before a batch of deletions it writes the time
again if ``RENEWED_S`` have passed. This renewal is conditional, so a process that has lost the claim notices and ends.

Some stores distinguish versions by their contents. There, the condition of a late deletion would also hold for an
object of a later save that has the same bytes. Therefore:

* A sweeper makes no request later than ``LAST_REQUEST_S`` after it has renewed the claim.
* Another process takes the claim over ``FREE_S`` after its renewal at the earliest. The last request has ended by then.
* No save takes the step over while the claim stands (``object_layout``). A save waits for the sweep, or sweeps itself.

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import grid
from gracepoint.checkpoint.format.layout import Claim, is_claim
from gracepoint.checkpoint.format.manifest import Manifest, StoredFile
from gracepoint.checkpoint.steps.records import all_files, signs_of_ours
from gracepoint.checkpoint.storage.storage_path import Entry, Generation, StaleGeneration, StoragePath
from gracepoint.errors import CheckpointCorrupt, SaveFailed

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
