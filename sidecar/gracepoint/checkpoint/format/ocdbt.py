"""Checkpoints in OCDBT, TensorStore's B+tree format: one tree for each process, merged before the commit.

A process writes its chunks into ``ocdbt.process_<N>/`` below the item's folder. Merging writes another tree next to
these. The merged tree refers to their data files, so no values are copied. Readers open the merged tree.

The manifest of the merged tree is made in memory. It is written last, and appears as a whole by a rename. A merge that
was interrupted is repeated; a completed merge is left as it is. So any number of processes may merge, even at once and
without locks: each makes a whole tree, whose files have unique names, and any of the manifests may win. If a process
finds that the folder was renamed meanwhile, another process was faster. The slower process may leave an empty folder of
the old name behind, which a later start deletes.

In a store that cannot rename, a process writes several small trees, each into a folder ``ocdbt.process_<N>.<hex>/``.
``merged_apart`` merges them, and ``steps.manifest_commit`` writes the result.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from gracepoint.checkpoint.storage.storage_path import StoragePath, sync_folders
from gracepoint.errors import CheckpointCorrupt

if TYPE_CHECKING:
    import tensorstore as ts

MANIFEST = "manifest.ocdbt"
#: Timeout of a merge. A merge only reads and writes nodes of B+trees.
MERGE_TIMEOUT_S = 300.0

#: Where a merged tree is until it is written: in a memory that the context of one merge has for itself.
_MEMORY = "memory_key_value_store#merged"
_MERGED = {"driver": "memory", "path": "merged/", "memory_key_value_store": _MEMORY}

_CACHE_BYTES = 100_000_000  # of B+tree nodes, while a tree is written


def process_folder(process_index: int) -> str:
    return f"ocdbt.process_{process_index}"


def context(**resources: Any) -> ts.Context:
    """Returns a context for one save. It caches nodes as long as it lives, and syncs files."""
    from gracepoint.checkpoint.storage.in_memory import new_context  # needs TensorStore

    return new_context({"cache_pool#ocdbt": {"total_bytes_limit": _CACHE_BYTES}, "file_io_sync": True, **resources})


def kvstore(folder: StoragePath, path: str = "", *, data_file_bytes: int | None = None) -> dict[str, Any]:
    """Returns TensorStore's spec of the tree in ``folder``, limited to keys that begin with ``path``.

    ``data_file_bytes`` is the size at which another data file is begun. None: TensorStore's default. 0: no limit.
    """
    limit = {} if data_file_bytes is None else {"target_data_file_size": data_file_bytes}
    return limit | kvstore_in(folder.kvstore_spec(), path)


def kvstore_in(base: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Returns TensorStore's spec of the tree in the store ``base``, limited to keys that begin with ``path``."""
    return {
        "driver": "ocdbt",
        "base": base,
        "path": path,
        # The values that Orbax uses. Metadata is stored in the nodes, and a tree has one node unless it is huge.
        "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "manifest_kind": "single"},
        "assume_config": True,  # no other writer uses the tree
        "cache_pool": "cache_pool#ocdbt",
    }


def merge(item: StoragePath, process_count: int) -> None:
    """Merges the trees of ``process_count`` processes below ``item`` into one, durably.

    Raises:
        CheckpointCorrupt: A tree cannot be read.
        FileNotFoundError: ``item`` no longer exists, as a faster process has renamed it.
        TimeoutError: The merge took longer than ``MERGE_TIMEOUT_S``.
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
    sync_folders([item, item / "d"])  # even if another process has just merged the tree


def merged_apart(item: StoragePath, folders: Iterable[str]) -> dict[str, bytes]:
    """Merges the trees in ``folders`` of ``item`` into one, which is not written to ``item``.

    Returns:
        The files of the merged tree by path below ``item``. They refer to the files of the other trees.

    Raises:
        CheckpointCorrupt: A tree cannot be read.
        TimeoutError: The merge took longer than ``MERGE_TIMEOUT_S``.
    """
    import tensorstore as ts

    files = {"prefix": "d/", "strip_prefix": 0, "base": _MERGED}
    merging = context(**{_MEMORY: {}})
    try:
        _copy_all(item, folders, [files], merging)
        merged = ts.KvStore.open(_MERGED, context=merging).result(timeout=MERGE_TIMEOUT_S)
        keys = merged.list().result(timeout=MERGE_TIMEOUT_S)
        return {key.decode(): merged.read(key).result(timeout=MERGE_TIMEOUT_S).value for key in keys}
    except ValueError as error:
        raise CheckpointCorrupt(f"{item}: the processes' OCDBT trees cannot be merged: {error}") from error


def new_folder(item: StoragePath, numbers: Iterable[int]) -> StoragePath:
    """Makes and returns a folder for a tree that only the caller writes. Uses the first of ``numbers`` that is free.

    Raises:
        FileExistsError: No number is free.
    """
    sibling = item
    for number in numbers:
        sibling = item / process_folder(number)
        try:
            sibling.make_folder(parents=False, exclusive=True)
        except FileExistsError:
            continue
        return sibling
    raise FileExistsError(errno.EEXIST, "expected no OCDBT tree here yet, found one of another writer", str(sibling))


def merge_again(item: StoragePath) -> None:
    """Merges all trees below ``item`` into one, which may already contain merged values.

    For each key, the value of the last tree counts. Only one process may call it, after all writes to the trees have
    ended.

    Raises:
        CheckpointCorrupt: A tree cannot be read.
        TimeoutError: A merge took longer than ``MERGE_TIMEOUT_S``.
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
    """Adds the trees in ``folders`` to the merged tree, which may be there already."""
    import tensorstore as ts

    # TensorStore syncs files and their folders, but not the entry of a folder that it makes. Without this sync, a
    # crash may leave the tree's manifest, which marks the merge as complete, without the files that it refers to.
    (item / "d").make_folder(parents=False)
    sync_folders([item])
    trees = [folder.name for folder in folders if folder.is_folder()]  # a process that writes no chunk has no tree
    merging = context(**{_MEMORY: {}})
    manifest = ts.KvStore.open(_MERGED, context=merging).result(timeout=MERGE_TIMEOUT_S)
    if (item / MANIFEST).is_value():
        manifest.write(MANIFEST, (item / MANIFEST).read_bytes()).result(timeout=MERGE_TIMEOUT_S)
    _copy_all(item, trees, [], merging)
    entry = manifest.read(MANIFEST).result(timeout=MERGE_TIMEOUT_S)
    if entry.state == "value":  # else there is nothing to merge
        sync_folders([item / "d"])
        (item / MANIFEST).put(entry.value)


def _copy_all(item: StoragePath, folders: Iterable[str], layers: list[dict[str, Any]], merging: ts.Context) -> None:
    """Copies the trees in ``folders`` of ``item`` into the tree of ``item``, whose manifest is in ``_MERGED``.

    Args:
        item: The folder.
        folders: Names of folders in it.
        layers: Where other keys of ``item`` are than in its own store, as layers of TensorStore's ``kvstack``.
        merging: The context of the merge.
    """
    import tensorstore as ts

    manifest = {"exact": MANIFEST, "strip_prefix": 0, "base": _MERGED}
    # A tree can refer to the files of another one only if both are in one store.
    store = {"driver": "kvstack", "layers": [{"base": item.kvstore_spec()}, *layers, manifest]}
    transaction = ts.Transaction(atomic=True)
    merged = ts.KvStore.open(kvstore_in({**store, "path": ""}), context=merging).result(timeout=MERGE_TIMEOUT_S)
    copying = [
        ts.KvStore.open(kvstore_in({**store, "path": f"{folder}/"}), context=merging)
        .result(timeout=MERGE_TIMEOUT_S)
        .experimental_copy_range_to(merged.with_transaction(transaction))
        for folder in folders
    ]
    for copied in copying:
        copied.result(timeout=MERGE_TIMEOUT_S)
    transaction.commit_async().result(timeout=MERGE_TIMEOUT_S)
