"""Restores the leaves of one checkpoint that type handlers saved.

The handlers run in a thread that ends with their work. It is a daemon: storage that hangs keeps no process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.handler_registry import HandlerRegistry, ParamInfo, TypeHandler
from gracepoint.checkpoint.options import RestoreArgs
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, StoredTree
from gracepoint.checkpoint.storage.checks import check_contents
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointMismatch


def is_handled(stored: StoredLeaf, like: Any, handlers: HandlerRegistry | None) -> bool:
    """Returns whether a handler restores the leaf.

    Raises:
        CheckpointMismatch: ``like`` is of a type with a handler, and the leaf was saved as another type.
    """
    if handlers is None:
        return False
    wanted = handlers.get(type(like)).typestr if like is not None and handlers.has(type(like)) else None
    if wanted not in (None, stored.value_type):
        raise CheckpointMismatch(f"leaf {stored.name!r}: expected a {wanted}, found a {stored.value_type}")
    return handlers.has(stored.value_type)


def restore_handled(
    stored: StoredTree,
    wanted: Sequence[tuple[StoredLeaf, RestoreArgs]],
    handlers: HandlerRegistry | None,
    deadline: Deadline,
) -> list[Any]:
    """Returns the leaves, restored by their handlers.

    Raises:
        CheckpointCorrupt: A file is missing or damaged; names it.
        TimeoutError: The deadline passed; names a leaf.
    """
    if not wanted or handlers is None:
        return []
    by_handler: dict[int, tuple[TypeHandler, list[int]]] = {}
    for position, (leaf, _) in enumerate(wanted):
        handler = handlers.get(leaf.value_type)
        by_handler.setdefault(id(handler), (handler, []))[1].append(position)
    found: dict[int, Any] = {}

    def read() -> None:
        for leaf, _ in wanted:
            _check_files(stored, leaf)
        for handler, positions in by_handler.values():
            infos = [ParamInfo(wanted[position][0].name, stored.item.local()) for position in positions]
            values = handler.deserialize(infos, [wanted[position][1] for position in positions])
            found.update(zip(positions, values, strict=True))

    in_time(read, f"leaf {wanted[0][0].name!r}", deadline)
    return [found[position] for position in range(len(wanted))]


def handled_metadata(stored: StoredTree, handlers: HandlerRegistry | None, deadline: Deadline) -> Mapping[str, Any]:
    """Returns the metadata of handled leaves as their handlers return it, by the leaf's name. Values are not read.

    Raises:
        TimeoutError: The deadline passed; names a leaf.
    """
    leaves = [leaf for leaf in stored.leaves.values() if handlers is not None and handlers.has(leaf.value_type)]
    found: dict[str, Any] = {}

    def look() -> None:
        assert handlers is not None
        for leaf in leaves:
            info = ParamInfo(leaf.name, stored.item.local())
            found[leaf.name] = handlers.get(leaf.value_type).metadata([info])[0]

    if leaves:
        in_time(look, f"leaf {leaves[0].name!r}", deadline)
    return found


def in_time(function: Any, what: str, deadline: Deadline) -> None:
    """Calls ``function`` in a thread. Raises its error, or TimeoutError if it does not end by the deadline."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised by the calling thread
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name=f"gracepoint: handlers of {what}", daemon=True).start()
    try:
        future.result(timeout=deadline.remaining_s())
    except TimeoutError:
        if future.done():
            raise
        raise TimeoutError(what) from None


def _check_files(stored: StoredTree, leaf: StoredLeaf) -> None:
    if stored.manifest is None:
        return  # Orbax records no checksums
    path = layout.in_item(stored.manifest.item, leaf.name)
    files = {name: file for name, file in stored.manifest.files.items() if name == path or name.startswith(f"{path}/")}
    if not files:
        raise CheckpointCorrupt(f"{stored.folder / layout.MANIFEST} has no files of leaf {leaf.name!r}")
    for name, file in files.items():
        check_contents(stored.folder / name, file.bytes, file.crc32)
