"""Commits durable saves, also those of processes that died, deletes steps, and gives up saves that never end.

A save is **durable** when the done-records of all its processes exist. From then on no process writes values to it, and
any process can finish it. A save is **committed** when a restore may choose it. Any number of processes may run the
commit at the same time, may stop anywhere, and may repeat it.

``Commit`` says what a way to commit promises. There are three, and ``of`` chooses by the store: ``RenameCommit`` here,
``ManifestCommit`` for stores that cannot rename (``gs://``, ``s3://``; see ``manifest_commit``), and ``SnapshotCommit``
for the memory of snapshot servers (``snapshot_steps``). Whoever calls them need not know which one it is. The functions
at the end do what is the same in all.

Where folders can be renamed, a save is committed when its folder has its final name, which one atomic rename gives.
Between durable and committed only small files are added:

* A file appears as a whole, by a rename. Its meaning does not depend on which process wrote it.
* The rename to ``<step>`` succeeds in one process. The other processes find that the temporary folder is gone, and that
  the committed folder has the same attempt and ordinal in its manifest.
* If a folder already exists at ``<step>``, only the gang that has just saved that step replaces it (``replace``), and
  only once the new save is durable. Salvage leaves an existing folder, with two exceptions: the folder is known to be
  damaged, or it is the one that the save found there and was to replace.

**Recovery** at a start (``salvage``) commits durable saves of processes that died, and undoes replacements that were
interrupted. Any number of processes may do so at the same time. But mostly one process is enough: ``by_process_zero``
lets process 0 do for all what only one should do, such as recovery, listing a directory or taking its lease.

If a save that is finished at a start has many files, additional threads look at their sizes. They end before the call
returns.
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
from contextlib import AbstractContextManager
from typing import Protocol

from gracepoint.checkpoint.format import layout, ocdbt, records
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import DoneRecord, Manifest, StoredFile, Writing, done_records, merge
from gracepoint.checkpoint.steps.manifest_commit import ManifestCommit
from gracepoint.checkpoint.steps.snapshot_steps import SnapshotCommit
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.checks import check_size, must_not_write
from gracepoint.checkpoint.storage.snapshot_path import SnapshotPath
from gracepoint.checkpoint.storage.storage_path import StoragePath, look_at
from gracepoint.deadline import Deadline
from gracepoint.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointRefused,
    CheckpointTooNew,
    SaveFailed,
    from_word,
    to_word,
)
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

# The calling thread alone looks at the first files, up to this number.
_FEW_FILES = 256
# This number of threads looks at the others, in batches of this size. The threads mostly wait for the storage.
_THREADS = 32
_FILES_AT_ONCE = 4096


class Commit(Protocol):
    """How saves become steps of one directory, and how steps are deleted.

    Attributes:
        quiet_s: Seconds without a change after which the writer of a save counts as dead.
        takes_parts: Whether the manifest of a save may be in parts.
    """

    @property
    def quiet_s(self) -> float: ...

    @property
    def takes_parts(self) -> bool: ...

    # One save.

    def writing(self, temporary: Temporary, begun_ns: int, *, process_index: int) -> AbstractContextManager[Writing]:
        """Begins this process's part of a save. ``begun_ns`` is when the save began, by this process's clock.

        Raises:
            SaveFailed: The step has objects that Gracepoint did not write.
        """

    def record(self, temporary: Temporary, done_record: DoneRecord, go_on: Callable[[], None]) -> None:
        """Makes the done-record of a process durable. ``go_on``: as in ``finalize``."""

    def finalize(self, temporary: Temporary, *, replace: bool, go_on: Callable[[], None] | None = None) -> bool:
        """Commits a save if it is durable.

        Args:
            temporary: The save.
            replace: Whether the save replaces another one that is committed for its step.
            go_on: Called again and again in stores that cannot rename. An error that it raises ends the commit. None:
                there is a timeout for each request.

        Returns:
            True if the save is committed, by this or by another process. False if done-records are missing, or if its
            step has another checkpoint that must not be replaced.

        Raises:
            CheckpointCorrupt: The done-records contradict each other. In a store that cannot rename, also: an object is
                no longer the one that this save wrote.
            CheckpointTooNew: A newer Gracepoint wrote the existing step.
            CheckpointRefused: A file has the name that the folder is to get.
            SaveFailed: In a store that cannot rename: the step has objects that Gracepoint did not write, or a later
                save has claimed it.
        """

    def finish(self, temporary: Temporary, all_done: Sequence[DoneRecord]) -> bool:
        """Commits a durable save whose processes may have died. Returns whether it is committed.

        It takes the place of another checkpoint only if that one is damaged, or is the one that it was to replace.

        Args:
            temporary: The save.
            all_done: All its done-records.

        Raises:
            CheckpointCorrupt: A file of the save is missing or has another size.
        """

    def is_committed(self, temporary: Temporary) -> bool:
        """Returns whether the step is this save."""

    def is_left_by_commit(self, temporary: Temporary) -> bool:
        """Returns whether the folder of a durable save is only what its commit has left."""

    def last_change_s(self, temporary: Temporary) -> float:
        """Returns when something of an unfinished save last changed, by the store's clock. 0 if there is nothing."""

    def give_up(self, temporary: Temporary) -> None:
        """Has an unfinished save of another attempt deleted by ``empty_trash``. No process can commit it any more."""

    def delete_failed(self, temporary: Temporary, *, deletes: bool) -> None:
        """Deletes what a save that failed has written. ``deletes``: see ``give_up_failed``."""

    # One step.

    def is_unfinished(self, folder: StoragePath) -> bool:
        """Returns whether the folder of a step is being written or deleted, or was left so."""

    def standing(self, folder: StoragePath) -> str | None:
        """Returns an identifier of the checkpoint in ``folder``, unique among Gracepoint's checkpoints.

        Empty if there is a checkpoint without a manifest, or with a damaged one. None if there is none, or if a newer
        Gracepoint wrote it; such a checkpoint is not replaced.
        """

    def discard(self, folder: StoragePath, trash: StoragePath, *, only: str | None = None) -> None:
        """Makes a step trash, durably, so that a crash never leaves a partly deleted checkpoint.

        ``only`` is the checkpoint to discard, as ``standing`` returns it. None: whichever is there. In a store that
        cannot rename, nothing happens if another one has taken its place.
        """

    # The directory.

    def seen(self) -> Layout | None:
        """Returns the layout to list the directory with. None if there is no directory."""

    def is_settled(self, listed: Layout) -> bool:
        """Returns whether a layout from ``seen`` shows that nothing is being saved or was left unfinished."""

    def interrupted(self) -> Iterator[tuple[StoragePath, Callable[[], None]]]:
        """Yields the folders that a replacement had moved away when its process died, each with what puts it back."""

    def find_condemned(self, *, after_crash: bool) -> None:
        """Has ``empty_trash`` delete steps whose deletion was interrupted before the trash named them.

        ``after_crash``: other remains show that a process has died. Otherwise only trash does.
        """

    def empty_trash(self) -> None:
        """Deletes all trash. This may take long."""


def of(paths: Layout) -> Commit:
    """Returns how saves of a directory are committed."""
    if isinstance(paths.root, SnapshotPath):
        return SnapshotCommit(paths, paths.root)
    return RenameCommit(paths) if paths.root.renames else ManifestCommit(paths)


class RenameCommit:
    """Commits by one atomic rename of the folder of a save, in file systems and in memory."""

    quiet_s = 5.0
    takes_parts = True

    def __init__(self, paths: Layout) -> None:
        self._paths = paths

    @contextlib.contextmanager
    def writing(self, temporary: Temporary, begun_ns: int, *, process_index: int) -> Iterator[Writing]:
        temporary.path.make_folder_durably()
        with temporary.path.staying() as stayed:
            yield Writing(temporary.path, stayed, begun_ns, {})

    def record(self, temporary: Temporary, done_record: DoneRecord, go_on: Callable[[], None]) -> None:
        (temporary.path / layout.done_record(done_record.process_index)).put(done_record.to_bytes())

    def finalize(self, temporary: Temporary, *, replace: bool, go_on: Callable[[], None] | None = None) -> bool:
        target = temporary.target
        try:
            committed = done_records(temporary.path)
            if committed is None:
                return self.is_committed(temporary)
            _check_no_file(temporary, target)
            _complete(temporary.path, merge(committed), target)
            if replace:
                self._make_way(temporary, target)
            temporary.path.publish(target)  # last: what the folder holds must be durable when it has its final name
            self._paths.root.sync()
        except FileNotFoundError:
            # The folder was renamed meanwhile. Only a process that commits the save may do that.
            if self.is_committed(temporary):
                return True
            raise
        except FileExistsError:
            return self.is_committed(temporary)  # a folder that is not empty is never replaced
        return True

    def finish(self, temporary: Temporary, all_done: Sequence[DoneRecord]) -> bool:
        try:
            _check_sizes(temporary.path, records.all_files(temporary.path, merge(all_done)))
        except CheckpointCorrupt:
            # Another process may have committed the save meanwhile. Then its files are no longer in this folder.
            if self.is_committed(temporary):
                return True
            raise
        return self.finalize(temporary, replace=False) or self._take_its_place(temporary, all_done[0].replaces)

    def is_committed(self, temporary: Temporary) -> bool:
        return records.is_of(temporary.target, temporary)

    def is_left_by_commit(self, temporary: Temporary) -> bool:
        return False  # the commit renames it

    def last_change_s(self, temporary: Temporary) -> float:
        return temporary.path.last_change_s()

    def give_up(self, temporary: Temporary) -> None:
        self.discard(temporary.path, self._trash(temporary))

    def delete_failed(self, temporary: Temporary, *, deletes: bool) -> None:
        trash = self._trash(temporary)
        try:
            self.discard(temporary.path, trash)
        except FileExistsError:  # what was written after it became trash
            undeleted.delete_folder(temporary.path)
        if deletes:
            undeleted.delete_folder(trash)

    def is_unfinished(self, folder: StoragePath) -> bool:
        return False  # a save gets the name of its step when it is finished

    def standing(self, folder: StoragePath) -> str | None:
        return records.standing(folder, without_manifest="") if folder.is_folder() else None

    def discard(self, folder: StoragePath, trash: StoragePath, *, only: str | None = None) -> None:
        """Does as ``Commit.discard``, whichever checkpoint is there."""
        with contextlib.suppress(FileNotFoundError):  # another process renamed it
            folder.publish(trash)
        # Without the sync, a crash might undo the rename but not the deletion of files below the new name.
        trash.parent.sync()

    def seen(self) -> Layout | None:
        # It is listed each time, as a folder that is renamed during a listing may be missing in it under both names.
        return self._paths if self._paths.root.is_folder() else None

    def is_settled(self, listed: Layout) -> bool:
        return False  # for the same reason

    def interrupted(self) -> Iterator[tuple[StoragePath, Callable[[], None]]]:
        for aside in self._paths.set_aside():
            yield aside.path, functools.partial(_put_back, aside)

    def find_condemned(self, *, after_crash: bool) -> None:
        """Does nothing, as a rename makes a step trash."""

    def empty_trash(self) -> None:
        for trash in self._paths.trashed():
            undeleted.delete_folder(trash)  # another process may delete it at the same time

    def _trash(self, temporary: Temporary) -> StoragePath:
        return self._paths.trash(temporary.step, temporary.attempt, temporary.ordinal)

    def _aside(self, temporary: Temporary) -> StoragePath:
        return self._paths.aside(temporary.step, temporary.attempt, temporary.ordinal)

    def _make_way(self, temporary: Temporary, target: StoragePath) -> None:
        """Moves a folder that already exists at ``target``, so that a durable save can take the name.

        Only one process of a gang may call it, the one that came last to the barrier. Two processes could move each
        other's folders.

        Raises:
            CheckpointTooNew: A newer Gracepoint wrote the folder, which stays.
        """
        if target.is_link():
            logger.warning("%s is saved again: its link %s is deleted, not what it leads to", temporary.what, target)
            target.delete()
            return
        if not target.is_folder() or self.is_committed(temporary):
            return
        with contextlib.suppress(CheckpointCorrupt):
            records.manifest_fields(target)
        if (target / layout.MANIFEST).exists() or not self._paths.item:  # the caller asked for ``replace``
            logger.warning("%s is saved again: %s is replaced", temporary.what, target)
            self._replace(temporary, target)
            return
        with contextlib.suppress(FileNotFoundError):  # another process renamed it
            if target.children():
                aside = self._aside(temporary)
                logger.warning("%s already exists and is no checkpoint of Gracepoint: moved to %s", target, aside)
                target.publish(aside)

    def _replace(self, temporary: Temporary, target: StoragePath) -> None:
        """Renames the folder at ``target`` to trash, unless it is this save.

        A later attempt may commit this save between the check of ``target`` and the rename. So the folder is first
        renamed to a separate name and checked again. If it is this save, it gets its name back. If a crash happens in
        between, the next salvage gives the name back, which it would not do for trash.
        """
        aside = self._aside(temporary)
        try:
            target.publish(aside)
        except FileNotFoundError:
            return  # another process renamed it
        if records.is_of(aside, temporary):
            aside.publish(target)
        else:
            self.discard(aside, self._trash(temporary))

    def _take_its_place(self, temporary: Temporary, replaces: str | None) -> bool:
        """Commits a durable save in place of a folder that is damaged, or that the save was to replace.

        Returns False if the existing folder is neither, or if another process has replaced it.

        Another process may do the same at the same time. So the folder is moved away first and checked again. If it is
        no longer the folder to replace, it is put back. Otherwise it becomes trash if Gracepoint wrote it. A folder
        that Gracepoint did not write stays under its new name. If this process dies in between, the next salvage
        finishes the work.
        """
        if not records.gives_way(temporary.target, replaces, self.standing):
            return False
        aside = dataclasses.replace(temporary, path=self._aside(temporary))
        temporary.target.publish(aside.path)
        if not records.gives_way(aside.path, replaces, self.standing):
            _put_back(aside)
            return self.is_committed(temporary)
        logger.warning("%s is damaged or was to be replaced, and gives way to %s", temporary.target, temporary.path)
        if (aside.path / layout.MANIFEST).exists():
            self.discard(aside.path, self._trash(temporary))
        return self.finalize(temporary, replace=False)


def _check_no_file(temporary: Temporary, target: StoragePath) -> None:
    """Raises CheckpointRefused if a file has the name of the checkpoint. It is somebody else's, and is not deleted."""
    if target.is_value() and not target.is_link():
        raise CheckpointRefused(
            f"{target} is a file, and {temporary.what} is to be a folder of that name. All of it is in "
            f"{temporary.path}, and the next start commits it: move the file away"
        )


def _complete(folder: StoragePath, manifest: Manifest, target: StoragePath) -> None:
    """Adds the files that a committed step has: Gracepoint's manifest, and Orbax's marker files."""
    if manifest.arrays and manifest.arrays[0].format.ocdbt:
        ocdbt.merge(folder / manifest.item, manifest.process_count)
    (folder / layout.MANIFEST).put(manifest.to_bytes())
    (folder / layout.STEP_METADATA).put(records.orbax_metadata(manifest, folder))
    (folder / layout.COMMIT_SUCCESS).put(records.orbax_success(target))


def _put_back(aside: Temporary) -> None:
    """Moves a folder back to its name, if Gracepoint wrote the folder, it is not damaged, and the name is free."""
    if not (aside.path / layout.MANIFEST).exists() or records.is_damaged(aside.path):
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


def _check_sizes(folder: StoragePath, files: Iterator[tuple[str, StoredFile]]) -> None:
    """Raises CheckpointCorrupt if a file is missing or has another size. Several threads look at many files."""

    def check(item: tuple[str, StoredFile]) -> None:
        path, file = item
        check_size(folder / path, file.bytes)

    for entry in itertools.islice(files, _FEW_FILES):
        check(entry)
    with contextlib.ExitStack() as until_checked:
        threads: ThreadPoolExecutor | None = None
        while batch := list(itertools.islice(files, _FILES_AT_ONCE)):
            if threads is None:
                threads = until_checked.enter_context(ThreadPoolExecutor(_THREADS, "gracepoint-salvage"))
            list(threads.map(check, batch))


def is_durable(paths: Layout, temporary: Temporary) -> bool:
    """Returns whether the parts of all processes are on disk, committed or not.

    Raises:
        CheckpointCorrupt: A done-record cannot be read.
    """
    return done_records(temporary.path) is not None or of(paths).is_committed(temporary)


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
    if (listed := of(paths).seen()) is None:
        return
    commit = of(listed)
    others, probes = [t for t in listed.temporaries() if t.attempt != attempt], listed.hidden()
    commit.find_condemned(after_crash=bool(others or probes))
    if not others and not probes:
        return
    now_s = paths.root.now_s()
    for probe in probes:
        if probe.last_change_s() < now_s - (older_than_s if hidden_older_than_s is None else hidden_older_than_s):
            if probe.is_folder():
                undeleted.delete_folder(probe)
            else:
                with undeleted.deleting(probe):
                    probe.delete()
    changed_s = look_at(paths.root, others, commit.last_change_s)
    for temporary in others:
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
        if 0.0 < changed_s[temporary] < now_s - kept_s and not _must_stay(commit, temporary):
            logger.warning("giving %s up: unfinished for more than %.0f s", temporary.path, kept_s)
            with undeleted.deleting(temporary.path):  # one that stays must not keep the others
                commit.give_up(temporary)


def _must_stay(commit: Commit, temporary: Temporary) -> bool:
    """Returns whether a save is durable and its step has no other good checkpoint, or a newer Gracepoint wrote it."""
    try:
        return done_records(temporary.path) is not None and not commit.standing(temporary.target)
    except CheckpointTooNew:
        return True
    except CheckpointCorrupt:
        return False


def give_up_failed(paths: Layout, temporary: Temporary, *, deletes: bool = True) -> None:
    """Deletes what a save that has failed has written, in all processes so far. A durable save stays.

    It can be called again, by any process: another one may still have written when it was called. Raises no OSError.

    Args:
        paths: The folder of checkpoints.
        temporary: The save. It was decided that it is not committed.
        deletes: False: there is no time. The folder becomes trash, and in stores that cannot rename all stays.
    """
    with undeleted.deleting(temporary.path):
        try:
            if is_durable(paths, temporary):
                return
        except (CheckpointCorrupt, CheckpointTooNew):
            return
        of(paths).delete_failed(temporary, deletes=deletes)


def salvage(paths: Layout, *, holds_lease: bool = False) -> list[str]:
    """Commits every durable save that is not committed. Returns remarks on the saves that it did not commit.

    First, a folder that a process had moved away when it died gets its name back. A save is committed only in three
    cases: its step has no folder, the folder is damaged, or the folder is the one that the save was to replace. Saves
    with missing done-records are left as they are. If this process may only read the directory, it leaves all saves.

    ``holds_lease`` says that this process has written to the directory. Then a refused write is an error and not a
    remark: the write may succeed a minute later, and a start without the save would lose the save.
    """
    remarks: list[str] = []
    for aside, put_back in of(paths).interrupted():
        with _remarking(aside, remarks, holds_lease):
            put_back()
    durable = []
    looked = look_at(paths.root, paths.temporaries(), functools.partial(_look, paths, holds_lease))
    for temporary, (all_done, is_committed, of_it) in looked.items():
        remarks += of_it
        if all_done is not None and not is_committed:
            durable.append((temporary, all_done))
    # If several starts saved the same step, the last save counts, so it comes first. The others were to replace the
    # checkpoint that it replaces. When that one is gone, they are left as they are.
    for temporary, all_done in sorted(durable, key=lambda item: item[1][0].begun_ns, reverse=True):
        with _remarking(temporary.path, remarks, holds_lease):
            if of(paths).finish(temporary, all_done):
                logger.warning("salvaged %s: %s was complete, not committed", temporary.what, temporary.path)
            else:
                remarks.append(f"{temporary.path} is left, as there is a folder for {temporary.what} already")
    return remarks


def _look(
    paths: Layout, holds_lease: bool, temporary: Temporary
) -> tuple[Sequence[DoneRecord] | None, bool, list[str]]:
    """Returns the done-records of a save if it is durable, whether it is committed, and remarks on it."""
    all_done, is_committed, remarks = None, False, list[str]()
    with _remarking(temporary.path, remarks, holds_lease):
        all_done = done_records(temporary.path)
        if all_done is None:
            remarks.append(f"{temporary.path} is incomplete: not all processes finished writing")
        else:
            is_committed = of(paths).is_left_by_commit(temporary)
    return all_done, is_committed, remarks


def finish(paths: Layout, temporary: Temporary) -> bool:
    """Commits one save if it is durable in all processes, as ``salvage`` does for all. Returns whether it is committed.

    Raises:
        CheckpointCorrupt, CheckpointTooNew, SaveFailed, OSError: It is durable, and cannot be committed.
    """
    way = of(paths)
    try:
        all_done = done_records(temporary.path)
        return way.is_committed(temporary) if all_done is None else way.finish(temporary, all_done)
    except FileNotFoundError:  # another process has just committed it, or deleted it
        return way.is_committed(temporary)


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
        gang.broadcast(key, json.dumps(_error_message(error)), timeout_s=deadline.remaining_s())
        raise
    gang.broadcast(key, json.dumps([None, text]), timeout_s=deadline.remaining_s())
    return text


def _error_message(error: Exception) -> list[str]:
    if isinstance(error, CheckpointError):
        return [to_word(error), str(error)]
    return [to_word(CheckpointError()), f"process 0: {type(error).__name__}: {error}"]
