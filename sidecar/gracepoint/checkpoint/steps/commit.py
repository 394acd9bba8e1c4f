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
import errno
import json
import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

from gracepoint.checkpoint import small_files
from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import DoneRecord, Manifest, merge
from gracepoint.checkpoint.storage.posix import sync_folders, write_durably
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew

logger = logging.getLogger(__name__)

# Orbax finds the handler of an item by these names when it is asked for a step without arguments.
_ITEM_HANDLERS = {
    layout.STATE_ITEM: "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler",
    layout.HOST_STATE_ITEM: "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler",
}


def done_records(folder: Path) -> list[DoneRecord] | None:
    """Returns the done-records of a save, by process, or None while some are missing.

    The commit waits for this, and each takes a network file system a round trip or more. So the first is read alone, as
    it tells how many there are, and the others several at a time. A listing of the folder would not do, as a network
    file system may list names late that can be opened.

    Raises:
        CheckpointCorrupt: One cannot be read.
        CheckpointTooNew: A newer Gracepoint wrote them.
    """
    paths = [folder / layout.done_record(0)]
    only = small_files.read_all(paths)
    if only is None:
        return None
    first = DoneRecord.from_bytes(only[0], str(paths[0]))
    paths += [folder / layout.done_record(process) for process in range(1, first.process_count)]
    found = small_files.read_all(paths[1:])
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
        os.rename(temporary.path, target)
        sync_folders([paths.root])
    except FileNotFoundError:
        # The folder was renamed under our hands: by one who committed it, or nobody may do so.
        if is_committed(paths, temporary):
            return True
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return is_committed(paths, temporary)  # a folder that is not empty is never renamed over
        raise
    return True


def is_committed(paths: Layout, temporary: Temporary) -> bool:
    """True if what has the final name is this very save."""
    try:
        manifest = manifest_fields(temporary.target)
    except (CheckpointCorrupt, CheckpointTooNew):
        return False
    return manifest is not None and (manifest["attempt"], manifest["ordinal"]) == (
        temporary.attempt,
        temporary.ordinal,
    )


def standing(folder: Path) -> str | None:
    """Returns what tells the checkpoint in ``folder`` from all others of ours; empty where it is none that can be read.

    None if nothing is there, or a newer Gracepoint wrote it: it stays.
    """
    if not folder.is_dir():
        return None
    try:
        manifest = manifest_fields(folder)
    except CheckpointTooNew:
        return None
    except CheckpointCorrupt:
        return ""
    return "" if manifest is None else f"{manifest['attempt']}.{manifest['ordinal']}"


def read_manifest(folder: Path) -> Manifest | None:
    """Returns the manifest of a committed step, or None if the folder has none.

    Raises:
        CheckpointCorrupt: It cannot be read.
        CheckpointTooNew: This version does not know its format.
    """
    data = manifest_bytes(folder)
    return None if data is None else Manifest.from_bytes(data, str(folder / layout.MANIFEST))


def manifest_fields(folder: Path) -> dict[str, Any] | None:
    """Returns the same as it is written, in a small part of the time where there are many arrays.

    Raises:
        CheckpointCorrupt: It cannot be read.
        CheckpointTooNew: This version does not know its format.
    """
    data = manifest_bytes(folder)
    return None if data is None else Manifest.fields_in(data, str(folder / layout.MANIFEST))


def manifest_bytes(folder: Path) -> bytes | None:
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
    old_s = file_system_now_s(paths) - older_than_s
    for probe in probes:
        if last_change_s(probe) < old_s:
            shutil.rmtree(probe, ignore_errors=True) if probe.is_dir() else probe.unlink(missing_ok=True)
    for temporary in left:
        if 0.0 < last_change_s(temporary.path) < old_s and not _is_too_new(temporary):  # 0: was committed, or deleted
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


def discard(folder: Path, trash: Path) -> None:
    """Makes ``folder`` trash, durably, so that no crash leaves half of something that looks whole."""
    with contextlib.suppress(FileNotFoundError):  # another process did
        os.rename(folder, trash)
    # Otherwise a crash might take the new name back and not what was deleted under it.
    sync_folders([trash.parent])


def empty_trash(paths: Layout) -> None:
    """Deletes all trash, which may take long."""
    for trash in paths.trashed():
        shutil.rmtree(trash, ignore_errors=True)  # another process may be at it too


def last_change_s(folder: Path) -> float:
    """Returns when ``folder`` or anything in it changed last, by the file system's clock; 0 if it is gone."""
    try:
        newest = folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0
    for directory, _, names in os.walk(folder):
        for path in [directory, *(os.path.join(directory, name) for name in names)]:
            try:
                newest = max(newest, os.lstat(path).st_mtime)
            except FileNotFoundError:
                continue  # renamed or deleted: its folder's time tells
    return newest


def file_system_now_s(paths: Layout) -> float:
    """Returns the time by the clock that dates the files there: a file server's may differ from ours."""
    probe = paths.clock_probe()
    try:
        probe.write_bytes(b"")
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _complete(folder: Path, manifest: Manifest, target: Path) -> None:
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
    write_durably(folder / layout.MANIFEST, manifest.to_bytes())
    write_durably(folder / layout.STEP_METADATA, json.dumps(metadata).encode())
    write_durably(folder / layout.COMMIT_SUCCESS, f"Checkpoint commit was successful to {target}".encode())


def _make_way(paths: Layout, temporary: Temporary, target: Path) -> None:
    """Moves what stands at ``target`` out of the way of a durable save.

    Only the process that came last to its gang's barrier does so: two could move each other's away.

    Raises:
        CheckpointTooNew: A newer Gracepoint wrote it: it stays.
    """
    if not target.is_dir() or is_committed(paths, temporary):
        return
    with contextlib.suppress(CheckpointCorrupt):
        manifest_fields(target)
    if (target / layout.MANIFEST).exists() or not paths.item:  # a path of its own is replaced only when told so
        logger.warning("%s is saved again: %s is replaced", temporary.what, target)
        discard(target, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))
        return
    with contextlib.suppress(FileNotFoundError):  # somebody else took it away
        if any(target.iterdir()):
            aside = paths.aside(temporary.step, temporary.attempt, temporary.ordinal)
            logger.warning("%s is in the way of %s and not ours: moved to %s", target, temporary.what, aside)
            os.rename(target, aside)
