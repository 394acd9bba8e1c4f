"""Checkpoints in OCDBT, TensorStore's B+tree format: one tree for each process, merged before the commit.

A process writes its chunks into ``ocdbt.process_<N>/`` below the item's folder. Merging writes a tree of its own
beside these, which refers to their data files and copies no values; readers open that one. Its file appears whole,
by a rename, and last: a merge that was stopped is done again, and one that is done is left alone. So any number of
processes may merge, at once too; who finds that the folder was renamed meanwhile has lost the race, and may leave an
empty folder of the old name behind, which a later start deletes.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import Any

import tensorstore as ts

from gracepoint.checkpoint.storage.storage_path import StoragePath, sync_folders
from gracepoint.checkpoint.storage.tensorstore_context import new_context
from gracepoint.errors import CheckpointCorrupt

MANIFEST = "manifest.ocdbt"
#: How long to wait for a merge, which reads and writes only a B+tree's nodes.
MERGE_TIMEOUT_S = 300.0

_CACHE_BYTES = 100_000_000  # of B+tree nodes, while a tree is written


def process_folder(process_index: int) -> str:
    return f"ocdbt.process_{process_index}"


def context(**resources: Any) -> ts.Context:
    """Returns a context for one save: nodes are cached until it goes, and files are synced."""
    return new_context({"cache_pool#ocdbt": {"total_bytes_limit": _CACHE_BYTES}, "file_io_sync": True, **resources})


def kvstore(folder: StoragePath, path: str = "") -> dict[str, Any]:
    """Returns TensorStore's spec of the tree in ``folder``, for keys that begin with ``path``."""
    return {
        "driver": "ocdbt",
        "base": folder.kvstore_spec(),
        "path": path,
        # Values of Orbax's own: metadata is kept in the nodes, and there is one node, as long as it is not huge.
        "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
        "assume_config": True,  # there is no other writer to agree on it with
        "cache_pool": "cache_pool#ocdbt",
    }


def merge(item: StoragePath, process_count: int) -> None:
    """Makes the trees of ``process_count`` processes below ``item`` one, durably.

    Raises:
        CheckpointCorrupt: One cannot be read.
        FileNotFoundError: ``item`` went away meanwhile: who was quicker has renamed it.
        TimeoutError: It took longer than ``MERGE_TIMEOUT_S``.
    """
    with item.staying() as stayed:
        if not (item / MANIFEST).exists():
            try:
                _merge(item, [item / process_folder(process) for process in range(process_count)])
            except ValueError as error:
                if stayed():
                    raise CheckpointCorrupt(f"{item}: the processes' OCDBT trees cannot be merged: {error}") from error
        if not stayed():
            raise FileNotFoundError(errno.ENOENT, "the folder was renamed meanwhile", str(item))
    sync_folders([item, item / "d"])  # also of a tree that another process has merged just now


def new_folder(item: StoragePath, numbers: Iterable[int]) -> StoragePath:
    """Makes and returns the folder of a tree that only the caller writes: the first of ``numbers`` that is free.

    Raises:
        FileExistsError: None is free.
    """
    taken = item
    for number in numbers:
        taken = item / process_folder(number)
        try:
            taken.make_folder(parents=False, exclusive=True)
        except FileExistsError:
            continue
        return taken
    raise FileExistsError(errno.EEXIST, "expected no OCDBT tree here yet, found one of another writer", str(taken))


def merge_again(item: StoragePath) -> None:
    """Makes all trees below ``item`` one, with what was merged before; of one key's values the last tree's counts.

    For one process, and trees that nobody writes any more.

    Raises:
        CheckpointCorrupt: One cannot be read.
        TimeoutError: It took longer than ``MERGE_TIMEOUT_S``.
    """
    numbers = [
        int(child.name.rpartition("_")[2]) for child in item.children() if child.name.startswith(process_folder(0)[:-1])
    ]
    folders = [item / process_folder(number) for number in sorted(numbers)]
    whole = [folder for folder in folders if (folder / MANIFEST).is_value()]
    try:
        for folder in whole:
            _merge(item, [folder])
    except ValueError as error:
        raise CheckpointCorrupt(f"{item}: OCDBT trees cannot be merged: {error}") from error
    if whole:
        sync_folders([item, item / "d"])


def _merge(item: StoragePath, folders: Sequence[StoragePath]) -> None:
    # TensorStore syncs files and the folders that they are in, but not the entry of a folder that it makes. Without it
    # a crash may leave the tree's manifest, by which the merge counts as done, and not what that refers to.
    (item / "d").make_folder(parents=False)
    sync_folders([item])
    merging = context()
    transaction = ts.Transaction(atomic=True)
    merged = ts.KvStore.open(kvstore(item), context=merging).result(timeout=MERGE_TIMEOUT_S)
    copying = [
        ts.KvStore.open(kvstore(folder), context=merging)
        .result(timeout=MERGE_TIMEOUT_S)
        .experimental_copy_range_to(merged.with_transaction(transaction))
        for folder in folders
        if folder.is_folder()  # a process that holds nothing that it must write has none
    ]
    for copied in copying:
        copied.result(timeout=MERGE_TIMEOUT_S)
    transaction.commit_async().result(timeout=MERGE_TIMEOUT_S)
