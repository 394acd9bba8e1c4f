"""From done-records to a committed step: finalize, and clearing up what will never be finished.

**Durable** means that the done-records of all processes of a save exist: no writer is left, and nothing more
has to be learnt from any process. **Committed** means that the folder has its final name, by one atomic
rename. Between the two only small files are added, and everything is written so that it may be done again, by
any number of processes at once, and stopped anywhere:

* files appear whole, by a rename, and have the same meaning whoever writes them;
* the rename to ``<step>`` succeeds for one process; for the others the temporary folder is gone and the
  committed one, with this very attempt and ordinal in its manifest, is there;
* a folder that stands at ``<step>`` already is replaced only by the gang that has just saved that step
  (``replace``) and only once the new one is durable; salvage leaves it, unless it is known to be damaged, or is the
  very one that the save found there and was to replace.
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

# Orbax finds the handler of an item by these names when it is asked for a step without arguments.
_ITEM_HANDLERS = {
    layout.STATE_ITEM: "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler",
    layout.HOST_STATE_ITEM: "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
}


def done_records(folder: StoragePath) -> list[DoneRecord] | None:
    """Returns the done-records of a save, by process, or None while some are missing.

    The commit waits for this, and each takes a network file system a round trip or more. So the first is read alone, as
    it tells how many there are, and the others several at a time. A listing of the folder would not do, as a network
    file system may list names late that can be opened.

    Raises:
        CheckpointCorrupt: One cannot be read.
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
    """True if all processes' parts of the save are on the disk, committed or not.

    Raises:
        CheckpointCorrupt: A done-record cannot be read.
    """
    return done_records(temporary.path) is not None or is_committed(paths, temporary)


def finalize(paths: Layout, temporary: Temporary, *, replace: bool) -> bool:
    """Commits ``temporary`` if it is durable.

    Args:
        paths: Where it lies.
        temporary: The save.
        replace: Whether it takes the place of another folder of its step.

    Returns:
        True if the save is committed, by whichever process. False if done-records are missing, or its step
        has another folder that must not be replaced.

    Raises:
        CheckpointCorrupt: The records contradict each other.
        CheckpointTooNew: A newer Gracepoint wrote the step that is there.
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
        # The folder was renamed under our hands: by one who committed it, or nobody may do so.
        if is_committed(paths, temporary):
            return True
        raise
    except FileExistsError:
        return is_committed(paths, temporary)  # a folder that is not empty is never replaced
    return True


def is_committed(paths: Layout, temporary: Temporary) -> bool:
    """True if what has the final name is this very save."""
    return _is_of(temporary.target, temporary)


def _is_of(folder: StoragePath, temporary: Temporary) -> bool:
    """Returns whether the checkpoint in ``folder`` is what ``temporary`` was to become."""
    try:
        manifest = manifest_fields(folder)
    except (CheckpointCorrupt, CheckpointTooNew):
        return False
    return manifest is not None and (manifest["attempt"], manifest["ordinal"]) == (
        temporary.attempt,
        temporary.ordinal,
    )


def standing(folder: StoragePath) -> str | None:
    """Returns what tells the checkpoint in ``folder`` from all others of ours; empty where it is none that can be read.

    None if nothing is there, or a newer Gracepoint wrote it: it stays.
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
    """Returns the manifest of a committed step, or None if the folder has none.

    Raises:
        CheckpointCorrupt: It cannot be read.
        CheckpointTooNew: This version does not know its format.
    """
    data = manifest_bytes(folder)
    return None if data is None else Manifest.from_bytes(data, str(folder / layout.MANIFEST))


def manifest_fields(folder: StoragePath) -> dict[str, Any] | None:
    """Returns the same as it is written, in a small part of the time where there are many arrays.

    Raises:
        CheckpointCorrupt: It cannot be read.
        CheckpointTooNew: This version does not know its format.
    """
    data = manifest_bytes(folder)
    return None if data is None else Manifest.fields_in(data, str(folder / layout.MANIFEST))


def manifest_bytes(folder: StoragePath) -> bytes | None:
    """Returns the same unread."""
    try:
        return (folder / layout.MANIFEST).read_bytes()
    except FileNotFoundError:
        return None


def give_up_old(paths: Layout, *, attempt: str, older_than_s: float) -> None:
    """Turns saves of other attempts in which nothing has changed for ``older_than_s`` into trash."""
    left, probes = [t for t in paths.temporaries() if t.attempt != attempt], paths.hidden()
    if not left and not probes:
        return
    old_s = paths.root.now_s() - older_than_s
    for probe in probes:
        if probe.last_change_s() < old_s:
            probe.delete_folder() if probe.is_folder() else probe.delete()
    for temporary in left:
        if 0.0 < temporary.path.last_change_s() < old_s and not _is_too_new(temporary):  # 0: was committed, or deleted
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
    """Makes ``folder`` trash, durably, so that no crash leaves half of something that looks whole."""
    with contextlib.suppress(FileNotFoundError):  # another process did
        folder.publish(trash)
    # Otherwise a crash might take the new name back and not what was deleted under it.
    trash.parent.sync()


def empty_trash(paths: Layout) -> None:
    """Deletes all trash, which may take long."""
    for trash in paths.trashed():
        trash.delete_folder()  # another process may be at it too


def _complete(folder: StoragePath, manifest: Manifest, target: StoragePath) -> None:
    """Adds what makes the folder a committed step: our manifest, and Orbax's marks."""
    metadata = {
        "item_handlers": _ITEM_HANDLERS if manifest.item else _ITEM_HANDLERS[layout.STATE_ITEM],
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": manifest.begun_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {},
    }
    if manifest.arrays and manifest.arrays[0].format.ocdbt:
        ocdbt.merge(folder / manifest.item, manifest.process_count)
    (folder / layout.MANIFEST).put(manifest.to_bytes())
    (folder / layout.STEP_METADATA).put(json.dumps(metadata).encode())
    (folder / layout.COMMIT_SUCCESS).put(f"Checkpoint commit was successful to {target}".encode())


def _replace(paths: Layout, temporary: Temporary, target: StoragePath) -> None:
    """Makes trash of what stands at ``target``, unless it is this very save.

    A later attempt that starts meanwhile may commit this save between the look at ``target`` and the rename. So what
    was renamed is looked at again, and gets its name back. A crash in between leaves that to the next salvage, which
    trash would not be.
    """
    aside = paths.aside(temporary.step, temporary.attempt, temporary.ordinal)
    try:
        target.publish(aside)
    except FileNotFoundError:
        return  # another process took it away
    if _is_of(aside, temporary):
        aside.publish(target)
    else:
        discard(aside, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))


def _make_way(paths: Layout, temporary: Temporary, target: StoragePath) -> None:
    """Moves what stands at ``target`` out of the way of a durable save.

    Only the process that came last to its gang's barrier does so: two could move each other's away.

    Raises:
        CheckpointTooNew: A newer Gracepoint wrote it: it stays.
    """
    if not target.is_folder() or is_committed(paths, temporary):
        return
    with contextlib.suppress(CheckpointCorrupt):
        manifest_fields(target)
    if (target / layout.MANIFEST).exists() or not paths.item:  # a path of its own is replaced only when told so
        logger.warning("%s is saved again: %s is replaced", temporary.what, target)
        _replace(paths, temporary, target)
        return
    with contextlib.suppress(FileNotFoundError):  # somebody else took it away
        if target.children():
            aside = paths.aside(temporary.step, temporary.attempt, temporary.ordinal)
            logger.warning("%s is in the way of %s and not ours: moved to %s", target, temporary.what, aside)
            target.publish(aside)
