"""Moves the objects of a durable save from its own folder into its step, in a store that cannot rename.

This happens only if the step had another save, or was being deleted, while the save was written. One process moves all
objects, through its memory. This module has no threads of its own and no state.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.claim import Claim
from gracepoint.checkpoint.format.layout import Temporary
from gracepoint.checkpoint.format.manifest import Manifest, StoredFile
from gracepoint.checkpoint.memory.array_bytes import ArrayBytes
from gracepoint.checkpoint.steps.object_store.object_deletion import store_of
from gracepoint.checkpoint.steps.object_store.object_layout import Placement
from gracepoint.checkpoint.storage.backend import Generation
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.checksum import crc32

#: Bytes that a process has in memory while it moves the objects of a save, unless one object is larger.
MOVED_AT_ONCE_BYTES = 64 << 20


def move(
    temporary: Temporary, claim: Claim, staged: Mapping[str, StoredFile], go_on: Callable[[], None] | None
) -> dict[str, Generation] | None:
    """Moves objects from the save's folder into the step's. Returns their generations.

    Returns None if the step was committed meanwhile.
    """
    store = store_of(temporary.target)
    placement = Placement(temporary, claim, store, staged=False)
    moved: dict[str, Generation | None] = {}

    def move_one(path: str, file: StoredFile) -> None:
        noted = store.noted((temporary.target / path).key)
        by = None if noted is None else Claim.noted(noted.note)
        if noted is not None and by is not None and by.is_same(claim):
            moved[path] = noted.generation  # an earlier try has moved it
            return
        data = np.empty(file.bytes, np.uint8)
        read_checked(temporary.path / path, file.bytes, file.crc32, data.data)
        moved[path] = placement.put_in_place(path, ArrayBytes(data, data.dtype), file.crc32, go_on)

    for batch in _batches(staged):
        if go_on is not None:
            go_on()
        store.at_once(functools.partial(move_one, path, staged[path]) for path in batch)
        if None in moved.values():
            return None
    return {path: generation for path, generation in moved.items() if generation is not None}


def _batches(files: Mapping[str, StoredFile]) -> Iterator[list[str]]:
    """Yields all paths, as many at a time as fit into the memory for a move, and at least one."""
    batch: list[str] = []
    size_bytes = 0
    for path, file in files.items():
        if batch and size_bytes + file.bytes > MOVED_AT_ONCE_BYTES:
            yield batch
            batch, size_bytes = [], 0
        batch.append(path)
        size_bytes += file.bytes
    if batch:
        yield batch


def merge_trees(temporary: Temporary, claim: Claim, manifest: Manifest, go_on: Callable[[], None] | None) -> bool:
    """Merges the OCDBT trees of all processes into one. Returns False if the step was committed meanwhile."""
    below = layout.in_item(manifest.item, "")
    trees = [
        path.removeprefix(below).removesuffix(f"/{ocdbt.MANIFEST}")
        for path in manifest.files
        if path.startswith(below) and path.endswith(f"/{ocdbt.MANIFEST}")
    ]
    item, placement = (
        temporary.target / manifest.item,
        Placement(temporary, claim, store_of(temporary.target), staged=False),
    )
    noted = placement.noted((item / ocdbt.MANIFEST).key)
    by = None if noted is None else Claim.noted(noted.note)
    if by is not None and by.is_same(claim):
        return True  # an earlier try has merged them
    files = ocdbt.merged_apart(item, trees)
    for path in sorted(files, key=lambda path: path == ocdbt.MANIFEST):  # the manifest last
        data = np.frombuffer(files[path], np.uint8)
        name = layout.in_item(manifest.item, path)
        if placement.put_in_place(name, ArrayBytes(data, data.dtype), crc32(files[path]), go_on) is None:
            return False
    return True
