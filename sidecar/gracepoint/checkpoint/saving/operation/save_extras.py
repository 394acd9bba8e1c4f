"""What a checkpoint holds beside the state: custom metadata, a note, and items that handlers of the user's write.

An item is a folder below the step's folder. Its handler has the interface of Orbax's ``CheckpointHandler``, so that
Orbax's own handlers, and those of other libraries for Orbax, can be used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gracepoint.arguments import shown
from gracepoint.checkpoint.format import layout, orbax_metadata
from gracepoint.checkpoint.format.manifest import StoredFile
from gracepoint.checkpoint.handler_registry import ItemHandler
from gracepoint.checkpoint.storage.recorded_files import record_files
from gracepoint.checkpoint.storage.storage_path import StoragePath, local_folder
from gracepoint.errors import CheckpointRefused, SaveFailed


@dataclasses.dataclass(frozen=True)
class SaveExtras:
    """What one save has beside its state. Equal in all processes, except for the arguments of items.

    Attributes:
        custom_metadata: JSON values of the user's, by name.
        items: The arguments that each item's handler gets, by the item's name.
        handlers: The handlers of these items, and maybe of others.
        note: A text for the restore of the step; see ``Restored.note``. Only process 0's text is saved. None: there is
            none.
    """

    custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    items: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    handlers: Mapping[str, ItemHandler] = dataclasses.field(default_factory=dict)
    note: str | None = None

    def __post_init__(self) -> None:
        """Raises CheckpointRefused if the metadata is no JSON object, or an item has no handler."""
        check_custom_metadata(self.custom_metadata)
        check_items(self.items, self.handlers)

    def files(self, item: str, tree_metadata: bytes) -> dict[str, bytes]:
        """Returns the files that hold custom metadata, the names of handlers and the note, by path.

        Args:
            item: The item of the state.
            tree_metadata: The contents of its metadata file, without custom metadata.
        """
        custom = self.custom_metadata
        kinds = {name: type(self.handlers[name]) for name in self.items}
        handlers = {name: f"{kind.__module__}.{kind.__qualname__}" for name, kind in kinds.items()}  # as Orbax has them
        files = {layout.MORE_METADATA: orbax_metadata.more_metadata(custom, handlers)} if custom or handlers else {}
        if custom:
            path = layout.in_item(item, layout.TREE_METADATA)
            files[path] = orbax_metadata.with_custom_metadata(tree_metadata, custom)
        if self.note is not None:
            files[layout.NOTE] = self.note.encode()
        return files


def check_custom_metadata(custom_metadata: Any) -> None:
    """Raises CheckpointRefused if ``custom_metadata`` is not a dict that comes back from JSON as it is."""
    try:
        comes_back = json.loads(json.dumps(custom_metadata)) == custom_metadata and isinstance(custom_metadata, dict)
    except (TypeError, ValueError) as error:
        raise CheckpointRefused(f"custom_metadata: expected a dict of JSON values: {error}") from error
    if not comes_back:
        raise CheckpointRefused(
            f"custom_metadata: expected a dict of JSON values, with strings as keys, found {shown(custom_metadata)}"
        )


def check_items(items: Mapping[str, Any], handlers: Mapping[str, ItemHandler]) -> None:
    """Raises CheckpointRefused if an item has no handler."""
    if unknown := [name for name in items if name not in handlers]:
        raise CheckpointRefused(
            f"item {unknown[0]!r} has no handler: give one with item_handlers={{{unknown[0]!r}: ...}}, for example "
            "orbax.checkpoint.JsonCheckpointHandler()"
        )


NO_EXTRAS = SaveExtras()


class HandledItems:
    """The items of one save. There is at least one."""

    def __init__(self, folder: StoragePath, extras: SaveExtras) -> None:
        """``folder`` is the folder that is written to before the commit."""
        self._folder = folder
        self._extras = extras

    def save(self) -> None:
        """Has each handler write its item. After this returns, the arguments may change.

        Raises:
            CheckpointRefused: The store is not a file system, to which handlers write.
            OSError: The folder cannot be created.
        """
        for name, args in self._extras.items.items():
            place = self._folder / name
            directory = local_folder(place, name)
            place.make_folder_durably()
            self._extras.handlers[name].save(directory, args=args)

    def record(self) -> dict[str, StoredFile]:
        """Finalizes the items, once all processes have written. Returns their files. Only one process calls it.

        Raises:
            SaveFailed: A handler wrote nothing.
        """
        found: dict[str, StoredFile] = {}
        for name in self._extras.items:
            place = self._folder / name
            if finalize := getattr(self._extras.handlers[name], "finalize", None):
                finalize(place.local())
            files = {path: StoredFile(size, checksum) for path, size, checksum in record_files(place, self._folder)}
            if not files:
                raise SaveFailed(f"item {name!r}: its handler wrote nothing to {place}")
            found |= files
        return found
