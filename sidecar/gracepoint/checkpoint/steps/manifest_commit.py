"""Commits steps in stores that cannot rename: a step is committed when it has a manifest.

The objects of a save lie below the step's final name, where Orbax expects them. Its done-records lie in a folder of the
save next to it, and hold the generation of each object. ``object_steps`` says who may write which object.

To **commit**, a process lists the step once. If each object is of the generation in the records, it creates the
manifest ``_GRACEPOINT``, or replaces a claim by it. Both are conditional, so one process wins. Orbax's marks follow. If
the process dies before, the next salvage adds them. Any number of processes may do so at once, may stop anywhere, and
may repeat it.

To **replace** a committed step, a save writes its objects into its own folder first. Once the save is durable, a
process puts the save's claim in the place of the old manifest, removes Orbax's mark, moves the objects into place and
commits. If the process dies meanwhile, the next salvage continues, as the save is durable.

To **delete** a step, a process replaces its manifest by a claim that names the trash. From then on the step counts as
deleted. Its objects are deleted later (``object_steps``), and the claim last. Objects that Gracepoint did not write
stay.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Claim, Layout, Temporary, is_claim
from gracepoint.checkpoint.format.records import (
    DoneRecord,
    Manifest,
    Writing,
    all_files,
    done_records,
    gives_way,
    is_of,
    manifest_bytes,
    manifest_fields,
    merge,
    orbax_metadata,
    orbax_success,
    read_manifest,
    standing,
)
from gracepoint.checkpoint.memory import bytes_of
from gracepoint.checkpoint.steps.object_steps import (
    TOMBSTONE,
    Placement,
    condemn,
    copied,
    copied_in_part,
    delete_of_save,
    finish,
    is_part_of_copy,
    merge_trees,
    move,
    refuse_foreign,
    sweep,
    take,
)
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.storage_path import Generation, StaleGeneration, StoragePath, look_at
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointCorrupt, SaveFailed

logger = logging.getLogger(__name__)

_BEGUN = "begun"
_TRIES = 20
_MARKS = (layout.STEP_METADATA, layout.COMMIT_SUCCESS)
#: Seconds without a change after which trash that names no step is deleted: a file system's trash that was copied, or
#: what a process that died before it condemned the step has left.
NAMELESS_KEPT_S = 3600.0


class ManifestCommit:
    """Commits by a manifest that is written with conditions. ``commit.Commit`` documents the methods."""

    quiet_s = 15.0  # longer than where files grow: an object is shown only when all of it is written
    takes_parts = False  # the commit needs the generation of every chunk anyway

    def __init__(self, paths: Layout) -> None:
        self._paths = paths

    @contextlib.contextmanager
    def writing(self, temporary: Temporary, begun_ns: int, *, process_index: int) -> Iterator[Writing]:
        begun_ns = int(temporary.path.now_s() * 1e9)
        placement = _begin(temporary, begun_ns, marks=process_index == 0)
        yield Writing(temporary.target, lambda: True, begun_ns, placement.generations, placement.place)

    def record(self, temporary: Temporary, done_record: DoneRecord, go_on: Callable[[], None]) -> None:
        _put(temporary.path / layout.done_record(done_record.process_index), done_record.to_bytes(), go_on)

    def finalize(self, temporary: Temporary, *, replace: bool, go_on: Callable[[], None] | None = None) -> bool:
        return self._finalize(temporary, lambda: replace and _may_be_replaced(temporary.target), go_on)

    def finish(self, temporary: Temporary, all_done: Sequence[DoneRecord]) -> bool:
        return self._finalize(
            temporary, lambda: gives_way(temporary.target, all_done[0].replaces, self.standing), go_on=None
        )

    def _finalize(
        self, temporary: Temporary, may_replace: Callable[[], bool], go_on: Callable[[], None] | None
    ) -> bool:
        """Commits a save if it is durable. ``may_replace`` returns whether it may replace another committed save."""
        records = done_records(temporary.path)
        if records is None:
            return self.is_committed(temporary)
        try:
            return _finish(temporary, records, may_replace, go_on)
        except CheckpointCorrupt:
            # Another process may have committed the save meanwhile, and deleted the save's folder.
            if self.is_committed(temporary):
                return True
            raise

    def is_committed(self, temporary: Temporary) -> bool:
        return _is_committed(temporary)

    def is_left_by_commit(self, temporary: Temporary) -> bool:
        return _is_committed(temporary)  # until ``empty_trash`` deletes it

    def last_change_s(self, temporary: Temporary) -> float:
        return max(temporary.path.last_change_s(), temporary.target.last_change_s())

    def give_up(self, temporary: Temporary) -> None:
        """Deletes what is left of an unfinished save. First makes sure that no process can commit it any more."""
        trash = self._trash(temporary)
        place = temporary.target / layout.MANIFEST
        try:
            marker = place.read()
            if is_claim(marker.data):
                other = Claim.from_bytes(marker.data, str(place))
                if (other.attempt, other.ordinal) == (temporary.attempt, temporary.ordinal):
                    condemn(temporary.target, trash, marker.generation)
        except FileNotFoundError:
            if names := [entry.key for entry in temporary.target.entries()]:
                try:
                    refuse_foreign(temporary.target, names)
                    condemn(temporary.target, trash, None)
                except SaveFailed:
                    # A claim would hide the step of another program. Without it the save cannot be committed either: no
                    # save is committed beside objects of others.
                    delete_of_save(temporary.target, Claim(temporary.attempt, temporary.ordinal, 0))
        undeleted.delete_folder(temporary.path)

    def delete_failed(self, temporary: Temporary, *, deletes: bool) -> None:
        """Deletes the objects of a save that failed in this gang. Other saves of the step keep theirs."""
        if not deletes:
            return
        temporary.path.delete_folder()  # first: without its records it is never durable
        delete_of_save(temporary.target, Claim(temporary.attempt, temporary.ordinal, 0))
        place = temporary.target / layout.MANIFEST
        with contextlib.suppress(FileNotFoundError):
            marker = place.read()
            if is_claim(marker.data):
                claim = Claim.from_bytes(marker.data, str(place))
                if (claim.attempt, claim.ordinal) == (temporary.attempt, temporary.ordinal):
                    trash = self._trash(temporary)
                    condemn(temporary.target, trash, marker.generation)
                    self._empty(trash)

    def is_unfinished(self, folder: StoragePath) -> bool:
        try:
            return is_claim((folder / layout.MANIFEST).read_bytes())
        except FileNotFoundError:
            return not (folder / layout.COMMIT_SUCCESS).is_value()

    def standing(self, folder: StoragePath) -> str | None:
        return standing(folder, without_manifest=None)  # a save writes its own objects there, which are no checkpoint

    def discard(self, folder: StoragePath, trash: StoragePath, *, only: str | None = None) -> None:
        """Marks a step as deleted. ``empty_trash`` deletes its objects later."""
        place = folder / layout.MANIFEST
        try:
            marker = place.read()
        except FileNotFoundError:
            return
        if is_claim(marker.data):
            return
        save = _save_of(marker.data, place)
        if only is not None and (save is None or f"{save.attempt}.{save.ordinal}" != only):
            return
        without_note = {} if save is None else copied(folder, Manifest.from_bytes(marker.data, str(place)))
        condemn(folder, trash, marker.generation, save, without_note)

    def seen(self) -> Layout | None:
        try:
            return self._paths.seen()  # each listing takes a round trip
        except FileNotFoundError:
            return None

    def is_settled(self, listed: Layout) -> bool:
        return not listed.temporaries()

    def interrupted(self) -> Iterator[tuple[StoragePath, Callable[[], None]]]:
        return iter(())  # salvage continues with a replacement, as the new save is durable

    def find_condemned(self, *, after_crash: bool) -> None:
        """Writes the tombstones that condemned steps lack, as the deleting process ended before it wrote them."""
        if not after_crash and not self._paths.trashed():
            return

        def look(step: int) -> None:
            folder = self._paths.step(step)
            with contextlib.suppress(FileNotFoundError):
                data = (folder / layout.MANIFEST).read_bytes()
                if is_claim(data):
                    trash = Claim.from_bytes(data, str(folder)).trash
                    if trash is not None:
                        # One that exists stays, as it may also name the folder of the save.
                        with contextlib.suppress(FileExistsError):
                            (self._paths.root / trash / TOMBSTONE).create(folder.name.encode())

        look_at(self._paths.root, self._paths.steps(), look)

    def empty_trash(self) -> None:
        """Deletes the objects of discarded steps, and the folders of saves that are committed."""
        for temporary in self._paths.temporaries():
            if _is_committed(temporary):
                undeleted.delete_folder(temporary.path)
        for trash in self._paths.trashed():
            self._empty(trash)

    def _empty(self, trash: StoragePath) -> None:
        with undeleted.deleting(trash):  # one that stays must not keep the others
            try:
                name, _, of_save = (trash / TOMBSTONE).read_bytes().decode().partition("\n")
            except FileNotFoundError:
                if 0.0 < trash.last_change_s() < self._paths.root.now_s() - NAMELESS_KEPT_S:
                    trash.delete_folder()
                return
            if not sweep(self._paths.root / name, trash.name):
                logger.info(
                    "a later start or save goes on to delete %s, or another process does", self._paths.root / name
                )
                return
            if of_save:
                # It was not deleted yet when the step was discarded.
                undeleted.delete_folder(self._paths.root / of_save)
            trash.delete_folder()

    def _trash(self, temporary: Temporary) -> StoragePath:
        return self._paths.trash(temporary.step, temporary.attempt, temporary.ordinal)


def _begin(temporary: Temporary, begun_ns: int, *, marks: bool) -> Placement:
    """Returns where the objects go that a process of a save writes.

    Args:
        temporary: The save.
        begun_ns: When it began, by the store's clock.
        marks: Whether this process writes an empty object into the folder of the save. A later start finds the save by
            it, even if the save never gets done-records.

    Raises:
        SaveFailed: The step has objects that Gracepoint did not write.
    """
    names: dict[str, bool] = {}

    def look() -> None:
        with contextlib.suppress(FileNotFoundError):
            names.update((child.name, child.is_folder) for child in temporary.target.children())

    temporary.target.at_once([look, functools.partial((temporary.path / _BEGUN).put, b"")] if marks else [look])
    staged = layout.COMMIT_SUCCESS in names
    if layout.MANIFEST in names:
        with contextlib.suppress(FileNotFoundError):
            data = (temporary.target / layout.MANIFEST).read_bytes()
            staged = not is_claim(data) or Claim.from_bytes(data, str(temporary.target)).trash is not None
    elif names and is_part_of_copy(temporary.target, names):
        staged = True
    else:
        try:
            # Only what is directly in the step is looked at. That is enough to find a step of Orbax, whose marks are
            # there from its beginning. Other objects that are not Gracepoint's are found before the commit.
            refuse_foreign(temporary.target, [name for name, is_folder in names.items() if not is_folder])
        except SaveFailed:
            undeleted.delete_folder(temporary.path)
            raise
    claim = Claim(temporary.attempt, temporary.ordinal, begun_ns)
    return Placement(temporary, claim, staged=staged)


def _finish(
    temporary: Temporary,
    records: Sequence[DoneRecord],
    may_replace: Callable[[], bool],
    go_on: Callable[[], None] | None,
) -> bool:
    manifest = merge(records)
    claim = Claim(temporary.attempt, temporary.ordinal, records[0].begun_ns)
    in_place = {path: Generation(generation) for record in records for path, generation in record.generations.items()}
    if staged := {path: file for path, file in manifest.files.items() if path not in in_place}:
        if not _take_over(temporary, claim, manifest, may_replace, go_on):
            return _is_committed(temporary)
        moved = move(temporary, claim, staged, go_on)
        if moved is None:
            return _is_committed(temporary)
        in_place |= moved
    if manifest.arrays and manifest.arrays[0].format.ocdbt and not merge_trees(temporary, claim, manifest, go_on):
        return _is_committed(temporary)
    return _publish(temporary, claim, manifest, in_place)


def _is_committed(temporary: Temporary) -> bool:
    """Returns whether the step is this save. Adds Orbax's marks if they are missing."""
    if not is_of(temporary.target, temporary):
        return False
    marks: list[bool] = []

    def look(name: str) -> None:
        noted = (temporary.target / name).noted()
        by = None if noted is None else Claim.noted(noted.note)
        marks.append(by is not None and (by.attempt, by.ordinal) == (temporary.attempt, temporary.ordinal))

    temporary.target.at_once(functools.partial(look, name) for name in _MARKS)
    if not all(marks):
        with contextlib.suppress(OSError):  # a directory that this process may only read
            _mark(temporary, None)
    return True


def _may_be_replaced(target: StoragePath) -> bool:
    """Returns True, unless a newer Gracepoint wrote the step. Then it raises CheckpointTooNew."""
    with contextlib.suppress(CheckpointCorrupt):
        manifest_fields(target)
    return True


def _take_over(
    temporary: Temporary,
    claim: Claim,
    manifest: Manifest,
    may_replace: Callable[[], bool],
    go_on: Callable[[], None] | None,
) -> bool:
    """Claims the step, if no other save stands there or it may be replaced. Returns whether it is claimed.

    A step that was copied here, whole or in part, is deleted first: its objects do not say of which save they are.

    Raises:
        SaveFailed: The step has objects that Gracepoint did not write.
    """
    place, success = temporary.target / layout.MANIFEST, temporary.target / layout.COMMIT_SUCCESS
    in_part = copied_in_part(temporary.target, manifest) if manifest_bytes(temporary.target) is None else {}
    _refuse_foreign_beside(temporary.target, in_part)
    if in_part:
        logger.warning(
            "%s is a part of a checkpoint, as a copy that was broken off leaves it: its %d objects are deleted, as the "
            "step is saved again",
            temporary.target,
            len(in_part),
        )
        condemn(temporary.target, temporary.trash, None, None, in_part)
    for _ in range(_TRIES):
        marked = success.entry()
        with contextlib.suppress(FileNotFoundError):
            marker = place.read()
            if not is_claim(marker.data):
                save = _save_of(marker.data, place)
                standing = None if save is None else Manifest.from_bytes(marker.data, str(place))
                without_note = {} if standing is None else copied(temporary.target, standing)
                # When a copied save began was told by another clock.
                if save is not None and save.is_later(claim) and not without_note:
                    logger.warning("%s is given up: a later save of %s is committed", temporary.path, temporary.what)
                    undeleted.delete_folder(temporary.path)
                    return False
                if (save is not None and save.is_same(claim)) or not may_replace():
                    return False
                logger.warning("%s is saved again: it is replaced", temporary.what)
                if without_note:
                    condemn(temporary.target, temporary.trash, marker.generation, save, without_note)
                    continue
                with contextlib.suppress(StaleGeneration):
                    place.replace(claim.to_bytes(), marker.generation)
                continue
            other = Claim.from_bytes(marker.data, str(place))
            if other.trash is not None:
                finish(temporary.target, other.trash, go_on)
                continue
            if other.is_later(claim) and not other.is_same(claim):
                return False
            if other.is_same(claim):
                # The mark was read before the claim, so it is of the save that stood here before.
                if marked is not None:
                    success.delete_version(marked.generation)
                return True
        if take(temporary.target, claim) is None:
            continue
    return False


def _refuse_foreign_beside(target: StoragePath, known_files: Collection[str]) -> None:
    """Raises SaveFailed if a step has objects that Gracepoint did not write.

    Those that are ``known_files``, and those that the step has by its manifest, need no look.
    """
    item: str | None = None
    with contextlib.suppress(CheckpointCorrupt):
        if (manifest := read_manifest(target)) is not None:
            known_files, item = dict(all_files(target, manifest)), manifest.item
    refuse_foreign(
        target,
        [
            entry.key
            for entry in target.entries()
            if entry.key not in known_files and (item is None or not layout.is_beside_manifest(entry.key, item))
        ],
    )


def _publish(temporary: Temporary, claim: Claim, manifest: Manifest, in_place: Mapping[str, Generation]) -> bool:
    place = temporary.target / layout.MANIFEST
    for _ in range(_TRIES):
        listed = {entry.key: entry for entry in temporary.target.entries()}
        if layout.MANIFEST in listed and _is_committed(temporary):
            return True
        for path, file in manifest.files.items():
            entry = listed.get(path)
            if entry is None or (entry.bytes, entry.generation) != (file.bytes, in_place[path]):
                raise CheckpointCorrupt(
                    f"{temporary.what}: {temporary.target / path} is not what this save wrote: a later save of the "
                    "step has overwritten it, or it was deleted"
                )
        refuse_foreign(temporary.target, [name for name in listed if name not in manifest.files])
        try:
            if layout.DAMAGE_MARK in listed:  # of the save that stood here before
                (temporary.target / layout.DAMAGE_MARK).delete()
            if layout.MANIFEST not in listed:
                place.create(manifest.to_bytes())
            else:
                marker = place.read()
                if not is_claim(marker.data):
                    return _is_committed(temporary)
                other = Claim.from_bytes(marker.data, str(place))
                if other.trash is not None or (other.is_later(claim) and not other.is_same(claim)):
                    return False
                place.replace(manifest.to_bytes(), marker.generation)
        except (FileExistsError, FileNotFoundError, StaleGeneration):
            continue
        try:
            _mark(temporary, manifest)
        except OSError as error:
            logger.warning("%s is committed; Orbax's marks follow at the next start: %s", temporary.what, error)
        return True
    return _is_committed(temporary)


def _mark(temporary: Temporary, manifest: Manifest | None) -> None:
    """Adds Orbax's marks to a committed step. ``manifest`` is that of the step. None: it is read."""
    if manifest is None:
        manifest = Manifest.from_bytes((temporary.target / layout.MANIFEST).read_bytes(), str(temporary.target))
    success = orbax_success(temporary.target, f"{temporary.attempt}.{temporary.ordinal}")
    # Marks have notes, too: what has none is not Gracepoint's, and is neither overwritten nor deleted.
    placement = Placement(temporary, Claim(temporary.attempt, temporary.ordinal, manifest.begun_ns), staged=False)
    temporary.target.at_once(
        [
            functools.partial(placement.mark, layout.STEP_METADATA, orbax_metadata(manifest, temporary.target)),
            functools.partial(placement.mark, layout.COMMIT_SUCCESS, success),
        ]
    )


def _save_of(manifest: bytes, where: StoragePath) -> Claim | None:
    """Returns the save that a manifest is of. None if the manifest is damaged."""
    try:
        fields = Manifest.fields_in(manifest, str(where))
    except CheckpointCorrupt:
        return None
    return Claim(fields["attempt"], fields["ordinal"], fields["begun_ns"])


def _put(where: StoragePath, data: bytes, go_on: Callable[[], None]) -> None:
    """Writes a small object in place of any that is there. ``go_on`` may end it by an error."""
    generation: Generation | None = None
    for _ in range(_TRIES):
        try:
            where.write_if(bytes_of(data), crc32(data), generation, "", go_on)
            return
        except (FileExistsError, StaleGeneration):
            noted = where.noted()
            generation = None if noted is None else noted.generation
    raise SaveFailed(f"{where} keeps changing")
