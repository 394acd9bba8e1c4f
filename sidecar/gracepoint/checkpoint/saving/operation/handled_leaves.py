"""The leaves of one save that type handlers write, and the record of their files.

The caller's thread calls ``serialize``. The save's thread waits for the handlers' futures, and then for the other
processes. After that no process writes these files any more. Process 0 finalizes them, and records them in its
done-record. So a save is durable only with these files, and a restore checks them like all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from gracepoint.checkpoint.format.layout import Layout, Temporary, in_item
from gracepoint.checkpoint.format.manifest import StoredFile
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.handler_registry import HandlerRegistry, ParamInfo, TypeHandler
from gracepoint.checkpoint.options import SaveArgs
from gracepoint.checkpoint.storage.recorded_files import record_files
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointRefused, SaveFailed

_LOOK_EVERY_S = 0.1


class HandledLeaves:
    """The handled leaves of one save. There is at least one."""

    def __init__(self, temporary: Temporary, paths: Layout, leaves: Sequence[Leaf], handlers: HandlerRegistry) -> None:
        if not temporary.path.backend.renames:
            raise CheckpointRefused(
                f"leaf {leaves[0].name!r} has a type handler, which writes files itself: {temporary.target} is in an "
                "object store. Save such leaves to a file system, or as arrays"
            )
        self._temporary = temporary
        self._item = paths.item
        self._folder = temporary.path / paths.item
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
        found: dict[str, StoredFile] = {}
        for handler, leaves in self._by_handler.values():
            handler.finalize(self._folder.local())
            for leaf in leaves:
                files = dict(self._files_of(leaf))
                if not files:
                    raise SaveFailed(
                        f"leaf {leaf.name!r}: the handler of {handler.typestr!r} wrote nothing to ParamInfo.path, "
                        f"{self._folder / leaf.name}; what it writes elsewhere is not part of the checkpoint"
                    )
                found |= files
        return found

    def _files_of(self, leaf: Leaf) -> Mapping[str, StoredFile]:
        top = self._folder
        return {
            in_item(self._item, name): StoredFile(size, checksum)
            for name, size, checksum in record_files(top / leaf.name, top)
        }
