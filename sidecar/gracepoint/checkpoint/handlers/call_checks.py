"""Checks of the arguments that handlers are called with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from gracepoint.checkpoint.handler_registry import ParamInfo
from gracepoint.errors import CheckpointRefused, SettingsError


def folder_of(infos: Sequence[ParamInfo], *others: Sequence[Any] | None) -> Path:
    """Returns the folder of all ``infos``, which ``others`` are as many as."""
    if not infos:
        raise CheckpointRefused("expected at least one leaf, found none")
    if wrong := [len(other) for other in others if other is not None and len(other) != len(infos)]:
        raise CheckpointRefused(f"expected as many values and args as there are infos, {len(infos)}, found {wrong[0]}")
    folders = {info.parent_dir for info in infos}
    if len(folders) > 1:
        raise CheckpointRefused(f"expected leaves of one folder, found {', '.join(map(str, sorted(folders)))}")
    return infos[0].parent_dir


def is_primary(primary_host: int | None) -> bool:
    """True if this process writes what is written once; None: each does, into storage of its own."""
    return primary_host is None or primary_host == jax.process_index()


def check_primary_host(primary_host: int | None) -> None:
    """Raises SettingsError if there is no such process, so that nothing would be written."""
    if primary_host is not None and not 0 <= primary_host < jax.process_count():
        raise SettingsError(
            f"primary_host is {primary_host!r}; expected one of the process indices 0 to {jax.process_count() - 1}, or "
            "None where every process has storage of its own"
        )
