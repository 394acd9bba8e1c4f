"""Reads what a process saved beside the train state, also if another number of processes saved it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from gracepoint.checkpoint.format import host_state
from gracepoint.checkpoint.reading.stored_tree import StoredTree
from gracepoint.errors import CheckpointMismatch, HostStateLost

logger = logging.getLogger(__name__)

#: Computes this process's value of the host state if another number of processes saved it. Called with the values that
#: those processes saved, the index of this process, and the current number of processes.
Reshard = Callable[[Sequence[Any], int, int], Any]


def own_host_state(
    stored: StoredTree,
    process_index: int,
    process_count: int,
    reshard: Mapping[str, Reshard],
    required: Collection[str] = (),
) -> dict[str, Any]:
    """Returns this process's values by name. Empty if the step has none.

    A value that the step was saved without, in an emergency, is a ``HostStateLost``.

    Args:
        stored: The step.
        process_index: Index of this process.
        process_count: Number of processes now.
        reshard: Functions that convert values to another number of processes, by the value's name.
        required: Names of values that must not be lost.

    Raises:
        CheckpointMismatch: Another number of processes saved the step, and ``reshard`` lacks a value.
        HostStateLost: A required value is lost. The message names it, and says why and what to do.
        CheckpointCorrupt: A file is damaged.
    """
    manifest = stored.manifest
    if manifest is None:
        logger.warning("%s was written by Orbax: it has no host state of Gracepoint's", stored.folder)
        return {}
    if not manifest.host_state:
        return {}
    if manifest.process_count == process_count:
        own = host_state.decode(stored.host_state(process_index))
        return _checked(own, required, f"process {process_index}", stored)
    if fixed := [name for name in manifest.host_state if name not in reshard]:
        raise CheckpointMismatch(
            f"{stored.folder}: the host state ({', '.join(fixed)}) was saved by {manifest.process_count} processes, "
            f"each its own, and cannot be restored into {process_count}: start with {manifest.process_count} "
            f"processes, or say how with reshard="
        )
    saved = [host_state.decode(stored.host_state(index)) for index in range(manifest.process_count)]
    found = dict[str, Any]()
    for name in manifest.host_state:
        values = [own[name] for own in saved]
        lost = next((value for value in values if isinstance(value, HostStateLost)), None)
        found[name] = reshard[name](values, process_index, process_count) if lost is None else lost
    return _checked(found, required, "a process", stored)


def _checked(found: dict[str, Any], required: Collection[str], who: str, stored: StoredTree) -> dict[str, Any]:
    for name, value in found.items():
        if name in required and isinstance(value, HostStateLost):
            raise HostStateLost(
                f"{stored.folder} was saved in an emergency without host_state {name!r} of {who}: {value}. The train "
                f"state is there. To go on with it, register host_state({name!r}, get, set, missing=...): that "
                f"function gets the step, and puts in order what set cannot. Or do not register {name!r}; or move "
                f"{stored.folder} away, and an older step is restored"
            )
    return found
