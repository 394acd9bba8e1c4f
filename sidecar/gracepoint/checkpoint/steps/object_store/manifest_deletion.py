"""Deletes steps and unfinished saves in stores that cannot rename. ``manifest_commit`` says what a step is there.

To **delete** a step, a process replaces its manifest by a claim that names the trash. From then on the step counts as
deleted. Its objects are deleted later (``object_deletion``), and the claim last. Objects that Gracepoint did not write
stay.
"""

from __future__ import annotations

import contextlib
import logging

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.claim import Claim, is_claim
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.steps.object_store.concurrent_reads import look_at
from gracepoint.checkpoint.steps.object_store.manifest_commit import is_committed, save_of
from gracepoint.checkpoint.steps.object_store.object_deletion import delete_of_save, refuse_foreign, sweep
from gracepoint.checkpoint.storage.backend import Generation, StaleGeneration
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

_TOMBSTONE = "deletes"  # an object in the trash: the name of the step that is deleted, and of the folder of its save


def discard(folder: StoragePath, trash: StoragePath, only: str | None) -> None:
    """Marks a step as deleted. ``empty_trash`` deletes its objects later.

    ``only`` is the checkpoint to discard, as ``standing`` returns it. None: whichever is there.
    """
    place = folder / layout.MANIFEST
    try:
        found = place.read()
    except FileNotFoundError:
        return
    if is_claim(found.data):
        return
    save = save_of(found.data, place)
    if only is not None and (save is None or f"{save.attempt}.{save.ordinal}" != only):
        return
    _condemn(folder, trash, found.generation, save)


def _condemn(folder: StoragePath, trash: StoragePath, generation: Generation | None, save: Claim | None = None) -> None:
    """Replaces the manifest by a claim that names ``trash``. ``save`` is the save that the manifest is of, if any."""
    now_ns = int(folder.now_s() * 1e9)
    claim, place = Claim("deletes", 0, now_ns, trash=trash.name), folder / layout.MANIFEST
    try:
        if generation is None:
            place.create(claim.to_bytes())
        else:
            place.replace(claim.to_bytes(), generation)
    except (FileExistsError, StaleGeneration):
        return  # another process was faster
    # If this process ends here, ``find_condemned`` writes the tombstone.
    of_save = "" if save is None else f"{folder.name}.gracepoint-tmp.{save.attempt}.{save.ordinal}"
    (trash / _TOMBSTONE).put(f"{folder.name}\n{of_save}".encode())


def give_up(paths: Layout, temporary: Temporary) -> None:
    """Deletes what is left of an unfinished save. First makes sure that no process can commit it any more."""
    trash = paths.trash(temporary.step, temporary.attempt, temporary.ordinal)
    place = temporary.target / layout.MANIFEST
    try:
        found = place.read()
        if is_claim(found.data):
            other = Claim.from_bytes(found.data, str(place))
            if (other.attempt, other.ordinal) == (temporary.attempt, temporary.ordinal):
                _condemn(temporary.target, trash, found.generation)
    except FileNotFoundError:
        if names := [entry.key for entry in temporary.target.entries()]:
            try:
                refuse_foreign(temporary.target, names)
                _condemn(temporary.target, trash, None)
            except SaveFailed:
                # A claim would hide the step of another program. Without it the save cannot be committed either: no
                # save is committed beside objects of others.
                delete_of_save(temporary.target, Claim(temporary.attempt, temporary.ordinal, 0))
    temporary.path.delete_folder()


def empty_trash(paths: Layout) -> None:
    """Deletes the objects of discarded steps, and the folders of saves that are committed."""
    for temporary in paths.temporaries():
        if is_committed(temporary):
            temporary.path.delete_folder()
    for trash in paths.trashed():
        with contextlib.suppress(FileNotFoundError):
            name, _, of_save = (trash / _TOMBSTONE).read_bytes().decode().partition("\n")
            if not sweep(paths.root / name, trash.name):
                logger.info("a later start or save goes on to delete %s, or another process does", paths.root / name)
                continue
            if of_save:
                (paths.root / of_save).delete_folder()  # it was not deleted yet when the step was discarded
            trash.delete_folder()


def find_condemned(paths: Layout) -> None:
    """Writes the tombstones of condemned steps that have none, as the deleting process ended before it wrote them."""

    def look(step: int) -> None:
        folder = paths.step(step)
        with contextlib.suppress(FileNotFoundError):
            data = (folder / layout.MANIFEST).read_bytes()
            if is_claim(data):
                trash = Claim.from_bytes(data, str(folder)).trash
                if trash is not None:
                    # One that exists stays, as it may also name the folder of the save.
                    with contextlib.suppress(FileExistsError):
                        (paths.root / trash / _TOMBSTONE).create(folder.name.encode())

    look_at(paths.root, paths.steps(), look)
