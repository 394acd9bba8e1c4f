"""Commits durable saves, and discards saves that will never be finished.

A save is **durable** when the done-records of all its processes exist. Then no process writes any more, and no process
is needed to finish the save. A save is **committed** when its folder has its final name, which one atomic rename gives.
Between the two states only small files are added. Any number of processes may run the commit at the same time, may stop
anywhere, and may repeat it:

* A file appears as a whole, by a rename. Its meaning does not depend on which process wrote it.
* The rename to ``<step>`` succeeds in one process. The other processes find that the temporary folder is gone, and that
  the committed folder has the same attempt and ordinal in its manifest.
* If a folder already exists at ``<step>``, only the gang that has just saved that step replaces it (``replace``), and
  only once the new save is durable. Salvage leaves an existing folder, with two exceptions: the folder is known to be
  damaged, or it is the one that the save found there and was to replace.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import Any

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import DoneRecord, Manifest, merge
from gracepoint.checkpoint.storage import read_many
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew

logger = logging.getLogger(__name__)

# If a step is restored without arguments, Orbax finds the handler of each item by these names.
_STATE_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_HOST_STATE_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"


def done_records(folder: StoragePath) -> list[DoneRecord] | None:
    """Returns the done-records of a save, by process. None if some are missing.

    The commit waits for this call, and a network file system needs at least one round trip for each record. The first
    record is read alone, because it holds the number of records. The others are read several at a time. The folder is
    not listed, because a network file system may list a file later than it can be opened.

    Raises:
        CheckpointCorrupt: A done-record cannot be read.
        CheckpointTooNew: A newer Gracepoint wrote them.
    """
    paths = [folder / layout.done_record(0)]
    only = read_many.read_all(paths)
    if only is None:
        return None
    first = DoneRecord.from_bytes(only[0], str(paths[0]))
    paths += [folder / layout.done_record(process) for process in range(1, first.process_count)]
    found = read_many.read_all(paths[1:])
    if found is None:
        return None
    return [first, *(DoneRecord.from_bytes(data, str(path)) for path, data in zip(paths[1:], found, strict=True))]


def is_durable(paths: Layout, temporary: Temporary) -> bool:
    """Returns whether the parts of all processes are on disk, committed or not.

    Raises:
        CheckpointCorrupt: A done-record cannot be read.
    """
    return done_records(temporary.path) is not None or is_committed(paths, temporary)


def finalize(paths: Layout, temporary: Temporary, *, replace: bool) -> bool:
    """Commits ``temporary`` if it is durable.

    Args:
        paths: Layout of the directory that holds the save.
        temporary: The save.
        replace: Whether the save replaces another folder that exists for its step.

    Returns:
        True if the save is committed, by this or by another process. False if done-records are missing, or if its step
        has another folder that must not be replaced.

    Raises:
        CheckpointCorrupt: The done-records contradict each other.
        CheckpointTooNew: A newer Gracepoint wrote the existing step.
    """
    target = temporary.target
    try:
        records = done_records(temporary.path)
        if records is None:
            return is_committed(paths, temporary)
        _complete(temporary.path, merge(records), target)
        if replace:
            _make_way(paths, temporary, target)
        temporary.path.publish(target)
        paths.root.sync()
    except FileNotFoundError:
        # The folder was renamed meanwhile. Only a process that commits the save may do that.
        if is_committed(paths, temporary):
            return True
        raise
    except FileExistsError:
        return is_committed(paths, temporary)  # a folder that is not empty is never replaced
    return True


def is_committed(paths: Layout, temporary: Temporary) -> bool:
    """Returns whether the folder with the final name is this save."""
    return _is_of(temporary.target, temporary)


def _is_of(folder: StoragePath, temporary: Temporary) -> bool:
    """Returns whether the checkpoint in ``folder`` has the attempt and ordinal of ``temporary``."""
    try:
        manifest = manifest_fields(folder)
    except (CheckpointCorrupt, CheckpointTooNew):
        return False
    return manifest is not None and (manifest["attempt"], manifest["ordinal"]) == (
        temporary.attempt,
        temporary.ordinal,
    )


def standing(folder: StoragePath) -> str | None:
    """Returns an identifier of the checkpoint in ``folder``, unique among Gracepoint's checkpoints.

    Empty if the folder has no manifest, or a damaged one. None if there is no folder, or if a newer Gracepoint wrote
    it; such a folder is not replaced.
    """
    if not folder.is_folder():
        return None
    try:
        manifest = manifest_fields(folder)
    except CheckpointTooNew:
        return None
    except CheckpointCorrupt:
        return ""
    return "" if manifest is None else f"{manifest['attempt']}.{manifest['ordinal']}"


def read_manifest(folder: StoragePath) -> Manifest | None:
    """Returns the manifest of a committed step. None if the folder has no manifest.

    Raises:
        CheckpointCorrupt: The manifest cannot be read.
        CheckpointTooNew: This version does not know the format of the manifest.
    """
    data = manifest_bytes(folder)
    return None if data is None else Manifest.from_bytes(data, str(folder / layout.MANIFEST))


def manifest_fields(folder: StoragePath) -> dict[str, Any] | None:
    """Returns the fields of the manifest as JSON values. None if the folder has no manifest.

    This is much faster than ``read_manifest`` if there are many arrays.

    Raises:
        CheckpointCorrupt: The manifest cannot be read.
        CheckpointTooNew: This version does not know the format of the manifest.
    """
    data = manifest_bytes(folder)
    return None if data is None else Manifest.fields_in(data, str(folder / layout.MANIFEST))


def manifest_bytes(folder: StoragePath) -> bytes | None:
    """Returns the contents of the manifest file. None if the folder has no manifest."""
    try:
        return (folder / layout.MANIFEST).read_bytes()
    except FileNotFoundError:
        return None


def give_up_old(paths: Layout, *, attempt: str, older_than_s: float) -> None:
    """Renames unfinished saves of other attempts to trash, if they have not changed for ``older_than_s`` seconds.

    Also deletes hidden files of that age.
    """
    left, probes = [t for t in paths.temporaries() if t.attempt != attempt], paths.hidden()
    if not left and not probes:
        return
    old_s = paths.root.now_s() - older_than_s
    for probe in probes:
        if probe.last_change_s() < old_s:
            probe.delete_folder() if probe.is_folder() else probe.delete()
    for temporary in left:
        if 0.0 < temporary.path.last_change_s() < old_s and not _is_too_new(temporary):  # 0: committed or deleted
            logger.warning("giving %s up: unfinished for more than %.0f s", temporary.path, older_than_s)
            discard(temporary.path, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))


def _is_too_new(temporary: Temporary) -> bool:
    try:
        done_records(temporary.path)
    except CheckpointTooNew:
        return True
    except CheckpointCorrupt:
        pass
    return False


def discard(folder: StoragePath, trash: StoragePath) -> None:
    """Renames ``folder`` to ``trash``, durably, so that a crash never leaves a partly deleted checkpoint."""
    with contextlib.suppress(FileNotFoundError):  # another process renamed it
        folder.publish(trash)
    # Without the sync, a crash might undo the rename but not the deletion of files below the new name.
    trash.parent.sync()


def empty_trash(paths: Layout) -> None:
    """Deletes all trash. This may take long."""
    for trash in paths.trashed():
        trash.delete_folder()  # another process may delete it at the same time


def _complete(folder: StoragePath, manifest: Manifest, target: StoragePath) -> None:
    """Adds the files that a committed step has: Gracepoint's manifest, and Orbax's marker files."""
    more: dict[str, Any] = {"item_handlers": {}, "custom_metadata": {}}
    if layout.MORE_METADATA in manifest.files:
        more = json.loads((folder / layout.MORE_METADATA).read_bytes())
    handlers = {manifest.item: _STATE_HANDLER, layout.HOST_STATE_ITEM: _HOST_STATE_HANDLER, **more["item_handlers"]}
    metadata = {
        "item_handlers": handlers if manifest.item else _STATE_HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": manifest.begun_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": more["custom_metadata"],
    }
    if manifest.arrays and manifest.arrays[0].format.ocdbt:
        ocdbt.merge(folder / manifest.item, manifest.process_count)
    (folder / layout.MANIFEST).put(manifest.to_bytes())
    (folder / layout.STEP_METADATA).put(json.dumps(metadata).encode())
    (folder / layout.COMMIT_SUCCESS).put(f"Checkpoint commit was successful to {target}".encode())


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
    if _is_of(aside, temporary):
        aside.publish(target)
    else:
        discard(aside, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))


def _make_way(paths: Layout, temporary: Temporary, target: StoragePath) -> None:
    """Moves a folder that already exists at ``target``, so that a durable save can take the name.

    Only the process that came last to its gang's barrier does so. Two processes could move each other's folders.

    Raises:
        CheckpointTooNew: A newer Gracepoint wrote the folder, which stays.
    """
    if not target.is_folder() or is_committed(paths, temporary):
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
