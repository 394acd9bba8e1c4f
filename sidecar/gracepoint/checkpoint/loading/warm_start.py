"""Restores the state of another run: its directory is only read, and its step numbers have no meaning in this run.

Nothing is locked, salvaged, marked or deleted in that directory. It may be read-only, and its own job may be saving
into it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.loading.restore_step import Restored, restore_listed
from gracepoint.checkpoint.options import RestoreOptions
from gracepoint.checkpoint.steps import foreign, records
from gracepoint.checkpoint.steps import listing as catalog
from gracepoint.checkpoint.steps.listing import Listing
from gracepoint.checkpoint.steps.process_zero import by_process_zero
from gracepoint.checkpoint.storage.storage_path import StoragePath, UserPath, storage_path
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointNotFound
from gracepoint.process_group import ProcessGroup

_STEP = re.compile(r"0|[1-9]\d*", re.ASCII)


def restore_base(
    base: UserPath,
    like: Any,
    *,
    gang: ProcessGroup,
    key: str,
    deadline: Deadline,
    restore_args: Any,
    options: RestoreOptions,
) -> Restored:
    """Restores the newest step of another run, or the step whose folder is given. Collective.

    Args:
        base: A directory of steps, or the folder of one step in it, of any name, written by Gracepoint or Orbax.
        like: See ``read_tree``.
        gang: The processes that restore together.
        key: Prefix of the keys that they use.
        deadline: When the whole call must have ended.
        restore_args: See ``read_tree``.
        options: See ``read_tree``.

    Returns:
        The state, without host state: that belongs to the run that saved it.

    Raises:
        CheckpointNotFound: There is no complete checkpoint.
        CheckpointCorrupt: No complete checkpoint can be restored; says why for each.
        CheckpointMismatch: The newest readable step does not fit ``like``.
        CheckpointError: The checkpoint cannot be read for another reason.
        SettingsError: ``base`` is not an absolute path or a URI.
    """
    folder = storage_path(base)

    def look() -> str:
        root, names, listing = _find(folder)
        return json.dumps([str(root), list(names.items()), listing.to_text()])

    root, names, listing = json.loads(by_process_zero(look, gang=gang, key=f"{key}/list", deadline=deadline))
    restored = restore_listed(
        Layout(storage_path(root), names=dict(names)),
        Listing.from_text(listing),
        like,
        gang=gang,
        key=key,
        deadline=deadline,
        restore_args=restore_args,
        options=options,
        with_host_state=False,
        marks_readers=False,
    )
    assert restored is not None  # a listing without steps has raised
    return restored


def _find(folder: StoragePath) -> tuple[StoragePath, dict[int, str], Listing]:
    """Returns the directory of the steps, the names of their folders that are no numbers, and what may be restored."""
    listing = catalog.complete_listing(Layout(folder))
    if listing.steps:
        return folder, {}, listing
    if (step := _step_at(folder)) is not None:
        names = {} if str(step) == folder.name else {step: folder.name}
        why = catalog.why_not(Layout(folder.parent, names=names), step)
        if why is None:
            return folder.parent, names, Listing((step,), (), ())
        raise CheckpointNotFound(f"from_: {folder} is not a complete checkpoint of a step: {why}")
    others = [str(each) for each in foreign.look_alikes(Layout(folder))]
    found = "; ".join((*listing.refused, *listing.remarks, *others)) or "it has no steps"
    raise CheckpointNotFound(
        f"from_: expected a directory of steps, or the folder of a step, at {folder}; found no complete checkpoint: "
        f"{found}"
    )


def _step_at(folder: StoragePath) -> int | None:
    """Returns the step in ``folder``; 0 if nothing says its number. None if it is not the folder of a step."""
    if not folder.is_folder():
        return None
    if _STEP.fullmatch(folder.name):
        return int(folder.name)
    if foreign.checkpoint_around(folder) != folder:
        return None
    step = (records.manifest_fields(folder) or {}).get("step")
    return step if step is not None else foreign.number_of(folder) or 0
