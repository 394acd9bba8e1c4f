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
from gracepoint.checkpoint.format.manifest import Manifest
from gracepoint.checkpoint.steps.object_store.concurrent_reads import look_at
from gracepoint.checkpoint.steps.object_store.manifest_commit import is_committed, save_of
from gracepoint.checkpoint.steps.object_store.object_deletion import (
    TOMBSTONE,
    condemn,
    copied,
    delete_of_save,
    refuse_foreign,
    sweep,
)
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import SaveFailed

logger = logging.getLogger(__name__)

#: Seconds without a change after which trash that names no step is deleted: a file system's trash that was copied, or
#: what a process that died before it condemned the step has left.
NAMELESS_KEPT_S = 3600.0


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
    without_note = {} if save is None else copied(folder, Manifest.from_bytes(found.data, str(place)))
    condemn(folder, trash, found.generation, save, without_note)


def give_up(paths: Layout, temporary: Temporary) -> None:
    """Deletes what is left of an unfinished save. First makes sure that no process can commit it any more."""
    trash = paths.trash(temporary.step, temporary.attempt, temporary.ordinal)
    place = temporary.target / layout.MANIFEST
    try:
        found = place.read()
        if is_claim(found.data):
            other = Claim.from_bytes(found.data, str(place))
            if (other.attempt, other.ordinal) == (temporary.attempt, temporary.ordinal):
                condemn(temporary.target, trash, found.generation)
    except FileNotFoundError:
        if names := [entry.key for entry in temporary.target.entries()]:
            try:
                refuse_foreign(temporary.target, names)
                condemn(temporary.target, trash, None)
            except SaveFailed:
                # A claim would hide the step of another program. Without it the save cannot be committed either: no
                # save is committed beside objects of others.
                delete_of_save(temporary.target, Claim(temporary.attempt, temporary.ordinal, 0))
    temporary.path.delete_folder()


def give_up_failed(paths: Layout, temporary: Temporary, trash: StoragePath) -> None:
    """Deletes the objects of a save that failed in this gang. Other saves of the step keep theirs."""
    temporary.path.backend.delete_folder(temporary.path.key)  # first: without its records it is never durable
    delete_of_save(temporary.target, Claim(temporary.attempt, temporary.ordinal, 0))
    place = temporary.target / layout.MANIFEST
    with contextlib.suppress(FileNotFoundError):
        found = place.read()
        if is_claim(found.data):
            claim = Claim.from_bytes(found.data, str(place))
            if (claim.attempt, claim.ordinal) == (temporary.attempt, temporary.ordinal):
                condemn(temporary.target, trash, found.generation)
                _empty(paths, trash)


def empty_trash(paths: Layout) -> None:
    """Deletes the objects of discarded steps, and the folders of saves that are committed."""
    for temporary in paths.temporaries():
        if is_committed(temporary):
            temporary.path.delete_folder()
    for trash in paths.trashed():
        _empty(paths, trash)


def _empty(paths: Layout, trash: StoragePath) -> None:
    with undeleted.telling(trash):  # one that stays must not keep the others
        try:
            name, _, of_save = (trash / TOMBSTONE).read_bytes().decode().partition("\n")
        except FileNotFoundError:
            if 0.0 < trash.last_change_s() < paths.root.now_s() - NAMELESS_KEPT_S:
                trash.backend.delete_folder(trash.key)
            return
        if not sweep(paths.root / name, trash.name):
            logger.info("a later start or save goes on to delete %s, or another process does", paths.root / name)
            return
        if of_save:
            (paths.root / of_save).delete_folder()  # it was not deleted yet when the step was discarded
        trash.backend.delete_folder(trash.key)


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
                        (paths.root / trash / TOMBSTONE).create(folder.name.encode())

    look_at(paths.root, paths.steps(), look)
