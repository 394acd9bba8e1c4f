"""Reads arrays of a committed step, ours or Orbax's, slice by slice, and checks what it reads.

Ours: every chunk file that is touched must be there with the size in the manifest, and a chunk that is read
as a whole must have the manifest's checksum. Orbax's have no checksums of ours: TensorStore's own checks
(OCDBT's, a missing or short chunk) are all there is.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorstore as ts

from gracepoint.checkpoint import commit, layout, plan
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.files import check_size
from gracepoint.checkpoint.records import File, Manifest
from gracepoint.checkpoint.spec import ArraySpec, Kind, as_bytes, zarr_dtype
from gracepoint.errors import CheckpointCorrupt, CheckpointError

_KINDS: Mapping[str, Kind] = {"jax.Array": "array", "np.ndarray": "numpy", "scalar": "scalar"}


@dataclasses.dataclass(frozen=True)
class StoredStep:
    """An opened step.

    Attributes:
        folder: Of the step.
        specs: Its arrays by name.
        manifest: None if Orbax wrote it.
    """

    folder: Path
    specs: Mapping[str, ArraySpec]
    manifest: Manifest | None
    _stores: Mapping[str, ts.TensorStore]

    def read(self, name: str, index: plan.Index) -> ts.Future[npt.NDArray[Any]]:
        """Starts to read part of an array.

        Raises:
            CheckpointCorrupt: A chunk file of it is missing or has another size.
        """
        for path, file, _ in self._chunks(name, index):
            check_size(self.folder / path, file.bytes)
        return self._stores[name][tuple(slice(start, stop) for start, stop in index)].read(order="C")

    def check(self, name: str, index: plan.Index, values: npt.NDArray[Any]) -> None:
        """Checks what ``read`` gave against the manifest.

        Raises:
            CheckpointCorrupt: A chunk has another checksum; names its file.
        """
        for path, file, chunk in self._chunks(name, index):
            if not all(a <= start and stop <= b for (start, stop), (a, b) in zip(chunk, index, strict=True)):
                continue  # only part of the file was read
            part = values[tuple(slice(start - a, stop - a) for (start, stop), (a, _) in zip(chunk, index, strict=True))]
            if zlib.crc32(as_bytes(part)) != file.crc32:
                raise CheckpointCorrupt(f"{self.folder / path}: its contents do not fit its checksum")

    def host_state(self, process_index: int) -> bytes | None:
        """Returns the saved host state of a process; None if Orbax wrote the step, which has none.

        Raises:
            CheckpointCorrupt: The file is missing or damaged.
        """
        if self.manifest is None:
            return None
        path = layout.host_state_file(process_index)
        file = self.manifest.files[path]
        check_size(self.folder / path, file.bytes)
        data = (self.folder / path).read_bytes()
        if zlib.crc32(data) != file.crc32:
            raise CheckpointCorrupt(f"{self.folder / path}: its contents do not fit its checksum")
        return data

    def _chunks(self, name: str, index: plan.Index) -> list[tuple[str, File, plan.Index]]:
        """Returns path, file and index of the chunks that ``index`` touches, as far as the manifest tells."""
        if self.manifest is None:
            return []
        spec = self.specs[name]
        touched = [
            chunk
            for chunk in plan.grid(spec)
            if all(start < b and a < stop for (start, stop), (a, b) in zip(chunk, index, strict=True))
        ]
        paths = [f"{layout.STATE_ITEM}/{plan.chunk_file(spec, chunk)}" for chunk in touched]
        return [(path, self.manifest.files[path], chunk) for path, chunk in zip(paths, touched, strict=True)]


def open_step(folder: Path, deadline: Deadline) -> StoredStep:
    """Opens a step's arrays.

    Raises:
        CheckpointCorrupt: Its metadata is missing or damaged.
        CheckpointError: Orbax wrote it in a way that is not supported.
    """
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    manifest = commit.read_manifest(folder)
    if manifest is not None:
        specs = {spec.name: spec for spec in manifest.arrays}
        opening = {
            name: ts.open(
                {
                    "driver": "zarr",
                    "kvstore": _files(folder, name),
                    "metadata": spec.zarray,
                    "assume_metadata": True,
                    "fill_missing_data_reads": False,
                },
                context=context,
            )
            for name, spec in specs.items()
        }
        return StoredStep(folder, specs, manifest, _opened(folder, opening, deadline))
    return _open_orbax(folder, context, deadline)


def _open_orbax(folder: Path, context: ts.Context, deadline: Deadline) -> StoredStep:
    item = folder / layout.STATE_ITEM
    metadata = _json_of(item / layout.TREE_METADATA)
    ocdbt, zarr3 = metadata.get("use_ocdbt"), metadata.get("use_zarr3", False)
    if ocdbt and not (item / "manifest.ocdbt").is_file():
        raise CheckpointError(f"{item} has no manifest.ocdbt: Orbax's per-process OCDBT folders were never merged")
    kinds: dict[str, Kind] = {}
    for leaf in metadata["tree_metadata"].values():
        name = ".".join(key["key"] for key in leaf["key_metadata"])
        value = leaf["value_metadata"]
        if value["skip_deserialize"]:
            continue
        if value["value_type"] not in _KINDS:
            raise CheckpointError(f"{item}: leaf {name!r} is a {value['value_type']}, which is not supported")
        kinds[name] = _KINDS[value["value_type"]]
    opening = {
        name: ts.open(
            {
                "driver": "zarr3" if zarr3 else "zarr",
                "kvstore": {"driver": "ocdbt", "base": _files(folder, ""), "path": f"{name}/"}
                if ocdbt
                else _files(folder, name),
                # Absent from older metadata, where chunks equal to the fill value were left out.
                "fill_missing_data_reads": not metadata.get("store_array_data_equal_to_fill_value", False),
            },
            open=True,
            read=True,
            context=context,
        )
        for name in kinds
    }
    stores = _opened(folder, opening, deadline)
    impls = _orbax_key_impls(item)
    specs = {
        name: ArraySpec(
            name=name,
            kind="key" if name in impls else kinds[name],
            shape=tuple(store.shape),
            dtype=zarr_dtype(np.dtype(store.dtype.numpy_dtype)) or str(store.dtype),
            chunk=tuple(store.shape),  # only of ours are chunks looked at
            key_impl=impls.get(name),
        )
        for name, store in stores.items()
    }
    return StoredStep(folder, specs, None, stores)


def _orbax_key_impls(item: Path) -> dict[str, str]:
    """Returns the implementation of each typed PRNG key by its leaf's name."""
    found = {}
    for path in sorted(item.glob("array_metadatas/process_*")):
        for entry in _json_of(path)["array_metadatas"]:
            array = entry["array_metadata"]
            if impl := (array.get("ext_metadata") or {}).get("random_key_impl"):
                found[array["param_name"]] = impl
    return found


def _files(folder: Path, name: str) -> dict[str, str]:
    return {"driver": "file", "path": f"{folder}/{layout.STATE_ITEM}/{name}{'/' if name else ''}"}


def _opened(
    folder: Path, opening: Mapping[str, ts.Future[ts.TensorStore]], deadline: Deadline
) -> dict[str, ts.TensorStore]:
    stores = {}
    for name, future in opening.items():
        try:
            stores[name] = future.result(timeout=deadline.remaining_s())
        except ValueError as error:
            raise CheckpointCorrupt(
                f"{folder / layout.STATE_ITEM}: array {name!r} cannot be opened: {error}"
            ) from error
    return stores


def _json_of(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error!r}") from error
