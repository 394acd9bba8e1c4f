"""What a process writes of a save beside the values of arrays: metadata and host state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gracepoint.checkpoint.format import host_state, layout
from gracepoint.checkpoint.format.layout import Temporary
from gracepoint.checkpoint.saving.operation.save_extras import SaveExtras
from gracepoint.checkpoint.saving.operation.save_planner import PreparedSave
from gracepoint.errors import HostStateLost
from gracepoint.process_group import ProcessGroup


def is_in_parts(prepared: PreparedSave, temporary: Temporary) -> bool:
    """Returns whether the manifest of a save is in parts. It is the same in all processes.

    In a store that cannot rename, it is never in parts: the commit needs the generation of every chunk anyway.
    """
    return prepared.has_many_chunks and temporary.path.backend.renames


def small_files(
    temporary: Temporary,
    item: str,
    gang: ProcessGroup,
    prepared: PreparedSave,
    extras: SaveExtras,
    values: Mapping[str, Any],
) -> dict[str, bytes]:
    """Returns the contents of this process's small files, by path below the checkpoint's folder.

    Args:
        temporary: The save.
        item: Name of the train state's folder below the checkpoint's folder.
        gang: The processes that save together.
        prepared: The plan.
        extras: What is saved beside the state.
        values: The host state of this process.

    Raises:
        CheckpointError: A value of the host state cannot be saved.
    """
    files = {}
    if gang.process_index == 0:
        for name, data in prepared.metadata.items():
            files[layout.in_item(item, name)] = data
        files |= extras.files(item, prepared.metadata[layout.TREE_METADATA])
        if is_in_parts(prepared, temporary):
            files[layout.CHUNK_WRITERS] = prepared.chunk_writers
    return files | _of_items(temporary, item, gang, values) if item else files


def _of_items(temporary: Temporary, item: str, gang: ProcessGroup, values: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the files that a checkpoint with items has beside the train state, by path."""
    files = {layout.host_state_file(gang.process_index): host_state.encode(values)}
    if gang.process_index == 0:
        success = f"Checkpoint commit was successful to {temporary.target / item}"
        files[layout.in_item(item, layout.COMMIT_SUCCESS)] = success.encode()
        summary = {"processes": gang.process_count, "names": list(values)}
        if lost := {name: str(value) for name, value in values.items() if isinstance(value, HostStateLost)}:
            summary["lost_in_process_0"] = lost
        files[f"{layout.HOST_STATE_ITEM}/metadata"] = json.dumps(summary).encode()
    return files
