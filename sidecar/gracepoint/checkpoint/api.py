"""Functions that save a tree, restore it, or list steps in one call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.options import DEFAULT_RESTORE_OPTIONS, RestoreOptions, WriteOptions
from gracepoint.checkpoint.steps import listing
from gracepoint.checkpoint.storage.locations import UserPath, storage_path


def save(
    path: UserPath,
    tree: Any,
    *,
    force: bool = False,
    save_args: Any = None,
    custom_metadata: Mapping[str, Any] | None = None,
    options: WriteOptions | None = None,
    handlers: HandlerRegistry | None = None,
) -> None:
    """Saves ``tree`` at ``path``, and returns when it is committed. Collective.

    Args:
        path: Absolute path on a file system that all processes share, or a URI (``gs://bucket/name``, ...).
        tree: Arrays, numbers, strings, and leaves that ``handlers`` are for. Functions among its leaves are not saved:
            a restore takes them from ``like``.
        force: Whether to replace a checkpoint that exists at ``path``. It stays until the new one is durable.
        save_args: ``SaveArgs`` for all leaves, or a tree of them. None: the defaults.
        custom_metadata: JSON values, by name, that ``AsyncCheckpointer.metadata`` returns. None: there are none.
        options: How arrays are written. None: the defaults.
        handlers: Handlers of leaf types of your own. Equal in all processes. None: such leaves are an error.

    Raises:
        CheckpointExists: Something exists at ``path``, and ``force`` is not set, or it is not a checkpoint.
        SaveFailed: The checkpoint is not committed in time, or a process failed.
        CheckpointError: The tree cannot be saved; names the leaf.
        BarrierError: Other processes did not take part in time.
    """
    with AsyncCheckpointer(options=options, handlers=handlers) as checkpointer:
        checkpointer.save_and_wait(path, tree, force=force, save_args=save_args, custom_metadata=custom_metadata)


def restore(
    path: UserPath,
    like: Any = None,
    *,
    restore_args: Any = None,
    options: RestoreOptions = DEFAULT_RESTORE_OPTIONS,
    handlers: HandlerRegistry | None = None,
) -> Any:
    """Restores the checkpoint at ``path``, written by Gracepoint or Orbax. Collective.

    ``handlers`` are the handlers of leaf types of your own. The other arguments, the result and the errors are those of
    ``AsyncCheckpointer.restore``.
    """
    with AsyncCheckpointer(handlers=handlers) as checkpointer:
        return checkpointer.restore(path, like, restore_args=restore_args, options=options)


def all_steps(directory: UserPath) -> list[int]:
    """Returns the steps below ``directory`` that have a complete checkpoint, Gracepoint's or Orbax's, oldest first.

    Changes nothing: a save that is durable but not committed is listed only after the next ``restore`` commits it. If
    there are no steps, and something else looks like a checkpoint, a line in the log names it.

    Raises:
        SettingsError: ``directory`` is neither an absolute path nor a known kind of URI.
    """
    return listing.steps_for_users(Layout(storage_path(directory)))


def latest_step(directory: UserPath) -> int | None:
    """Returns the newest of ``all_steps``. None if there is none."""
    return max(all_steps(directory), default=None)
