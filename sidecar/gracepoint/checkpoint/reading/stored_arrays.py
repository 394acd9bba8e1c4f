"""Opens the arrays of a checkpoint of Gracepoint or Orbax: their specs, and the source of their values.

For a checkpoint with a manifest, the manifest has the specs and the checksums. Otherwise the specs are read from zarr's
metadata and from what Orbax records beside it, and there are no checksums.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from gracepoint.checkpoint.format import layout, ocdbt
from gracepoint.checkpoint.format.array_spec import ArraySpec, Kind, folder_of_leaf, zarr_dtype
from gracepoint.checkpoint.format.manifest import Manifest
from gracepoint.checkpoint.reading.array_source import (
    ArraySource,
    ByPath,
    CheckedStoredArrays,
    ChunkFiles,
    ChunkKeys,
    StoredArrays,
    chunk_shape,
)
from gracepoint.checkpoint.reading.manifest_parts import ManifestParts
from gracepoint.checkpoint.storage.checks import check_sizes
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt

_CHUNK_NAME = re.compile(r"\d+(\.\d+)*")
_KINDS: Mapping[str, Kind] = {"jax.Array": "array", "np.ndarray": "numpy", "scalar": "scalar"}


def source_by_manifest(manifest: Manifest, folder: StoragePath, deadline: Deadline) -> ArraySource:
    """Returns the source of the values of a checkpoint that has a manifest.

    Raises:
        CheckpointCorrupt: The arrays cannot be opened.
        TimeoutError: The deadline passed.
    """
    item = folder / manifest.item
    specs = {spec.name: spec for spec in manifest.arrays}
    below = layout.in_item(manifest.item, "")
    files = {path.removeprefix(below): file for path, file in manifest.files.items() if path.startswith(below)}
    parts = ManifestParts(folder, manifest) if manifest.is_in_parts else None
    if all(spec.format.files_hold_values for spec in specs.values()):
        return ChunkFiles(item, specs, files if parts is None else parts.files)
    check_sizes(item, {path: file.bytes for path, file in files.items()})
    checksums: ByPath[int]
    if parts is None:
        checksums = {path.removeprefix(below): checksum for path, checksum in manifest.values.items()}
    else:
        checksums = parts.values
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
    item: StoragePath, metadata: Mapping[str, Any], value_types: Mapping[str, str], deadline: Deadline
) -> tuple[dict[str, ArraySpec], ArraySource]:
    """Opens the arrays of a checkpoint that has no manifest.

    Args:
        item: The folder of the train state.
        metadata: What the tree's metadata says of the format of the arrays.
        value_types: Orbax's name for the kind of value, by the name of the leaf.
        deadline: The deadline for opening.

    Returns:
        The specs of the leaves that are arrays, by name, and the source of their values.

    Raises:
        CheckpointCorrupt: An array is missing or damaged; names it.
        TimeoutError: The deadline passed.
    """
    in_ocdbt, zarr3 = metadata.get("use_ocdbt"), metadata.get("use_zarr3", False)
    kinds = {name: _KINDS[value_type] for name, value_type in value_types.items() if value_type in _KINDS}
    if in_ocdbt is not False and kinds:
        has_tree = (item / ocdbt.MANIFEST).is_value()
        if in_ocdbt and not has_tree:
            raise CheckpointCorrupt(
                f"{item} has no {ocdbt.MANIFEST}: Orbax's per-process OCDBT folders were never merged"
            )
        in_ocdbt = has_tree  # older metadata does not have this entry
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
        contents = json_object(path.read_bytes(), path)
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
    """Returns the opened arrays. With ``finds_metadata``, the file of zarr's metadata may have an unusual name.

    Raises:
        CheckpointCorrupt: An array cannot be opened. The message names it.
        TimeoutError: The deadline passed. The message names the leaf.
    """
    # Values are not cached. All of OCDBT's B+tree is cached, as each array is looked up in it.
    context = ocdbt.context(cache_pool={"total_bytes_limit": 0})
    futures = {name: ts.open(spec, context=context, read=True) for name, spec in opening.items()}
    stores = {}
    for name, future in futures.items():
        try:
            try:
                stores[name] = future.result(timeout=deadline.remaining_s())
            except ValueError:
                elsewhere = _metadata_key(opening[name]["kvstore"], context, deadline) if finds_metadata else None
                if elsewhere is None:
                    raise
                found = ts.open({**opening[name], "metadata_key": elsewhere}, context=context, read=True)
                stores[name] = found.result(timeout=deadline.remaining_s())
        except ValueError as error:
            raise CheckpointCorrupt(f"{item}: array {name!r} cannot be opened: {error}") from error
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


def json_object(data: bytes | bytearray, path: StoragePath) -> dict[str, Any]:
    """Returns the contents of a JSON file.

    Raises:
        CheckpointCorrupt: It is not a JSON object; names ``path``.
    """
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error!r}") from error
