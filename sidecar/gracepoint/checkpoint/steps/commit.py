"""Commits durable saves, and discards saves that will never be finished.

A save is **durable** when the done-records of all its processes exist. From then on no process writes values to it, and
any process can finish it. A save is **committed** when its folder has its final name, which one atomic rename gives.
Between the two states only small files are added. Any number of processes may run the commit at the same time, may stop
anywhere, and may repeat it:

* A file appears as a whole, by a rename. Its meaning does not depend on which process wrote it.
* The rename to ``<step>`` succeeds in one process. The other processes find that the temporary folder is gone, and that
  the committed folder has the same attempt and ordinal in its manifest.
* If a folder already exists at ``<step>``, only the gang that has just saved that step replaces it (``replace``), and
  only once the new save is durable. Salvage leaves an existing folder, with two exceptions: the folder is known to be
  damaged, or it is the one that the save found there and was to replace.

Stores that cannot rename (``gs://``, ``s3://``) commit in another way, which ``manifest_commit`` describes. This module
chooses the way by the store. Its callers need not know which one it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import DoneRecord, Manifest, merge
from gracepoint.checkpoint.steps import manifest_commit
from gracepoint.checkpoint.steps.object_deletion import look_at
from gracepoint.checkpoint.steps.records import (
    done_records,
    is_of,
    manifest_fields,
    orbax_metadata,
    orbax_success,
    standing,
)
from gracepoint.checkpoint.storage import posix
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointCorrupt, CheckpointRefused, CheckpointTooNew

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Writing:
    """One process's part of a save, while it is written.

    Attributes:
        folder: The folder that the process's files are written to.
        stayed: Returns whether ``folder`` is still the folder that had this name at the beginning.
        begun_ns: When the save began, in nanoseconds since the epoch. If the store cannot rename, by the store's clock:
            there this time decides which of two saves is the later one.
        generations: See ``DoneRecord``. It grows while the files are written.
    """

    folder: StoragePath
    stayed: Callable[[], bool]
    begun_ns: int
    generations: Mapping[str, str]


@contextlib.contextmanager
def writing(temporary: Temporary, begun_ns: int, *, process_index: int) -> Iterator[Writing]:
    """Begins this process's part of a save. ``begun_ns`` is when the save began, by this process's clock."""
    if not temporary.path.backend.renames:
        begun_ns = int(temporary.path.now_s() * 1e9)
        folder, placement = manifest_commit.begin(temporary, begun_ns, marks=process_index == 0)
        yield Writing(folder, lambda: True, begun_ns, placement.generations)
        return
    temporary.path.make_folder_durably()
    with temporary.path.staying() as stayed:
        yield Writing(temporary.path, stayed, begun_ns, {})


def record(temporary: Temporary, done: DoneRecord, go_on: Callable[[], None]) -> None:
    """Makes the done-record of a process durable. In stores that cannot rename, ``go_on`` may end it by an error."""
    where = temporary.path / layout.done_record(done.process_index)
    if where.backend.renames:
        where.put(done.to_bytes())
    else:
        manifest_commit.put(where, done.to_bytes(), go_on)


def is_durable(temporary: Temporary) -> bool:
    """Returns whether the parts of all processes are on disk, committed or not.

    Raises:
        CheckpointCorrupt: A done-record cannot be read.
    """
    return done_records(temporary.path) is not None or is_committed(temporary)


def finalize(paths: Layout, temporary: Temporary, *, replace: bool, go_on: Callable[[], None] | None = None) -> bool:
    """Commits ``temporary`` if it is durable.

    Args:
        paths: Layout of the directory that holds the save.
        temporary: The save.
        replace: Whether the save replaces another folder that exists for its step.
        go_on: Called again and again in stores that cannot rename. An error that it raises ends the commit. None: there
            is a timeout for each request.

    Returns:
        True if the save is committed, by this or by another process. False if done-records are missing, or if its step
        has another folder that must not be replaced.

    Raises:
        CheckpointCorrupt: The done-records contradict each other. In a store that cannot rename, also: an object is no
            longer the one that this save wrote.
        CheckpointTooNew: A newer Gracepoint wrote the existing step.
        CheckpointRefused: A file has the name that the folder is to get.
        SaveFailed: In a store that cannot rename: the step has objects that Gracepoint did not write, or a later save
            has claimed it.
    """
    target = temporary.target
    if not target.backend.renames:
        return manifest_commit.finalize(temporary, lambda: replace and _may_be_replaced(target), go_on)
    try:
        records = done_records(temporary.path)
        if records is None:
            return is_committed(temporary)
        _check_no_file(temporary, target)
        _complete(temporary.path, merge(records), target)
        if replace:
            _make_way(paths, temporary, target)
        temporary.path.publish(target)  # last: what the folder holds must be durable when it has its final name
        paths.root.sync()
    except FileNotFoundError:
        # The folder was renamed meanwhile. Only a process that commits the save may do that.
        if is_committed(temporary):
            return True
        raise
    except FileExistsError:
        return is_committed(temporary)  # a folder that is not empty is never replaced
    return True


def _check_no_file(temporary: Temporary, target: StoragePath) -> None:
    """Raises CheckpointRefused if a file has the name of the checkpoint. It is somebody else's, and is not deleted."""
    if target.is_value() and not target.is_link():
        raise CheckpointRefused(
            f"{target} is a file, and {temporary.what} is to be a folder of that name. All of it is in "
            f"{temporary.path}, and the next start commits it: move the file away"
        )


def _may_be_replaced(target: StoragePath) -> bool:
    """Returns True, unless a newer Gracepoint wrote the step. Then it raises CheckpointTooNew."""
    with contextlib.suppress(CheckpointCorrupt):
        manifest_fields(target)
    return True


def is_committed(temporary: Temporary) -> bool:
    """Returns whether the folder with the final name is this save."""
    if not temporary.target.backend.renames:
        return manifest_commit.is_committed(temporary)
    return is_of(temporary.target, temporary)


def give_up_old(
    paths: Layout,
    *,
    attempt: str,
    older_than_s: float,
    newest_good: int | None = None,
    overtaken_for_s: float = 0.0,
    hidden_older_than_s: float | None = None,
) -> None:
    """Renames unfinished saves of other attempts to trash, if they have not changed for ``older_than_s`` seconds.

    A durable save is kept until another save of its step is committed. Also deletes Gracepoint's hidden files in the
    root (``Layout.hidden``) that have not changed for so long.

    Args:
        paths: The folder of checkpoints.
        attempt: The attempt whose own saves stay.
        older_than_s: Seconds without a change.
        newest_good: The newest step that can be restored. None: it is not known, and ``overtaken_for_s`` has no use.
        overtaken_for_s: Seconds without a change that are enough for a save of a step before ``newest_good``. No
            restore would choose such a save.
        hidden_older_than_s: Seconds without a change after which hidden files are deleted. None: ``older_than_s``.
    """
    if not paths.root.backend.renames:
        try:
            paths = paths.seen()  # each listing takes a round trip
        except FileNotFoundError:
            return
    left, probes = [t for t in paths.temporaries() if t.attempt != attempt], paths.hidden()
    if not left and not probes and (paths.root.backend.renames or not paths.trashed()):
        return
    now_s = paths.root.now_s()
    for probe in probes:
        if probe.last_change_s() < now_s - (older_than_s if hidden_older_than_s is None else hidden_older_than_s):
            if probe.is_folder():
                probe.delete_folder()
            else:
                with posix.telling(probe):
                    probe.delete()
    if not paths.root.backend.renames:
        manifest_commit.find_condemned(paths)
    changed_s = look_at(paths.root, left, last_change_s)
    for temporary in left:
        overtaken = temporary.step is not None and newest_good is not None and temporary.step < newest_good
        kept_s = overtaken_for_s if overtaken else older_than_s
        if (ahead_s := changed_s[temporary] - now_s) > older_than_s:
            logger.warning(
                "%s is unfinished and stays: it is dated %.0f s ahead of the storage's clock, so whether it is still "
                "being written cannot be told. Delete it if no job saves there",
                temporary.path,
                ahead_s,
            )
        # The time is 0 if the save was committed or deleted meanwhile.
        if 0.0 < changed_s[temporary] < now_s - kept_s and not _must_stay(temporary):
            logger.warning("giving %s up: unfinished for more than %.0f s", temporary.path, kept_s)
            with posix.telling(temporary.path):  # one that stays must not keep the others
                if paths.root.backend.renames:
                    discard(temporary.path, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))
                else:
                    manifest_commit.give_up(paths, temporary)


def _must_stay(temporary: Temporary) -> bool:
    """Returns whether a save is durable and its step has no other good checkpoint, or a newer Gracepoint wrote it."""
    try:
        return done_records(temporary.path) is not None and not standing(temporary.target)
    except CheckpointTooNew:
        return True
    except CheckpointCorrupt:
        return False


def last_change_s(temporary: Temporary) -> float:
    """Returns when something of an unfinished save last changed, by the store's clock."""
    if not temporary.path.backend.renames:
        return manifest_commit.last_change_s(temporary)
    return temporary.path.last_change_s()


def is_unfinished(folder: StoragePath) -> bool:
    """Returns whether the folder of a step holds an unfinished save. False in stores that rename finished saves."""
    return not folder.backend.renames and manifest_commit.is_unfinished(folder)


def discard(folder: StoragePath, trash: StoragePath, *, only: str | None = None) -> None:
    """Renames ``folder`` to ``trash``, durably, so that a crash never leaves a partly deleted checkpoint.

    In a store that cannot rename, the step ``folder`` counts as deleted from then on, and ``trash`` names the step
    whose objects ``empty_trash`` deletes. There, ``only`` identifies the checkpoint that is discarded (see
    ``standing``). If another checkpoint has taken its place, nothing happens. None: whichever is there is discarded.
    """
    if not folder.backend.renames:
        manifest_commit.discard(folder, trash, only)
        return
    with contextlib.suppress(FileNotFoundError):  # another process renamed it
        folder.publish(trash)
    # Without the sync, a crash might undo the rename but not the deletion of files below the new name.
    trash.parent.sync()


def give_up_failed(paths: Layout, temporary: Temporary, *, deletes: bool = True) -> None:
    """Deletes what a save that has failed has written, in all processes so far. A durable save stays.

    It can be called again, by any process: another one may still have written when it was called. Raises no OSError.

    Args:
        paths: The folder of checkpoints.
        temporary: The save. It was decided that it is not committed.
        deletes: False: there is no time. The folder becomes trash, and in stores that cannot rename all stays.
    """
    with posix.telling(temporary.path):
        try:
            if is_durable(temporary):
                return
        except (CheckpointCorrupt, CheckpointTooNew):
            return
        trash = paths.trash(temporary.step, temporary.attempt, temporary.ordinal)
        if not paths.root.backend.renames:
            if deletes:
                manifest_commit.give_up_failed(paths, temporary, trash)
            return
        try:
            discard(temporary.path, trash)
        except FileExistsError:  # what was written after it became trash
            temporary.path.delete_folder()
        if deletes:
            trash.delete_folder()


def empty_trash(paths: Layout) -> None:
    """Deletes all trash. This may take long."""
    if not paths.root.backend.renames:
        manifest_commit.empty_trash(paths)
        return
    for trash in paths.trashed():
        trash.delete_folder()  # another process may delete it at the same time


def _complete(folder: StoragePath, manifest: Manifest, target: StoragePath) -> None:
    """Adds the files that a committed step has: Gracepoint's manifest, and Orbax's marker files."""
    if manifest.arrays and manifest.arrays[0].format.ocdbt:
        ocdbt.merge(folder / manifest.item, manifest.process_count)
    (folder / layout.MANIFEST).put(manifest.to_bytes())
    (folder / layout.STEP_METADATA).put(orbax_metadata(manifest, folder))
    (folder / layout.COMMIT_SUCCESS).put(orbax_success(target))


def _replace(paths: Layout, temporary: Temporary, target: StoragePath) -> None:
    """Renames the folder at ``target`` to trash, unless it is this save.

    A later attempt may commit this save between the check of ``target`` and the rename. So the folder is first renamed
    to a name of its own and checked again. If it is this save, it gets its name back. If a crash happens in between,
    the next salvage gives the name back, which it would not do for trash.
    """
    aside = paths.aside(temporary.step, temporary.attempt, temporary.ordinal)
    try:
        target.publish(aside)
    except FileNotFoundError:
        return  # another process renamed it
    if is_of(aside, temporary):
        aside.publish(target)
    else:
        discard(aside, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))


def _make_way(paths: Layout, temporary: Temporary, target: StoragePath) -> None:
    """Moves a folder that already exists at ``target``, so that a durable save can take the name.

    Only one process of a gang may call it, the one that came last to the barrier. Two processes could move each other's
    folders.

    Raises:
        CheckpointTooNew: A newer Gracepoint wrote the folder, which stays.
    """
    if target.is_link():
        logger.warning("%s is saved again: its link %s is deleted, not what it leads to", temporary.what, target)
        target.delete()
        return
    if not target.is_folder() or is_committed(temporary):
        return
    with contextlib.suppress(CheckpointCorrupt):
        manifest_fields(target)
    if (target / layout.MANIFEST).exists() or not paths.item:  # the caller asked for ``replace``
        logger.warning("%s is saved again: %s is replaced", temporary.what, target)
        _replace(paths, temporary, target)
        return
    with contextlib.suppress(FileNotFoundError):  # another process renamed it
        if target.children():
            aside = paths.aside(temporary.step, temporary.attempt, temporary.ordinal)
            logger.warning("%s already exists and is no checkpoint of Gracepoint: moved to %s", target, aside)
            target.publish(aside)
