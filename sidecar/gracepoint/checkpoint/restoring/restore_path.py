"""Checkpoints that have their own path: checks before a save, the folder that a path names, and the restore.

A path may also name a step's folder, or one of its items.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from typing import Any

from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.options import DEFAULT_RESTORE_OPTIONS, RestoreOptions
from gracepoint.checkpoint.restoring import readers, transforms
from gracepoint.checkpoint.restoring.placement import ReplicaAgreement
from gracepoint.checkpoint.restoring.restore_step import read_together
from gracepoint.checkpoint.restoring.restore_tree import read_tree
from gracepoint.checkpoint.saving.operation import SaveOperation
from gracepoint.checkpoint.steps import listing, retention
from gracepoint.checkpoint.steps.commit import by_process_zero
from gracepoint.checkpoint.storage.locations import UserPath, from_text, storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointRefused,
    CheckpointTooNew,
    SaveFailed,
    SettingsError,
)
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)

_MARKS = (layout.MANIFEST, layout.TREE_METADATA, layout.STEP_METADATA, layout.COMMIT_SUCCESS)


def paths_of(path: UserPath) -> Layout:
    """Returns the paths of saves to ``path``, an absolute path or a URI.

    Raises:
        SettingsError: ``path`` is neither of these, or does not name a folder.
    """
    root = storage_path(path)
    if not root.name:
        raise SettingsError(f"checkpoint path {str(path)!r}: expected a folder's name at its end")
    return Layout(root.parent, name=root.name)


def check_target(
    save: SaveOperation, gang: ProcessGroup, *, make_way: Callable[[], None], force: bool, timeout_s: float
) -> None:
    """Raises the same error in all processes if ``save`` cannot begin, or must not be written to its path. Collective.

    Args:
        save: The save that is about to begin.
        gang: The processes that save.
        make_way: Waits for the previous save. Raises SaveFailed if that failed or hangs.
        force: Whether an existing checkpoint may be replaced.
        timeout_s: Seconds for the other processes to arrive.

    Raises:
        SaveFailed: ``make_way`` raised it.
        CheckpointExists: Something exists at the path, and ``force`` is not set, or it is not a checkpoint.
        CheckpointError: The processes save to different paths.
        BarrierError: Another process did not come in time, or cannot begin.
    """
    target, problem, key = save.temporary.target, None, f"{save.key}/target"
    try:
        make_way()  # first, as the previous save may be one to the same path
        if gang.process_index == 0:
            problem = why_not_to(target, force)
    except (OSError, SaveFailed) as error:
        gang.fail(key, error)
        raise
    answers = [json.loads(text) for text in gang.gather(key, json.dumps([str(target), problem]), timeout_s=timeout_s)]
    (other_path, problem), *_ = answers
    if other_path != str(target):
        raise CheckpointError(f"the processes save to different paths: {other_path} in the first, {target} in this one")
    if problem is not None:
        raise CheckpointExists(problem)


def why_not_to(target: StoragePath, force: bool) -> str | None:
    """Returns why nothing may be saved at ``target``. None if a save may go there."""
    if not target.exists():
        return None
    if not force:
        return f"{target} exists already: save to another path, or replace it with force=True"
    if target.is_link() or not target.is_folder():
        return f"{target} is not a folder: remove it yourself if it may go"
    try:
        is_empty = not target.children()
    except FileNotFoundError:
        return None  # it was deleted just now
    if not is_empty and not any((target / mark).exists() for mark in _MARKS):
        return f"{target} is not a checkpoint, and force=True replaces nothing else: remove it yourself if it may go"
    try:
        records.manifest_fields(target)
    except CheckpointTooNew as error:
        return str(error)
    except CheckpointCorrupt:
        pass  # a damaged checkpoint may be replaced
    return None


def folder_of(path: StoragePath, preferred: str = layout.STATE_ITEM) -> StoragePath:
    """Returns the folder to open for the checkpoint that ``path`` names: a whole checkpoint, a step or an item.

    Args:
        path: The path.
        preferred: The item that holds the train state, if Orbax wrote a step with several trees of arrays.

    Raises:
        CheckpointNotFound: There is no checkpoint.
        CheckpointRefused: It is in a format of the past, which is not supported.
        CheckpointCorrupt: The checkpoint is not finished, or ``path`` does not say which of several items is meant.
    """
    if not path.is_folder() and not path.is_value():
        raise CheckpointNotFound(f"there is no checkpoint at {path}")
    listing.check(path)
    above = records.read_manifest(path.parent)
    if above is not None and above.item == path.name:
        return path.parent  # the manifest with the checksums is there
    if records.read_manifest(path) is not None:
        return path
    if lost := listing.lost_manifest(path):
        raise CheckpointCorrupt(lost)
    has_mark = any((path / mark).exists() for mark in _MARKS)
    if not has_mark and not listing.trees_of_orbax(path):
        raise CheckpointNotFound(
            f"{path} is not a checkpoint: it has neither {layout.MANIFEST} (Gracepoint's) nor "
            f"{layout.TREE_METADATA} (Orbax's), and no folder in it has{listing.steps_instead(path)}"
        )
    if not listing.finished_by_orbax(path):
        raise CheckpointCorrupt(f"{path} was written by Orbax, and not finished")
    if any((path / item / layout.TREE_METADATA).is_value() for item in (layout.NO_ITEM, preferred)):
        return path
    items = [path / name for name in listing.trees_of_orbax(path)]
    if len(items) == 1:
        return items[0]
    raise CheckpointCorrupt(
        f"{path} has {'several items' if items else 'no item'} with a tree of arrays: expected the path of one"
        + (f", as {items[0]}" if items else "")
    )


def restore(
    paths: Layout,
    path: StoragePath,
    like: Any,
    restore_args: Any,
    *,
    gang: ProcessGroup,
    key: str,
    attempt: str,
    deadline: Deadline,
    sleep: Callable[[float], object],
    options: RestoreOptions = DEFAULT_RESTORE_OPTIONS,
) -> Any:
    """Restores the checkpoint at ``path`` in all processes, or in none. Collective.

    Args:
        paths: Where saves to ``path`` go.
        path: Path of a checkpoint, a step or an item.
        like: See ``read_tree``.
        restore_args: See ``read_tree``.
        gang: The processes that restore together.
        key: Prefix of the keys that they use.
        attempt: The current attempt. Its own saves are not waited for.
        deadline: When the whole call must have ended.
        sleep: Waits for a number of seconds.
        options: See ``read_tree``.

    Raises:
        CheckpointNotFound: There is no checkpoint.
        CheckpointCorrupt: It is not finished, or damaged.
        CheckpointTooNew: A newer Gracepoint wrote it.
        CheckpointMismatch: It does not fit ``like``.
        CheckpointError: It cannot be read for another reason.
        BarrierError: Other processes did not take part in time.
    """
    restored = by_process_zero(
        lambda: str(_found(paths, path, attempt, deadline, sleep)), gang=gang, key=f"{key}/folder", deadline=deadline
    )
    reading = _reading(from_text(restored)) if gang.process_index == 0 else contextlib.nullcontext()
    may_take_turns = readers.may_be_taken(gang, from_text(restored), restore_args, options)
    with transforms.noting_deletions(like), reading:
        tree, damage = read_together(
            restored,
            lambda: (
                read_tree(
                    from_text(restored),
                    like,
                    restore_args,
                    options=options,
                    deadline=deadline,
                    together=ReplicaAgreement(gang, f"{key}/leaves", meets_first=may_take_turns),
                ),
            ),
            gang=gang,
            key=f"{key}/read",
            deadline=deadline,
        )
        if tree is None:
            raise CheckpointCorrupt(f"{restored} cannot be restored: {damage}")
    return tree[0]


def _reading(folder: StoragePath) -> contextlib.AbstractContextManager[None]:
    """Keeps a step that Gracepoint wrote from being deleted while it is read. Retention deletes nothing else."""
    if folder.name.isdecimal() and listing.is_ours(folder, int(folder.name)):
        return retention.reading(Layout(folder.parent), int(folder.name))
    return contextlib.nullcontext()


def _found(
    paths: Layout, path: StoragePath, attempt: str, deadline: Deadline, sleep: Callable[[float], object]
) -> StoragePath:
    """Returns the folder to read.

    Raises:
        CheckpointError: As ``restore`` does.
    """
    remarks: list[str] = []
    try:
        # Waiting for another attempt's writer must leave time to read.
        remarks = listing.settle(
            paths,
            attempt=attempt,
            awaited=lambda saves: [] if path.exists() else saves,
            deadline=deadline.part(0.5),
            sleep=sleep,
        )
        for remark in remarks:
            logger.info("restore: %s", remark)
        return folder_of(path)
    except CheckpointNotFound as error:
        raise CheckpointNotFound("; ".join([str(error), *remarks])) from error
    except (CheckpointCorrupt, CheckpointRefused, CheckpointTooNew):
        raise
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"process 0 could not look at {path}: {error}") from error
