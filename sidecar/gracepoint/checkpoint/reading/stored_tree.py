"""Opens the train state of a checkpoint of Gracepoint or Orbax: its tree, its arrays' types, and their values' source.

Opening reads metadata only. Data that has a checksum in the manifest is checked when it is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from gracepoint.checkpoint.format import layout, ocdbt, pytree, sharding_file
from gracepoint.checkpoint.format.array_spec import ArraySpec, Kind, folder_of_leaf, zarr_dtype
from gracepoint.checkpoint.format.manifest import Manifest
from gracepoint.checkpoint.reading.array_source import (
    ArraySource,
    CheckedStoredArrays,
    ChunkFiles,
    ChunkKeys,
    StoredArrays,
    chunk_shape,
)
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.checks import check_size, read_checked
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt

_STRINGS = "_strings.json"
_CHUNK_NAME = re.compile(r"\d+(\.\d+)*")
_KINDS: Mapping[str, Kind] = {"jax.Array": "array", "np.ndarray": "numpy", "scalar": "scalar"}
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
    """

    folder: StoragePath
    leaves: Mapping[str, StoredLeaf]
    empty: Mapping[tuple[tuple[str, int], ...], Any]
    manifest: Manifest | None
    source: ArraySource
    item: StoragePath

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
        return _checked(self.folder, layout.host_state_file(process_index), self.manifest)


def open_tree(folder: StoragePath, deadline: Deadline) -> StoredTree:
    """Opens the checkpoint of a step, or a checkpoint that has a path of its own.

    Raises:
        CheckpointCorrupt: The metadata is missing or damaged.
        TimeoutError: The deadline passed.
    """
    manifest = commit.read_manifest(folder)
    if manifest is not None:
        item_name = manifest.item
    else:
        item_name = layout.NO_ITEM if (folder / layout.TREE_METADATA).is_value() else layout.STATE_ITEM
    item = folder / item_name

    def small(name: str) -> Any:
        return _parsed(_checked(folder, layout.in_item(item_name, name), manifest), item / name)

    metadata = small(layout.TREE_METADATA)
    leaves, empty = _leaves(metadata, item)
    if manifest is not None:
        specs = {spec.name: spec for spec in manifest.arrays}
        source = _source_of_ours(manifest, folder, deadline)
    else:
        specs, source = open_arrays(item, metadata, leaves, deadline)
    write_shapes: dict[str, tuple[int, ...] | None]
    if manifest is not None:
        write_shapes = {name: spec.write_shape or spec.chunk for name, spec in specs.items()}
    else:
        write_shapes = {name: recorded.write_shape for name, recorded in array_metadatas(item).items()}
    strings = small(_STRINGS) if any(leaf.value_type == pytree.STRING for leaf in leaves) else {}
    shardings = sharding_file.parse(small(layout.SHARDING), str(item)) if (item / layout.SHARDING).exists() else {}
    found = {
        leaf.name: dataclasses.replace(
            leaf,
            spec=specs.get(leaf.name),
            text=text_of(strings, leaf.name, item) if leaf.value_type == pytree.STRING else None,
            sharding=shardings.get(leaf.name),
            write_shape=write_shapes.get(leaf.name),
        )
        for leaf in leaves
    }
    if lost := [spec for spec in specs if spec not in found]:
        raise CheckpointCorrupt(
            f"{item / layout.TREE_METADATA} does not have array {lost[0]!r}, which the manifest has"
        )
    return StoredTree(folder, found, empty, manifest, source, item)


def _leaves(
    metadata: Mapping[str, Any], item: StoragePath
) -> tuple[list[StoredLeaf], dict[tuple[tuple[str, int], ...], Any]]:
    leaves, empty = [], {}
    try:
        for entry in metadata["tree_metadata"].values():
            keys = tuple((str(key["key"]), int(key["key_type"])) for key in entry["key_metadata"])
            value_type = entry["value_metadata"]["value_type"]
            if value_type in _EMPTY:
                empty[keys] = _EMPTY[value_type]
            else:
                leaves.append(StoredLeaf(pytree.name_of(keys), keys, value_type))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorrupt(f"{item / layout.TREE_METADATA} cannot be read: {error!r}") from error
    return leaves, empty


def _source_of_ours(manifest: Manifest, folder: StoragePath, deadline: Deadline) -> ArraySource:
    item = folder / manifest.item
    specs = {spec.name: spec for spec in manifest.arrays}
    below = layout.in_item(manifest.item, "")
    files = {path.removeprefix(below): file for path, file in manifest.files.items() if path.startswith(below)}
    if all(spec.format.files_hold_values for spec in specs.values()):
        return ChunkFiles(item, specs, files)
    for path, file in files.items():
        check_size(item / path, file.bytes)
    checksums = {path.removeprefix(below): checksum for path, checksum in manifest.values.items()}
    if all(spec.format.ocdbt and spec.format.zstd_level is None for spec in specs.values()):
        tree_in_item = ts.KvStore.open(ocdbt.kvstore(item), context=ocdbt.context())
        try:
            return ChunkKeys(item, tree_in_item.result(timeout=deadline.remaining_s()), specs, checksums)
        except ValueError as error:
            raise CheckpointCorrupt(f"{item / ocdbt.MANIFEST} cannot be opened: {error}") from error
    opening = {
        name: spec.opening(
            ocdbt.kvstore(item, folder_of_leaf(name)) if spec.format.ocdbt else (item / name).kvstore_spec()
        )
        | {"fill_missing_data_reads": False}
        for name, spec in specs.items()
    }
    return CheckedStoredArrays(item, _opened(item, opening, deadline), specs, checksums)


def open_arrays(
    item: StoragePath, metadata: Mapping[str, Any], leaves: Iterable[StoredLeaf], deadline: Deadline
) -> tuple[dict[str, ArraySpec], ArraySource]:
    in_ocdbt, zarr3 = metadata.get("use_ocdbt"), metadata.get("use_zarr3", False)
    kinds = {leaf.name: _KINDS[leaf.value_type] for leaf in leaves if leaf.value_type in _KINDS}
    if in_ocdbt and kinds and not (item / ocdbt.MANIFEST).is_value():
        raise CheckpointCorrupt(f"{item} has no {ocdbt.MANIFEST}: Orbax's per-process OCDBT folders were never merged")
    files = item.kvstore_spec()
    opening = {
        name: {
            "driver": "zarr3" if zarr3 else "zarr",
            "kvstore": {
                "driver": "ocdbt",
                "base": files,
                "path": folder_of_leaf(name),
                "cache_pool": "cache_pool#ocdbt",
            }
            if in_ocdbt
            else (item / name).kvstore_spec(),
            # Older metadata does not have this entry. There, chunks equal to the fill value were not stored.
            "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value", False),
            "open": True,
        }
        for name in kinds
    }
    stores = _opened(item, opening, deadline, finds_metadata=not zarr3)
    impls = {name: found.key_impl for name, found in array_metadatas(item).items() if found.key_impl}
    specs = {
        name: ArraySpec(
            name=name,
            kind="key" if name in impls else kinds[name],
            shape=tuple(store.shape),
            dtype=zarr_dtype(np.dtype(store.dtype.numpy_dtype)) or store.dtype.name,
            chunk=chunk_shape(store),
            key_impl=impls.get(name),
        )
        for name, store in stores.items()
    }
    return specs, StoredArrays(item, stores)


@dataclasses.dataclass(frozen=True)
class ArrayMetadata:
    """What Orbax records of a ``jax.Array`` in addition to zarr's own metadata.

    Attributes:
        write_shape: Shape of the part of a shard that one process wrote. None if it is not recorded.
        key_impl: The implementation of typed PRNG keys. None for other arrays.
    """

    write_shape: tuple[int, ...] | None
    key_impl: str | None


def array_metadatas(item: StoragePath) -> dict[str, ArrayMetadata]:
    """Returns what all processes recorded of each array, by the name of its leaf. Empty if nothing is recorded.

    Raises:
        CheckpointCorrupt: A file of array metadata cannot be read.
    """
    found = {}
    for path in layout.array_metadata_files(item):
        contents = _parsed(path.read_bytes(), path)
        try:
            for array in (entry["array_metadata"] for entry in contents["array_metadatas"]):
                shape = array.get("write_shape")
                impl = (array.get("ext_metadata") or {}).get("random_key_impl")
                found[array["param_name"]] = ArrayMetadata(None if shape is None else tuple(shape), impl)
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {error!r}") from error
    return found


def _opened(
    item: StoragePath, opening: Mapping[str, dict[str, Any]], deadline: Deadline, *, finds_metadata: bool = False
) -> dict[str, ts.TensorStore]:
    """Returns the opened arrays. With ``finds_metadata``, the file of zarr's metadata may have an unusual name."""
    # Values are not cached. All of OCDBT's B+tree is cached, as each array is looked up in it.
    context = ocdbt.context(cache_pool={"total_bytes_limit": 0})
    futures = {name: ts.open(spec, context=context, read=True) for name, spec in opening.items()}
    stores = {}
    for name, future in futures.items():
        try:
            stores[name] = future.result(timeout=deadline.remaining_s())
        except ValueError as error:
            elsewhere = _metadata_key(opening[name]["kvstore"], context, deadline) if finds_metadata else None
            if elsewhere is None:
                raise CheckpointCorrupt(f"{item}: array {name!r} cannot be opened: {error}") from error
            found = ts.open({**opening[name], "metadata_key": elsewhere}, context=context, read=True)
            stores[name] = found.result(timeout=deadline.remaining_s())
        except TimeoutError:
            raise TimeoutError(f"leaf {name!r}") from None
    return stores


def _metadata_key(kvstore: Mapping[str, Any], context: ts.Context, deadline: Deadline) -> str | None:
    """Returns the name of zarr 2's metadata if it is not the usual one (see Orbax's ``metadata_key``), else None."""
    with contextlib.suppress(ValueError):  # if it cannot be read, no name is found
        store = ts.KvStore.open(dict(kvstore), context=context).result(timeout=deadline.remaining_s())
        for key in store.list().result(timeout=deadline.remaining_s()):
            name = key.decode()
            if "/" in name or _CHUNK_NAME.fullmatch(name):
                continue
            value = store.read(key).result(timeout=deadline.remaining_s()).value
            if value.startswith(b"{") and json.loads(value).get("zarr_format") == 2:
                return name
    return None


def _checked(folder: StoragePath, path: str, manifest: Manifest | None) -> bytes | bytearray:
    """Returns the contents of a small file. Checks them if there is a manifest."""
    if manifest is None:
        try:
            return (folder / path).read_bytes()
        except FileNotFoundError:
            raise CheckpointCorrupt(f"{folder / path} is missing") from None
    if path not in manifest.files:
        raise CheckpointCorrupt(f"{folder / layout.MANIFEST} does not have {path}")
    data = bytearray(manifest.files[path].bytes)
    read_checked(folder / path, len(data), manifest.files[path].crc32, memoryview(data))
    return data


def _parsed(data: bytes | bytearray, path: StoragePath) -> dict[str, Any]:
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error!r}") from error


def text_of(strings: Any, name: str, item: StoragePath) -> str:
    """Returns a string from Orbax's file of strings. Names in it are JSON pointers: slashes separate levels."""
    try:
        for part in name.split("/"):
            strings = strings[part.replace("~1", "/").replace("~0", "~")]
    except (KeyError, TypeError):
        raise CheckpointCorrupt(f"{item / _STRINGS} does not have {name!r}") from None
    return str(strings)


def _nested(nodes: Mapping[tuple[tuple[str, int], ...], Any], folder: StoragePath) -> Any:
    if list(nodes) == [()]:
        return nodes[()]
    children: dict[tuple[str, int], dict[Any, Any]] = {}
    for keys, node in nodes.items():
        if not keys:
            raise CheckpointCorrupt(f"{folder}: its tree has a leaf where it has a container")
        children.setdefault(keys[0], {})[keys[1:]] = node
    types = {key_type for _, key_type in children}
    if len(types) != 1:
        raise CheckpointCorrupt(f"{folder}: its tree has a container with both names and positions")
    if types == {pytree.SEQUENCE}:
        return [_nested(children[key], folder) for key in sorted(children, key=lambda key: int(key[0]))]
    return {name: _nested(below, folder) for (name, _), below in children.items()}
