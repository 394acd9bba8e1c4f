"""Recovery at a start: commits durable saves of processes that died, and undoes replacements that were interrupted.

Any number of processes may do so at the same time, and may stop anywhere. ``commit`` explains why this is safe. But
mostly one process is enough: ``by_process_zero`` lets process 0 do for all what only one should do, such as recovery,
listing a directory or taking its lease.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence

from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import DoneRecord
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.steps.records import done_records
from gracepoint.checkpoint.storage.checks import must_not_write
from gracepoint.checkpoint.storage.storage_path import StoragePath, look_at
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointError, CheckpointTooNew, SaveFailed, from_word, to_word
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)


def salvage(paths: Layout, *, holds_lease: bool = False) -> list[str]:
    """Commits every durable save that is not committed. Returns remarks on the saves that it did not commit.

    First, a folder that a process had moved away when it died gets its name back. A save is committed only in three
    cases: its step has no folder, the folder is damaged, or the folder is the one that the save was to replace. Saves
    with missing done-records are left as they are. If this process may only read the directory, it leaves all saves.

    ``holds_lease`` says that this process has written to the directory. Then a refused write is an error and not a
    remark: the write may succeed a minute later, and a start without the save would lose the save.
    """
    remarks: list[str] = []
    for aside, put_back in commit.of(paths).interrupted():
        with _remarking(aside, remarks, holds_lease):
            put_back()
    durable = []
    looked = look_at(paths.root, paths.temporaries(), functools.partial(_look, paths, holds_lease))
    for temporary, (records, is_committed, of_it) in looked.items():
        remarks += of_it
        if records is not None and not is_committed:
            durable.append((temporary, records))
    # If several starts saved the same step, the last save counts, so it comes first. The others were to replace the
    # checkpoint that it replaces. When that one is gone, they are left as they are.
    for temporary, records in sorted(durable, key=lambda item: item[1][0].begun_ns, reverse=True):
        with _remarking(temporary.path, remarks, holds_lease):
            if commit.of(paths).finish(temporary, records):
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
        else:
            is_committed = commit.of(paths).is_left_by_commit(temporary)
    return records, is_committed, remarks


def finish(paths: Layout, temporary: Temporary) -> bool:
    """Commits one save if it is durable in all processes, as ``salvage`` does for all. Returns whether it is committed.

    Raises:
        CheckpointCorrupt, CheckpointTooNew, SaveFailed, OSError: It is durable, and cannot be committed.
    """
    way = commit.of(paths)
    try:
        records = done_records(temporary.path)
        return way.is_committed(temporary) if records is None else way.finish(temporary, records)
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
