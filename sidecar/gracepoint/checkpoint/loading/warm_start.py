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
from gracepoint.checkpoint.steps import listing as catalog
from gracepoint.checkpoint.steps.listing import Listing
from gracepoint.checkpoint.steps.process_zero import by_process_zero
from gracepoint.checkpoint.storage.storage_path import UserPath, storage_path
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
        base: A directory of steps, or the folder of one step in it, written by Gracepoint or Orbax.
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
        paths, listing = _find(Layout(folder))
        return json.dumps([str(paths.root), listing.to_text()])

    root, listing = json.loads(by_process_zero(look, gang=gang, key=f"{key}/list", deadline=deadline))
    restored = restore_listed(
        Layout(storage_path(root)),
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


def _find(paths: Layout) -> tuple[Layout, Listing]:
    """Returns the directory of the steps, and the steps that may be restored."""
    listing = catalog.complete_listing(paths)
    if listing.steps:
        return paths, listing
    name, above = paths.root.name, Layout(paths.root.parent)
    if _STEP.fullmatch(name) and paths.root.is_folder():
        why = catalog.why_not(above, int(name))
        if why is None:
            return above, Listing((int(name),), (), ())
        raise CheckpointNotFound(f"from_: {paths.root} is not a complete checkpoint of a step: {why}")
    found = "; ".join((*listing.refused, *listing.remarks)) or "it has no steps"
    raise CheckpointNotFound(
        f"from_: expected a directory of steps, or the folder of a step, at {paths.root}; found no complete "
        f"checkpoint: {found}"
    )
