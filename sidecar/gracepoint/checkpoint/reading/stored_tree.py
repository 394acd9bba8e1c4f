"""Opens the train state of a checkpoint of Gracepoint or Orbax: its tree, its arrays' types, and their values' source.

Opening reads metadata only. Data that has a checksum in the manifest is checked when it is read. ``open_leaves`` opens
leaves that handlers stored in a folder without tree metadata; the format is detected from the files.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import tensorstore as ts

from gracepoint.checkpoint.format import layout, ocdbt, orbax_metadata, pytree, records
from gracepoint.checkpoint.format.array_spec import ArraySpec
from gracepoint.checkpoint.format.records import Manifest
from gracepoint.checkpoint.reading.stored_arrays import (
    ArraySource,
    array_metadatas,
    json_object,
    open_arrays,
    source_by_manifest,
)
from gracepoint.checkpoint.steps import listing
from gracepoint.checkpoint.storage import storage_path
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checksum import crc32
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt

logger = logging.getLogger(__name__)

_SMALL = (layout.TREE_METADATA, layout.SHARDING)
_EMPTY: Mapping[str, Any] = {"Dict": {}, "List": [], "Tuple": (), "None": None, "NamedTuple": None}


@dataclasses.dataclass(frozen=True)
class StoredLeaf:
    """One leaf as it is stored.

    Attributes:
        name: The keys of the leaf, joined by dots.
        keys: The keys of the leaf, each with Orbax's key type.
        value_type: Orbax's name for the kind of value: "jax.Array", "np.ndarray", "scalar", "string", ...
        spec: What is stored of the array. None if the leaf is not an array.
        text: The value of a string. None if the leaf is not a string.
        sharding: The recorded sharding that the leaf was saved with. None if none was recorded.
        write_shape: Shape of the part of a shard that one process wrote. None if it is not recorded.
    """

    name: str
    keys: tuple[tuple[str, int], ...]
    value_type: str
    spec: ArraySpec | None = None
    text: str | None = None
    sharding: Mapping[str, Any] | None = None
    write_shape: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True)
class StoredTree:
    """An opened checkpoint.

    Attributes:
        folder: The folder of the checkpoint.
        leaves: The leaves by name.
        empty: Empty containers and None values, by their keys.
        manifest: The manifest. None if Orbax wrote the checkpoint.
        source: The source of the arrays' values.
        item: The folder of the train state: ``folder`` or a folder in it.
        custom_metadata: The custom metadata that was saved with the tree.
        ahead: Small files of the checkpoint that have been read, by path.
    """

    folder: StoragePath
    leaves: Mapping[str, StoredLeaf]
    empty: Mapping[tuple[tuple[str, int], ...], Any]
    manifest: Manifest | None
    source: ArraySource
    item: StoragePath
    custom_metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ahead: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def nested(self) -> Any:
        """Returns the tree, with a ``StoredLeaf`` at each leaf.

        Containers are dicts and lists. For other containers, Orbax's metadata has only names or positions.

        Raises:
            CheckpointCorrupt: The keys contradict each other.
        """
        nodes: dict[tuple[tuple[str, int], ...], Any] = {leaf.keys: leaf for leaf in self.leaves.values()}
        return _nested(nodes | dict(self.empty), self.folder)

    def host_state(self, process_index: int) -> bytes | bytearray:
        """Returns the saved host state of a process. The checkpoint must have a manifest.

        Raises:
            CheckpointCorrupt: The file is missing or damaged.
        """
        assert self.manifest is not None
        return _checked(self.folder, layout.host_state_file(process_index), self.manifest, self.ahead)

    def note(self) -> str | None:
        """Returns the text that was saved for whoever restores the step. None if there is none, or it is damaged."""
        if self.manifest is None or layout.NOTE not in self.manifest.files:
            return None
        try:
            return _checked(self.folder, layout.NOTE, self.manifest, self.ahead).decode()
        except CheckpointCorrupt as error:  # the state does not depend on it
            logger.warning("cannot read the note of the step, restoring without it: %s", error)
            return None


def open_tree(
    folder: StoragePath, deadline: Deadline, *, preferred: str = layout.STATE_ITEM, also: Sequence[str] = ()
) -> StoredTree:
    """Opens the checkpoint of a step, or a checkpoint that has its own path.

    In a store that is far, each file takes a round trip. There the small files are read in parallel, by the names that
    they usually have.

    Args:
        folder: The folder of the checkpoint.
        deadline: The deadline for opening.
        preferred: The item that holds the train state, if Orbax wrote the step with several trees of arrays.
        also: Paths of other small files that the caller is going to ask for. They need not exist.

    Raises:
        CheckpointCorrupt: The metadata is missing or damaged.
        CheckpointRefused: Values are in a format of the past, which is not supported.
        TimeoutError: The deadline passed.
    """
    ahead, missing = dict[str, bytes](), list[str]()
    if not folder.is_far:
        manifest = records.read_manifest(folder)
    else:
        likely = preferred if folder.name.isdecimal() else layout.NO_ITEM  # steps have items
        missing = [*(layout.in_item(likely, name) for name in _SMALL), *also]
        ahead = _read_ahead(folder, missing)
        manifest = records.manifest_in(ahead.pop(layout.MANIFEST, b""), folder) if layout.MANIFEST in ahead else None
    if manifest is not None:
        item_name = manifest.item
    elif (folder / layout.TREE_METADATA).is_value():
        item_name = layout.NO_ITEM
    else:
        item_name = listing.state_item(folder, preferred) or preferred
    item = folder / item_name

    def small(name: str) -> Any:
        return json_object(_checked(folder, layout.in_item(item_name, name), manifest, ahead), item / name)

    metadata = small(layout.TREE_METADATA)
    leaves, empty = _leaves(metadata, item)
    if manifest is not None:
        specs = {spec.name: spec for spec in manifest.arrays}
        source = source_by_manifest(manifest, folder, deadline)
    else:
        value_types = {leaf.name: leaf.value_type for leaf in leaves}
        specs, source = open_arrays(item, metadata, value_types, deadline)
    write_shapes: dict[str, tuple[int, ...] | None]
    if manifest is not None:
        write_shapes = {name: spec.write_shape or spec.chunk for name, spec in specs.items()}
    else:
        write_shapes = {name: recorded.write_shape for name, recorded in array_metadatas(item).items()}
    strings = small(layout.STRINGS) if any(leaf.value_type == pytree.STRING for leaf in leaves) else {}
    of_shardings = layout.in_item(item_name, layout.SHARDING)
    has_shardings = of_shardings in ahead if of_shardings in missing else (item / layout.SHARDING).is_value()
    shardings = orbax_metadata.recorded_shardings(small(layout.SHARDING), str(item)) if has_shardings else {}
    stored_leaves = {
        leaf.name: dataclasses.replace(
            leaf,
            spec=specs.get(leaf.name),
            text=text_of(strings, leaf.name, item) if leaf.value_type == pytree.STRING else None,
            sharding=shardings.get(leaf.name),
            write_shape=write_shapes.get(leaf.name),
        )
        for leaf in leaves
    }
    if lost := [spec for spec in specs if spec not in stored_leaves]:
        raise CheckpointCorrupt(
            f"{item / layout.TREE_METADATA} does not have array {lost[0]!r}, which the manifest has"
        )
    custom, remaining = metadata.get("custom_metadata") or {}, {path: ahead[path] for path in also if path in ahead}
    return StoredTree(folder, stored_leaves, empty, manifest, source, item, custom, remaining)


def _read_ahead(folder: StoragePath, paths: Sequence[str]) -> dict[str, bytes]:
    """Returns the manifest and ``paths`` that exist, by path below ``folder``."""
    contents = storage_path.read_existing([folder / path for path in (layout.MANIFEST, *paths)])
    return {path.below(folder): data for path, data in contents.items()}


def _leaves(
    metadata: Mapping[str, Any], item: StoragePath
) -> tuple[list[StoredLeaf], dict[tuple[tuple[str, int], ...], Any]]:
    leaves, empty, aggregated = [], {}, []
    try:
        for entry in metadata["tree_metadata"].values():
            keys = tuple((str(key["key"]), int(key["key_type"])) for key in entry["key_metadata"])
            value_type = entry["value_metadata"]["value_type"]
            if value_type in _EMPTY:
                empty[keys] = _EMPTY[value_type]
            else:
                leaves.append(StoredLeaf(pytree.name_of(keys), keys, value_type))
                if entry["value_metadata"].get("skip_deserialize"):
                    aggregated.append(leaves[-1].name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(f"{item / layout.TREE_METADATA} cannot be read: {error!r}") from error
    listing.refuse_aggregated(item, aggregated)
    return leaves, empty


def _checked(
    folder: StoragePath, path: str, manifest: Manifest | None, ahead: Mapping[str, bytes]
) -> bytes | bytearray:
    """Returns the contents of a small file, from ``ahead`` if it is there. Checks them if there is a manifest."""
    if manifest is None:
        try:
            return ahead[path] if path in ahead else (folder / path).read_bytes()
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{folder / path} is missing") from None
    if path not in manifest.files:
        raise CheckpointCorrupt(f"{folder / layout.MANIFEST} does not have {path}")
    file = manifest.files[path]
    if path in ahead and (len(ahead[path]), crc32(ahead[path])) == (file.bytes, file.crc32):
        return ahead[path]
    # It was not read ahead, or it is damaged, or the step was replaced between the manifest and the file.
    data = bytearray(file.bytes)
    read_checked(folder / path, len(data), file.crc32, memoryview(data))
    return data


def text_of(strings: Any, name: str, item: StoragePath) -> str:
    """Returns a string from Orbax's file of strings. Names in it are JSON pointers: slashes separate levels."""
    try:
        for part in name.split("/"):
            strings = strings[part.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        raise CheckpointCorrupt(f"{item / layout.STRINGS} does not have {name!r}") from None
    return str(strings)


def _nested(nodes: Mapping[tuple[tuple[str, int], ...], Any], folder: StoragePath) -> Any:
    if list(nodes) == [()]:
        return nodes[()]
    children: dict[tuple[str, int], dict[Any, Any]] = {}
    for keys, node in nodes.items():
        if not keys:
            raise CheckpointCorrupt(f"{folder}: its tree has a leaf where it has a container")
        children.setdefault(keys[0], {})[keys[1:]] = node
    if {key_type for _, key_type in children} == {
        pytree.SEQUENCE
    }:  # a node may have both, as nnx.List has: a dict then
        return [_nested(children[key], folder) for key in sorted(children, key=lambda key: int(key[0]))]
    return {name: _nested(below, folder) for (name, _), below in children.items()}


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
    shardings = (
        orbax_metadata.recorded_shardings(json_object(path.read_bytes(), path), str(path)) if path.is_value() else {}
    )
    write_shapes = {name: entry.write_shape for name, entry in array_metadatas(folder).items()}
    stored = {
        leaf.name: dataclasses.replace(
            leaf,
            spec=specs[leaf.name],
            sharding=shardings.get(leaf.name),
            write_shape=write_shapes.get(leaf.name),
        )
        for leaf in leaves
    }
    return StoredTree(folder, stored, {}, None, source, folder)
