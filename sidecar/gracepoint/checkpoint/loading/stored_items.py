"""Restores the items that handlers of the user's wrote beside the state of a step. The handlers read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.handler_registry import ItemHandler
from gracepoint.checkpoint.loading.handled_restore import in_time
from gracepoint.checkpoint.reading.stored_tree import StoredTree
from gracepoint.checkpoint.storage.checks import check_contents
from gracepoint.checkpoint.storage.storage_path import local_folder
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointMismatch


@dataclasses.dataclass(frozen=True)
class ItemsRequest:
    """Which items are restored, and how.

    Attributes:
        args: The arguments that each item's handler gets, by the item's name. Items that are not in it are left alone.
        handlers: The handlers of these items, and maybe of others.
    """

    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, ItemHandler] = dataclasses.field(default_factory=dict)


NO_ITEMS = ItemsRequest()


def restore_items(stored: StoredTree, request: ItemsRequest, deadline: Deadline) -> dict[str, Any]:
    """Returns the items by name. The handlers run in a thread that ends with their work.

    Raises:
        CheckpointMismatch: The step has no such item.
        CheckpointCorrupt: A file of an item is missing or damaged; names it.
        TimeoutError: The deadline passed; names an item.
    """
    found: dict[str, Any] = {}

    def read() -> None:
        for name, args in request.args.items():
            place = stored.folder / name
            if not place.is_folder():
                raise CheckpointMismatch(f"{stored.folder} has no item {name!r}: leave it out of what is restored")
            if stored.manifest is not None:  # Orbax records no checksums
                for path, file in stored.manifest.files.items():
                    if path.startswith(layout.in_item(name, "")):
                        check_contents(stored.folder / path, file.bytes, file.crc32)
            try:
                found[name] = request.handlers[name].restore(local_folder(place, name), args=args)
            except FileNotFoundError as error:
                raise CheckpointCorrupt(f"{place}: item {name!r} cannot be restored: {error}") from error

    if request.args:
        in_time(read, f"item {next(iter(request.args))!r}", deadline)
    return found
