"""Reads what a process saved beside the train state, also if another number of processes saved it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gracepoint.checkpoint.format import host_state
from gracepoint.checkpoint.reading.stored_tree import StoredTree
from gracepoint.errors import CheckpointMismatch

logger = logging.getLogger(__name__)

#: Computes this process's value of the host state if another number of processes saved it. Called with the values that
#: those processes saved, the index of this process, and the current number of processes.
Reshard = Callable[[Sequence[Any], int, int], Any]


def own_host_state(
    stored: StoredTree, process_index: int, process_count: int, reshard: Mapping[str, Reshard]
) -> dict[str, Any]:
    """Returns this process's values by name. Empty if the step has none.

    Args:
        stored: The step.
        process_index: Index of this process.
        process_count: Number of processes now.
        reshard: Functions that convert values to another number of processes, by the value's name.

    Raises:
        CheckpointMismatch: Another number of processes saved the step, and ``reshard`` lacks a value.
        CheckpointCorrupt: A file is damaged.
    """
    manifest = stored.manifest
    if manifest is None:
        logger.warning("%s was written by Orbax: it has no host state of Gracepoint's", stored.folder)
        return {}
    if not manifest.host_state:
        return {}
    if manifest.process_count == process_count:
        return host_state.decode(stored.host_state(process_index))
    if fixed := [name for name in manifest.host_state if name not in reshard]:
        raise CheckpointMismatch(
            f"{stored.folder}: the host state ({', '.join(fixed)}) was saved by {manifest.process_count} processes, "
            f"each its own, and cannot be restored into {process_count}: start with {manifest.process_count} "
            f"processes, or say how with reshard="
        )
    saved = [host_state.decode(stored.host_state(index)) for index in range(manifest.process_count)]
    return {
        name: reshard[name]([values[name] for values in saved], process_index, process_count)
        for name in manifest.host_state
    }
