"""Saving, restoring and looking in one call."""

from __future__ import annotations

from typing import Any

from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.loading.restore_tree import DEFAULTS, RestoreOptions
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.steps import listing
from gracepoint.checkpoint.storage.storage_path import UserPath, storage_path


def save(
    path: UserPath,
    tree: Any,
    *,
    force: bool = False,
    save_args: Any = None,
    options: WriteOptions | None = None,
) -> None:
    """Saves ``tree`` at ``path``, and returns when it is committed. Collective.

    Args:
        path: As in ``AsyncCheckpointer.save``.
        tree: Of arrays, numbers and strings.
        force: A checkpoint that is there is replaced; it stays until the new one is durable.
        save_args: ``SaveArgs`` for all leaves, or a tree of them.
        options: How arrays are written.

    Raises:
        CheckpointExists: There is something at ``path``, and ``force`` is not set, or it is no checkpoint.
        SaveFailed: It is not committed in time, or a process failed.
        CheckpointError: The tree cannot be saved; names the leaf.
        BarrierError: Other processes did not take part in time.
    """
    with AsyncCheckpointer(options=options) as checkpointer:
        checkpointer.save_and_wait(path, tree, force=force, save_args=save_args)


def restore(path: UserPath, like: Any = None, *, restore_args: Any = None, options: RestoreOptions = DEFAULTS) -> Any:
    """Restores the checkpoint at ``path``, written by Gracepoint or Orbax. Collective.

    Args, result and errors are those of ``AsyncCheckpointer.restore``.
    """
    with AsyncCheckpointer() as checkpointer:
        return checkpointer.restore(path, like, restore_args=restore_args, options=options)


def all_steps(directory: UserPath) -> list[int]:
    """Returns the steps below ``directory`` that have a complete checkpoint, Gracepoint's or Orbax's, oldest first.

    Only looks: a save that is durable and was never committed is not seen before the next ``restore`` commits it.

    Raises:
        SettingsError: ``directory`` is no absolute path or ``file://`` URI.
    """
    return listing.complete_steps(Layout(storage_path(directory)))


def latest_step(directory: UserPath) -> int | None:
    """Returns the newest of ``all_steps``; None if there is none."""
    return max(all_steps(directory), default=None)
