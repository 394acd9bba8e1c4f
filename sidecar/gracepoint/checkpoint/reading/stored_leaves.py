"""Opens leaves that handlers stored in a folder without tree metadata. The format is detected from the files."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorstore as ts

from gracepoint.checkpoint.format import layout, ocdbt, sharding_file
from gracepoint.checkpoint.reading.stored_arrays import array_metadatas, json_object, open_arrays
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf, StoredTree
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline


def open_leaves(folder: StoragePath, leaves: Sequence[StoredLeaf], deadline: Deadline) -> StoredTree:
    """Opens leaves that are arrays.

    Args:
        folder: The folder of the tree.
        leaves: The names and kinds of the leaves. All are stored in the same format.
        deadline: The deadline for opening.

    Raises:
        CheckpointCorrupt: A leaf is missing, or its metadata is damaged. The message names the leaf.
        TimeoutError: The deadline passed.
    """
    has_files = any((folder / leaf.name / name).is_value() for leaf in leaves for name in (".zarray", "zarr.json"))
    in_ocdbt = not has_files and (folder / ocdbt.MANIFEST).is_value()  # files first: other handlers' tree may be there
    files = ocdbt.kvstore(folder) if in_ocdbt else folder.kvstore_spec()
    store = ts.KvStore.open(files, context=ocdbt.context()).result(timeout=deadline.remaining_s())
    zarr3 = store.read(f"{leaves[0].name}/zarr.json").result(timeout=deadline.remaining_s()).state == "value"
    metadata = {"use_ocdbt": in_ocdbt, "use_zarr3": zarr3, "store_array_data_equal_to_fill_value": True}
    specs, source = open_arrays(folder, metadata, {leaf.name: leaf.value_type for leaf in leaves}, deadline)
    path = folder / layout.SHARDING
    shardings = sharding_file.parse(json_object(path.read_bytes(), path), str(path)) if path.is_value() else {}
    write_shapes = {name: found.write_shape for name, found in array_metadatas(folder).items()}
    found = {
        leaf.name: dataclasses.replace(
            leaf,
            spec=specs[leaf.name],
            sharding=shardings.get(leaf.name),
            write_shape=write_shapes.get(leaf.name),
        )
        for leaf in leaves
    }
    return StoredTree(folder, found, {}, None, source, folder)
