"""What a checkpoint holds next to the state: custom metadata, a note, and items that handlers of the user's write.

An item is a folder below the step's folder. Its handler has the interface of Orbax's ``CheckpointHandler``, so that
Orbax's own handlers, and those of other libraries for Orbax, can be used.

All that handlers of the user's write in one save: leaves of the state, and items next to it.

The caller's thread has them copied or written. The save's thread waits until that is done in all processes. After
that, no process writes these files any more, and process 0 records them in its done-record.

The leaves of one save that type handlers write, and the record of their files.

The caller's thread calls ``serialize``. The save's thread waits for the handlers' futures, and then for the other
processes. After that no process writes these files any more. Process 0 finalizes them, and records them in its
done-record. So a save is durable only with these files, and a restore checks them like all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from gracepoint.arguments import shown
from gracepoint.checkpoint.format import layout, orbax_metadata
from gracepoint.checkpoint.format.layout import Layout, Temporary, in_item
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.format.records import StoredFile
from gracepoint.checkpoint.handler_registry import HandlerRegistry, ItemHandler, ParamInfo, TypeHandler
from gracepoint.checkpoint.options import SaveArgs
from gracepoint.checkpoint.storage.checks import record_files
from gracepoint.checkpoint.storage.locations import local_folder
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointRefused, SaveFailed
from gracepoint.process_group import ProcessGroup


@dataclasses.dataclass(frozen=True)
class SaveExtras:
    """What one save has next to its state. Equal in all processes, except for the arguments of items.

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
        files_of_all: dict[str, StoredFile] = {}
        for name in self._extras.items:
            place = self._folder / name
            if finalize := getattr(self._extras.handlers[name], "finalize", None):
                finalize(place.local())
            files = {path: StoredFile(size, checksum) for path, size, checksum in record_files(place, self._folder)}
            if not files:
                raise SaveFailed(f"item {name!r}: its handler wrote nothing to {place}")
            files_of_all |= files
        return files_of_all


_LOOK_EVERY_S = 0.1


class HandledLeaves:
    """The handled leaves of one save. There is at least one."""

    def __init__(self, temporary: Temporary, paths: Layout, leaves: Sequence[Leaf], handlers: HandlerRegistry) -> None:
        self._temporary = temporary
        self._item = paths.item
        self._folder = temporary.path / paths.item
        try:
            self._folder.local()
        except TypeError as error:
            raise CheckpointRefused(
                f"leaf {leaves[0].name!r} has a type handler, which writes files itself: {temporary.target} is in no "
                "file system. Save such leaves to one, or as arrays"
            ) from error
        self._by_handler: dict[int, tuple[TypeHandler, list[Leaf]]] = {}
        for leaf in leaves:
            handler = handlers.get(leaf.value_type)
            self._by_handler.setdefault(id(handler), (handler, []))[1].append(leaf)
        self._futures: list[tuple[str, Future[Any]]] = []

    def serialize(self, args: Mapping[str, SaveArgs]) -> None:
        """Calls each handler with its leaves. After this returns, their values may change.

        Raises:
            CheckpointError: A handler refused a leaf.
            OSError: The folder cannot be created.
        """
        self._folder.make_folder_durably()
        for handler, leaves in self._by_handler.values():
            futures = handler.serialize(
                [leaf.data for leaf in leaves],
                [ParamInfo(leaf.name, self._folder.local(), leaf.path) for leaf in leaves],
                [args.get(leaf.name, SaveArgs()) for leaf in leaves],
            )
            self._futures += [(handler.typestr, future) for future in futures]

    def wait(self, deadline: Deadline) -> None:
        """Waits until the handlers of this process have written.

        Raises:
            SaveFailed: A handler did not finish in time.
        """
        for typestr, future in self._futures:
            while not future.done():
                deadline.check_not_cancelled()
                if deadline.passed():
                    raise SaveFailed(f"the handler of {typestr!r} was not done {deadline.ended}")
                with contextlib.suppress(TimeoutError):
                    future.exception(timeout=min(_LOOK_EVERY_S, deadline.remaining_s()))
            future.result()

    def record(self) -> dict[str, StoredFile]:
        """Finalizes the leaves, once all processes have written. Returns their files. Only process 0 calls it.

        Raises:
            SaveFailed: A handler wrote nothing for a leaf.
        """
        files_of_all: dict[str, StoredFile] = {}
        for handler, leaves in self._by_handler.values():
            handler.finalize(self._folder.local())
            for leaf in leaves:
                files = dict(self._files_of(leaf))
                if not files:
                    raise SaveFailed(
                        f"leaf {leaf.name!r}: the handler of {handler.typestr!r} wrote nothing to ParamInfo.path, "
                        f"{self._folder / leaf.name}; what it writes elsewhere is not part of the checkpoint"
                    )
                files_of_all |= files
        return files_of_all

    def _files_of(self, leaf: Leaf) -> Mapping[str, StoredFile]:
        top = self._folder
        return {
            in_item(self._item, name): StoredFile(size, checksum)
            for name, size, checksum in record_files(top / leaf.name, top)
        }


class HandledParts:
    """What handlers write in one save. Usually nothing."""

    def __init__(
        self,
        temporary: Temporary,
        paths: Layout,
        leaves: Sequence[Leaf],
        handlers: HandlerRegistry | None,
        extras: SaveExtras,
    ) -> None:
        """``leaves`` are all leaves of the state."""
        handled = [leaf for leaf in leaves if leaf.is_handled]
        self._leaves = HandledLeaves(temporary, paths, handled, handlers) if handled and handlers is not None else None
        self._items = HandledItems(temporary.path, extras) if extras.items else None

    def __bool__(self) -> bool:
        """True if handlers write anything."""
        return self._leaves is not None or self._items is not None

    def begin(self, args: Mapping[str, SaveArgs]) -> None:
        """Has the handlers copy or write their parts. After this returns, the values may change.

        Raises:
            CheckpointError: A handler refused a leaf.
            OSError: A folder cannot be created.
        """
        if self._leaves is not None:
            self._leaves.serialize(args)
        if self._items is not None:
            self._items.save()

    def record(self, gang: ProcessGroup, key: str, deadline: Deadline) -> dict[str, StoredFile]:
        """Waits until the handlers of all processes have written. Returns the files that this process records.

        Raises:
            SaveFailed: A handler did not finish in time, or wrote nothing.
            BarrierError: Another process did not come in time, or has failed.
        """
        if not self:
            return {}
        if self._leaves is not None:
            self._leaves.wait(deadline)
        gang.barrier(key, timeout_s=deadline.remaining_s())
        if gang.process_index != 0:
            return {}
        parts = [part for part in (self._leaves, self._items) if part is not None]
        return {path: file for part in parts for path, file in part.record().items()}
