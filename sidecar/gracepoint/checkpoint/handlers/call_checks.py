"""Checks of the arguments of a handler's methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from gracepoint.arguments import shown
from gracepoint.checkpoint.handler_registry import ParamInfo
from gracepoint.checkpoint.options import RestoreArgs
from gracepoint.checkpoint.orbax_objects import is_orbax, restore_args_of
from gracepoint.checkpoint.storage.storage_path import StoragePath, storage_path
from gracepoint.errors import CheckpointRefused, SettingsError


def folder_of(infos: Sequence[ParamInfo], *others: Sequence[Any] | None) -> StoragePath:
    """Returns the folder of all ``infos``.

    Raises:
        CheckpointRefused: There are no infos, their folders differ, or one of ``others`` has another length. Or an
            info is Orbax's, which has flags of the format that would be ignored.
    """
    if not infos:
        raise CheckpointRefused("expected at least one leaf, found none")
    if of_orbax := [info for info in infos if is_orbax(info, ParamInfo.__name__)]:
        raise CheckpointRefused(
            f"leaf {of_orbax[0].name!r}: expected a gracepoint.checkpoint.ParamInfo, found Orbax's: make one of its "
            "name, parent_dir and keypath (the format is in WriteOptions, and a reader detects it)"
        )
    if wrong := [len(other) for other in others if other is not None and len(other) != len(infos)]:
        raise CheckpointRefused(f"expected as many values and args as there are infos, {len(infos)}, found {wrong[0]}")
    folders = {info.parent_dir for info in infos}
    if len(folders) > 1:
        raise CheckpointRefused(f"expected leaves of one folder, found {', '.join(map(str, sorted(folders)))}")
    return storage_path(infos[0].parent_dir)


def leaf_args(infos: Sequence[ParamInfo], args: Sequence[Any] | None) -> list[RestoreArgs]:
    """Returns the arguments of each leaf as Gracepoint's. ``args`` may be Orbax's. None: all are the defaults.

    Raises:
        CheckpointRefused: One of ``args`` is no ``RestoreArgs``, or asks for something that is not supported.
    """
    if args is None:
        return [RestoreArgs()] * len(infos)
    return [restore_args_of(arg, f"leaf {info.name!r}") for info, arg in zip(infos, args, strict=True)]


def is_primary(primary_host: int | None) -> bool:
    """Returns whether this process writes. If ``primary_host`` is None, every process writes, to its own storage."""
    return primary_host is None or primary_host == jax.process_index()


def check_primary_host(primary_host: int | None) -> None:
    """Raises SettingsError if there is no such process, as nothing would be written then."""
    if primary_host is not None and not 0 <= primary_host < jax.process_count():
        raise SettingsError(
            f"primary_host is {shown(primary_host)}; expected one of the process indices 0 to "
            f"{jax.process_count() - 1}, or None where every process has storage of its own"
        )
