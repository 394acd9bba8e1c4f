"""Recovery at a start: commits durable saves of processes that died, and undoes replacements that were interrupted.

Any number of processes may do so at the same time, and may stop anywhere. ``commit`` explains why this is safe.

If a save has many files, additional threads look at their sizes. They end before the call returns.

Lets process 0 do for all processes what only one should do, such as listing a directory or taking its lease.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout, Temporary, is_whole
from gracepoint.checkpoint.format.manifest import DoneRecord, StoredFile, merge
from gracepoint.checkpoint.steps import commit, manifest_commit
from gracepoint.checkpoint.steps.object_deletion import look_at
from gracepoint.checkpoint.steps.records import all_files, done_records, manifest_bytes, standing
from gracepoint.checkpoint.storage.checks import check_size, must_not_write
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointError, CheckpointTooNew, SaveFailed, from_word, to_word
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

# The calling thread alone looks at the first files, up to this number.
_FEW_FILES = 256
# This number of threads looks at the others, in batches of this size. The threads mostly wait for the storage.
_THREADS = 32
_FILES_AT_ONCE = 4096


def salvage(paths: Layout, *, holds_lease: bool = False) -> list[str]:
    """Commits every durable save that is not committed. Returns remarks on the saves that it did not commit.

    First, a folder that a process had moved away when it died gets its name back. A save is committed only in three
    cases: its step has no folder, the folder is damaged, or the folder is the one that the save was to replace. Saves
    with missing done-records are left as they are. If this process may only read the directory, it leaves all saves.

    ``holds_lease`` says that this process has written to the directory. Then a refused write is an error and not a
    remark: the write may succeed a minute later, and a start without the save would lose the save.
    """
    remarks: list[str] = []
    for aside in paths.set_aside() if paths.root.backend.renames else ():
        with _remarking(aside.path, remarks, holds_lease):
            _put_back(aside)
    durable = []
    looked = look_at(paths.root, paths.temporaries(), functools.partial(_look, paths, holds_lease))
    for temporary, (records, is_committed, of_it) in looked.items():
        remarks += of_it
        if records is not None and not is_committed:
            durable.append((temporary, records))
    # If several starts saved the same step, the last save counts, so it comes first. The others were to replace the
    # checkpoint that it replaces. When that one is gone, they are left as they are.
    for temporary, records in sorted(durable, key=lambda found: found[1][0].begun_ns, reverse=True):
        with _remarking(temporary.path, remarks, holds_lease):
            if _finish(paths, temporary, records):
                logger.warning("salvaged %s: %s was complete, not committed", temporary.what, temporary.path)
            else:
                remarks.append(f"{temporary.path} is left, as there is a folder for {temporary.what} already")
    return remarks


def _look(
    paths: Layout, holds_lease: bool, temporary: Temporary
) -> tuple[Sequence[DoneRecord] | None, bool, list[str]]:
    """Returns the done-records of a save if it is durable, whether it is committed, and remarks on it."""
    records, is_committed, remarks = None, False, list[str]()
    with _remarking(temporary.path, remarks, holds_lease):
        records = done_records(temporary.path)
        if records is None:
            remarks.append(f"{temporary.path} is incomplete: not all processes finished writing")
        elif not paths.root.backend.renames:
            # A committed save keeps its folder until ``empty_trash`` deletes it.
            is_committed = commit.is_committed(temporary)
    return records, is_committed, remarks


def _rename(paths: Layout, temporary: Temporary, records: Sequence[DoneRecord]) -> bool:
    """Commits a durable save by a rename. Returns whether it is committed."""
    try:
        _check_sizes(temporary.path, all_files(temporary.path, merge(records)))
    except CheckpointCorrupt:
        # Another process may have committed the save meanwhile. Then its files are no longer in this folder.
        if commit.is_committed(temporary):
            return True
        raise
    return commit.finalize(paths, temporary, replace=False) or _take_its_place(paths, temporary, records[0].replaces)


def finish(paths: Layout, temporary: Temporary) -> bool:
    """Commits one save if it is durable in all processes, as ``salvage`` does for all. Returns whether it is committed.

    Raises:
        CheckpointCorrupt, CheckpointTooNew, SaveFailed, OSError: It is durable, and cannot be committed.
    """
    try:
        records = done_records(temporary.path)
        return commit.is_committed(temporary) if records is None else _finish(paths, temporary, records)
    except FileNotFoundError:  # another process has just committed it, or deleted it
        return commit.is_committed(temporary)


def _finish(paths: Layout, temporary: Temporary, records: Sequence[DoneRecord]) -> bool:
    """Commits a durable save. Returns whether it is committed."""
    if paths.root.backend.renames:
        return _rename(paths, temporary, records)
    way = functools.partial(_gives_way, temporary.target, records[0].replaces)
    return manifest_commit.finalize(temporary, way)


def _check_sizes(folder: StoragePath, files: Iterator[tuple[str, StoredFile]]) -> None:
    """Raises CheckpointCorrupt if a file is missing or has another size. Several threads look at many files."""

    def check(found: tuple[str, StoredFile]) -> None:
        path, file = found
        check_size(folder / path, file.bytes)

    for found in itertools.islice(files, _FEW_FILES):
        check(found)
    with contextlib.ExitStack() as until_checked:
        threads: ThreadPoolExecutor | None = None
        while batch := list(itertools.islice(files, _FILES_AT_ONCE)):
            if threads is None:
                threads = until_checked.enter_context(ThreadPoolExecutor(_THREADS, "gracepoint-salvage"))
            list(threads.map(check, batch))


@contextlib.contextmanager
def _remarking(folder: StoragePath, remarks: list[str], holds_lease: bool) -> Iterator[None]:
    """Turns an error of one save into a remark, so that the other saves are still salvaged."""
    try:
        yield
    except (CheckpointCorrupt, CheckpointTooNew, SaveFailed) as error:
        remarks.append(f"{folder} is not salvaged: {error}")
    except FileNotFoundError:
        # Another process committed or deleted it meanwhile.
        logger.info("%s went away while it was looked at", folder)
    except OSError as error:
        if holds_lease or not must_not_write(error):
            raise
        remarks.append(f"{folder} is not salvaged: {error}")


def is_damaged(folder: StoragePath) -> bool:
    """Returns whether the checkpoint in ``folder`` is known to be damaged.

    It is damaged if its manifest is, or if a restore has marked it. A checkpoint that another version wrote, and that
    this version cannot read, is not damaged.
    """
    manifest = manifest_bytes(folder)
    return (manifest is not None and not is_whole(manifest)) or (folder / layout.DAMAGE_MARK).is_value()


def _gives_way(folder: StoragePath, replaces: str | None) -> bool:
    """Returns whether a durable save may take the place of ``folder``.

    ``replaces`` identifies the checkpoint that the save was to replace (``records.standing``). None: there is none.
    """
    return is_damaged(folder) or (replaces is not None and standing(folder) == replaces)


def _take_its_place(paths: Layout, temporary: Temporary, replaces: str | None) -> bool:
    """Commits a durable save in place of a folder that is damaged, or that the save was to replace.

    Returns False if the existing folder is neither, or if another process has replaced it.

    Another process may do the same at the same time. So the folder is moved away first and checked again. If it is no
    longer the folder to replace, it is put back. Otherwise it becomes trash if Gracepoint wrote it. A folder that
    Gracepoint did not write stays under its new name. If this process dies in between, the next salvage finishes the
    work.
    """
    if not _gives_way(temporary.target, replaces):
        return False
    aside = dataclasses.replace(temporary, path=paths.aside(temporary.step, temporary.attempt, temporary.ordinal))
    temporary.target.publish(aside.path)
    if not _gives_way(aside.path, replaces):
        _put_back(aside)
        return commit.is_committed(temporary)
    logger.warning("%s is damaged or was to be replaced, and gives way to %s", temporary.target, temporary.path)
    if (aside.path / layout.MANIFEST).exists():
        commit.discard(aside.path, paths.trash(temporary.step, temporary.attempt, temporary.ordinal))
    return commit.finalize(paths, temporary, replace=False)


def _put_back(aside: Temporary) -> None:
    """Moves a folder back to its name, if Gracepoint wrote the folder, it is not damaged, and the name is free."""
    if not (aside.path / layout.MANIFEST).exists() or is_damaged(aside.path):
        return
    try:
        aside.path.publish(aside.target)
    except FileNotFoundError:
        return  # another process did it
    except FileExistsError:
        logger.warning("%s stays where it is, as there is a folder %s", aside.path, aside.target)
        return
    aside.target.parent.sync()
    logger.warning("%s is %s again", aside.path, aside.target)


def by_process_zero(act: Callable[[], str], *, gang: ProcessGroup, key: str, deadline: Deadline) -> str:
    """Calls ``act`` in process 0, and returns its text in all processes. Collective.

    Args:
        act: Called in process 0 only.
        gang: The processes that call this together.
        key: Key of the broadcast.
        deadline: When the other processes stop waiting for process 0.

    Raises:
        CheckpointError: ``act`` raised an error. Process 0 raises that error itself. The other processes raise an error
            of the same class, with the same message. If it is no ``CheckpointError``, they raise a ``CheckpointError``.
        BarrierError: Process 0 did not answer in time.
    """
    if gang.process_index != 0:
        kind, text = json.loads(gang.broadcast(key, None, timeout_s=deadline.remaining_s()))
        if kind is not None:
            raise from_word(kind)(text)
        return str(text)
    try:
        text = act()
    except Exception as error:
        # Before it is raised here: the other processes wait for this key, until their deadline.
        gang.broadcast(key, json.dumps(_told(error)), timeout_s=deadline.remaining_s())
        raise
    gang.broadcast(key, json.dumps([None, text]), timeout_s=deadline.remaining_s())
    return text


def _told(error: Exception) -> list[str]:
    if isinstance(error, CheckpointError):
        return [to_word(error), str(error)]
    return [to_word(CheckpointError()), f"process 0: {type(error).__name__}: {error}"]
