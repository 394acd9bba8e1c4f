"""All that handlers of the user's write in one save: leaves of the state, and items beside it.

The caller's thread has them copied or written. The save's thread waits until that is done in all processes. After
that, no process writes these files any more, and process 0 records them in its done-record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.manifest import StoredFile
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.options import SaveArgs
from gracepoint.checkpoint.saving.operation.handled_leaves import HandledLeaves
from gracepoint.checkpoint.saving.operation.save_extras import HandledItems, SaveExtras
from gracepoint.deadline import Deadline
from gracepoint.process_group import ProcessGroup


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
