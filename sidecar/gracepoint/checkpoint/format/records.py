"""The records that a save and a committed step consist of: done-records, manifests, and Orbax's marks.

A done-record states that all files that one process writes in a save are durable. **A save is durable when the
done-records of all its processes exist**: together they hold all that is needed to finish it. The manifest combines
them, and is written when the save is committed. Both are JSON, and carry a checksum of their own bytes.

If a state has many chunks, the manifest is **in parts**: each process writes the sizes and checksums of its own chunks
to a separate file, a ``ManifestPart``, before its done-record. A table names the process that wrote each chunk.
Records and manifest then hold only what is not a chunk, so that a commit and a listing read little.

The classes are what is recorded; the functions after them read the records of a folder, and make those of a commit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.array_spec import ArraySpec, chunk_count, folder_of_leaf, grid, tree_digest
from gracepoint.checkpoint.format.layout import Temporary, is_claim, is_whole, seal, unsealed
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checksum import crc32
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file's size and the CRC-32 of its bytes."""

    bytes: int
    crc32: int


def file_of(data: bytes | memoryview) -> StoredFile:
    return StoredFile(len(data), crc32(data))


@dataclasses.dataclass(frozen=True)
class DoneRecord:
    """``done.process_N.json``: process N has made ``files`` durable.

    Attributes:
        step: The step that is saved. None for a checkpoint that has its own path.
        item: Name of the train state's folder below the checkpoint's folder. ``layout.NO_ITEM`` if they are the same
            folder. Only a checkpoint with items has host state.
        attempt: The attempt of the job that saved. ``attempt`` and ``ordinal`` together identify the save.
        ordinal: Number of the save within the attempt.
        process_index: Index of this process.
        process_count: Number of processes that save together.
        digest: Digest of the array list. Equal in all processes.
        arrays: The array list. Only in process 0's record, as it is equal in all processes. None in other records.
        files: Size and checksum of everything that this process wrote, by path below the step's folder.
        values: CRC-32 of the values of each chunk whose file is compressed, or that has no file (in OCDBT). The key is
            the path that the chunk's file has or would have.
        copies: Checksums of this process's copies of chunks that another process wrote, by path.
        host_state: Names of the host state's values. Equal in all processes.
        begun_ns: When the save began, in nanoseconds since the epoch by this process's clock. In stores that cannot
            rename, by the store's clock.
        replaces: Identifies the folder at the target that this save replaces, as ``Commit.standing`` returns it. Only
            in process 0's record. None if the save replaces nothing. Older records do not have this field.
        generations: The generation of each object that was written below the step's final name, by path. Only in stores
            that cannot rename; empty in others. Older records do not have this field.
        chunks: Number of chunks that this process wrote, if the manifest is in parts. ``files`` then has the part and
            not the chunks, and ``values`` has only chunks that other processes have copies of. None: not in parts.
        plan: Checksum of which process writes which chunk. None if the manifest is not in parts.
    """

    step: int | None
    item: str
    attempt: str
    ordinal: int
    process_index: int
    process_count: int
    digest: str
    arrays: tuple[ArraySpec, ...] | None
    files: Mapping[str, StoredFile]
    values: Mapping[str, int]
    copies: Mapping[str, int]
    host_state: tuple[str, ...]
    begun_ns: int
    replaces: str | None = None
    generations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    chunks: int | None = None
    plan: int | None = None

    FORMATS: ClassVar[tuple[str, str]] = ("gracepoint.done/1", "gracepoint.done/2")  # the second: in parts

    def to_bytes(self) -> bytes:
        return seal(self.FORMATS[self.chunks is not None], _fields(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        return cls(**_parse(cls.FORMATS, data, where))


@dataclasses.dataclass(frozen=True)
class Manifest:
    """``_GRACEPOINT``: the contents of a committed step. The fields have the meaning that ``DoneRecord`` documents.

    If it is in parts, ``files`` has the parts and the table of writers, and not the chunks.
    """

    step: int | None
    item: str
    attempt: str
    ordinal: int
    process_count: int
    arrays: tuple[ArraySpec, ...]
    files: Mapping[str, StoredFile]
    values: Mapping[str, int]
    host_state: tuple[str, ...]
    begun_ns: int

    FORMATS: ClassVar[tuple[str, str]] = ("gracepoint.checkpoint/1", "gracepoint.checkpoint/2")  # the second: in parts

    @property
    def is_in_parts(self) -> bool:
        """True if the sizes and checksums of chunks are in the parts of the processes."""
        return layout.CHUNK_WRITERS in self.files

    @classmethod
    def fields_in(cls, data: bytes, where: str) -> dict[str, Any]:
        """Returns the fields as they are written in JSON, without the cost of making a ``Manifest``.

        Raises:
            CheckpointCorrupt: The fields cannot be read.
            CheckpointTooNew: This version does not know their format.
        """
        return unsealed(cls.FORMATS, data, where)

    def to_bytes(self) -> bytes:
        return seal(self.FORMATS[self.is_in_parts], _fields(self))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        return cls(**_parse(cls.FORMATS, data, where))


@dataclasses.dataclass(frozen=True)
class ManifestPart:
    """``_GRACEPOINT.process_N``: the chunks that process N wrote, if the manifest is in parts.

    Attributes:
        files: Size and checksum of the file of each chunk, by path below the step's folder. Empty in OCDBT.
        values: See ``DoneRecord``.
    """

    files: Mapping[str, StoredFile]
    values: Mapping[str, int]

    FORMAT: ClassVar[str] = "gracepoint.part/1"

    def to_bytes(self) -> bytes:
        return seal(self.FORMAT, {"files": _files_json(self.files), "values": self.values})

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Self:
        fields = unsealed((cls.FORMAT,), data, where)
        return cls(_files_of(fields["files"]), fields["values"])


def merge(records: Sequence[DoneRecord]) -> Manifest:
    """Returns the manifest of a save from the done-records of all its processes, in order.

    Raises:
        CheckpointCorrupt: The records contradict each other, or do not cover all chunks.
    """
    first = records[0]
    where = f"save {first.ordinal} of attempt {first.attempt}" + ("" if first.step is None else f", step {first.step}")
    for record in records:
        for field in ("step", "item", "attempt", "ordinal", "process_count", "digest", "host_state", "plan"):
            actual, expected = getattr(record, field), getattr(first, field)
            if actual != expected:
                raise CheckpointCorrupt(
                    f"{where}: {field} differs between processes: {actual!r} in process {record.process_index}, "
                    f"{expected!r} in process 0"
                )
    if first.arrays is None or tree_digest(first.arrays) != first.digest:
        raise CheckpointCorrupt(f"{where}: process 0's record has no array list that fits its digest")
    files = {path: file for record in records for path, file in record.files.items()}
    values = {path: checksum for record in records for path, checksum in record.values.items()}
    if first.plan is not None and sum(record.chunks or 0 for record in records) != sum(map(chunk_count, first.arrays)):
        raise CheckpointCorrupt(
            f"{where}: its processes wrote {sum(record.chunks or 0 for record in records)} chunks, expected "
            f"{sum(map(chunk_count, first.arrays))}"
        )
    missing = [path for path in _expected_files(first) if path not in files and path not in values]
    if missing:
        raise CheckpointCorrupt(f"{where}: {len(missing)} files are missing, for example {missing[0]}")
    for record in records:
        for path, checksum in record.copies.items():
            if values.get(path, files[path].crc32 if path in files else None) != checksum:
                raise CheckpointCorrupt(
                    f"{where}: {_leaf_at(path, first)} is local to each process, and process {record.process_index} "
                    "has other values than the process that wrote it; make it equal, or one array over all processes"
                )
    return Manifest(
        step=first.step,
        item=first.item,
        attempt=first.attempt,
        ordinal=first.ordinal,
        process_count=first.process_count,
        arrays=first.arrays,
        files=files,
        values=values if first.plan is None else {},  # the parts have them
        host_state=first.host_state,
        begun_ns=first.begun_ns,
    )


def _leaf_at(path: str, first: DoneRecord) -> str:
    """Returns as text the leaf that has its values, or some of them, at ``path``."""
    in_item = path.removeprefix(layout.in_item(first.item, ""))
    if in_item == layout.STRINGS:
        return "a leaf of type str"
    name = next((spec.name for spec in first.arrays or () if in_item.startswith(folder_of_leaf(spec.name))), in_item)
    return f"leaf {name!r}" if name else "the only leaf"


def _expected_files(first: DoneRecord) -> list[str]:
    assert first.arrays is not None
    processes = range(first.process_count)
    with_host_state = [layout.host_state_file(process) for process in processes] if first.item else []
    if first.plan is not None:
        return [layout.CHUNK_WRITERS, *map(layout.manifest_part, processes), *with_host_state]
    chunks = [layout.in_item(first.item, spec.chunk_file(index)) for spec in first.arrays for index in grid(spec)]
    return chunks + with_host_state


def _fields(value: DoneRecord | Manifest) -> dict[str, Any]:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    fields["files"] = _files_json(value.files)
    # Older versions do not know these fields. So they are left out if they say nothing.
    if not fields.get("generations", True):
        del fields["generations"]
    for name in ("chunks", "plan"):
        if fields.get(name, 0) is None:
            del fields[name]
    fields["arrays"] = None if value.arrays is None else [spec.to_json() for spec in value.arrays]
    return fields


def _parse(forms: Sequence[str], data: bytes, where: str) -> dict[str, Any]:
    value = unsealed(forms, data, where)
    arrays = value["arrays"]
    return value | {
        "arrays": None if arrays is None else tuple(ArraySpec.from_json(spec) for spec in arrays),
        "files": _files_of(value["files"]),
        "host_state": tuple(value["host_state"]),
    }


def _files_json(files: Mapping[str, StoredFile]) -> dict[str, list[int]]:
    return {path: [file.bytes, file.crc32] for path, file in files.items()}


def _files_of(value: Mapping[str, Sequence[int]]) -> dict[str, StoredFile]:
    return {path: StoredFile(*file) for path, file in value.items()}


logger = logging.getLogger(__name__)

# Parts of a manifest that ``all_files`` holds in memory at once.
_PARTS_AT_ONCE = 64
_BY_A_SAVE = re.compile(rb" by [\w-]+\.\d+$", re.ASCII)  # the end of ``orbax_success``
# If a step is restored without arguments, Orbax finds the handler of each item by these names.
_STATE_HANDLER = "orbax.checkpoint._src.handlers.standard_checkpoint_handler.StandardCheckpointHandler"
_HOST_STATE_HANDLER = "orbax.checkpoint._src.handlers.json_checkpoint_handler.JsonCheckpointHandler"


@dataclasses.dataclass(frozen=True)
class Writing:
    """One process's part of a save, while it is written.

    Attributes:
        folder: The folder that the process's files are written to.
        stayed: Returns whether ``folder`` is still the folder that had this name at the beginning.
        begun_ns: When the save began, in nanoseconds since the epoch. If the store cannot rename, by the store's clock:
            there this time decides which of two saves is the later one.
        generations: See ``DoneRecord``. It grows while the files are written.
        place: Writes an object where it may be now, in a store that cannot rename. None: files are written to
            ``folder``. See ``WriteJob``.
    """

    folder: StoragePath
    stayed: Callable[[], bool]
    begun_ns: int
    generations: Mapping[str, str]
    place: Callable[[str, ArrayBytes, int, Callable[[], None]], None] | None = None


def done_records(folder: StoragePath) -> list[DoneRecord] | None:
    """Returns the done-records of a save, by process. None if some are missing.

    The commit waits for this call, and a network file system needs at least one round trip for each record. The first
    record is read alone, because it holds the number of records. The others are read several at a time. The folder is
    not listed, because a network file system may list a file later than it can be opened.

    Raises:
        CheckpointCorrupt: A done-record cannot be read.
        CheckpointTooNew: A newer Gracepoint wrote them.
    """
    paths = [folder / layout.done_record(0)]
    only = storage_path.read_all(paths)
    if only is None:
        return None
    first = DoneRecord.from_bytes(only[0], str(paths[0]))
    paths += [folder / layout.done_record(process) for process in range(1, first.process_count)]
    contents = storage_path.read_all(paths[1:])
    if contents is None:
        return None
    return [first, *(DoneRecord.from_bytes(data, str(path)) for path, data in zip(paths[1:], contents, strict=True))]


def is_of(folder: StoragePath, temporary: Temporary) -> bool:
    """Returns whether the checkpoint in ``folder`` has the attempt and ordinal of ``temporary``."""
    try:
        manifest = manifest_fields(folder)
    except (CheckpointCorrupt, CheckpointTooNew):
        return False
    return manifest is not None and (manifest["attempt"], manifest["ordinal"]) == (
        temporary.attempt,
        temporary.ordinal,
    )


def standing(folder: StoragePath, *, without_manifest: str | None) -> str | None:
    """Returns the identifier of the checkpoint in ``folder``, as ``Commit.standing`` does."""
    try:
        manifest = manifest_fields(folder)
    except CheckpointTooNew:
        return None
    except CheckpointCorrupt:
        return ""
    return without_manifest if manifest is None else identifier(manifest)


def is_damaged(folder: StoragePath) -> bool:
    """Returns whether the checkpoint in ``folder`` is known to be damaged.

    It is damaged if its manifest is, or if a restore has marked it. A checkpoint that another version wrote, and that
    this version cannot read, is not damaged.
    """
    manifest = manifest_bytes(folder)
    return (manifest is not None and not is_whole(manifest)) or (folder / layout.DAMAGE_MARK).is_value()


def gives_way(folder: StoragePath, replaces: str | None, standing: Callable[[StoragePath], str | None]) -> bool:
    """Returns whether a durable save may take the place of ``folder``.

    ``replaces`` identifies the checkpoint that the save was to replace. None: there is none. ``standing`` returns the
    identifier of the checkpoint in a folder (``Commit.standing``).
    """
    return is_damaged(folder) or (replaces is not None and standing(folder) == replaces)


def identifier(manifest: Mapping[str, Any]) -> str:
    """Returns the identifier of a checkpoint, as ``standing`` does, from the fields of its manifest."""
    return f"{manifest['attempt']}.{manifest['ordinal']}"


def read_manifest(folder: StoragePath) -> Manifest | None:
    """Returns the manifest of a committed step. None if the folder has no manifest.

    Raises:
        CheckpointCorrupt: The manifest cannot be read.
        CheckpointTooNew: This version does not know the format of the manifest.
    """
    data = manifest_bytes(folder)
    return None if data is None else manifest_in(data, folder)


def manifest_in(data: bytes, folder: StoragePath) -> Manifest | None:
    """Returns the manifest that was read from ``folder``. None if it is a claim. Raises as ``read_manifest`` does."""
    return None if is_claim(data) else Manifest.from_bytes(data, str(folder / layout.MANIFEST))


def manifest_fields(folder: StoragePath) -> dict[str, Any] | None:
    """Returns the fields of the manifest as JSON values. None if the folder has no manifest.

    This is much faster than ``read_manifest`` if there are many arrays.

    Raises:
        CheckpointCorrupt: The manifest cannot be read.
        CheckpointTooNew: This version does not know the format of the manifest.
    """
    data = manifest_bytes(folder)
    return None if data is None else Manifest.fields_in(data, str(folder / layout.MANIFEST))


def all_files(folder: StoragePath, manifest: Manifest) -> Iterator[tuple[str, StoredFile]]:
    """Yields every file of a checkpoint, with its path. If the manifest is in parts, the parts are read for the chunks.

    Raises:
        CheckpointCorrupt: A part is missing or damaged.
    """
    yield from manifest.files.items()
    if not manifest.is_in_parts:
        return
    for first in range(0, manifest.process_count, _PARTS_AT_ONCE):
        numbers = range(first, min(first + _PARTS_AT_ONCE, manifest.process_count))
        paths = [folder / layout.manifest_part(number) for number in numbers]
        contents = storage_path.read_all(paths)
        if contents is None:
            raise CheckpointCorrupt(f"{folder}: a part of its manifest is missing: {_first_missing(paths)}")
        for path, data in zip(paths, contents, strict=True):
            yield from ManifestPart.from_bytes(data, str(path)).files.items()


def _first_missing(paths: Sequence[StoragePath]) -> str:
    return next((path.name for path in paths if not path.exists()), paths[0].name)


def manifest_bytes(folder: StoragePath) -> bytes | None:
    """Returns the contents of the manifest file. None if the folder has no manifest."""
    try:
        data = (folder / layout.MANIFEST).read_bytes()
    except FileNotFoundError:
        return None
    return None if is_claim(data) else data


def signs_of_ours(folder: StoragePath, names: Collection[str]) -> list[str]:
    """Returns the files by which Gracepoint is known to have written the checkpoint in ``folder``.

    If there are some and there is no manifest, the folder holds a part of a checkpoint, as a copy that was broken off
    leaves it. ``names`` are the names that are directly in the folder.
    """
    signs = [name for name in names if layout.is_sign_of_ours(name)]
    of_host = layout.host_state_file(0)
    if layout.HOST_STATE_ITEM in names and (folder / of_host).is_value():
        signs.append(of_host)
    if layout.COMMIT_SUCCESS in names:
        with contextlib.suppress(FileNotFoundError):
            if _BY_A_SAVE.search((folder / layout.COMMIT_SUCCESS).read_bytes()):
                signs.append(layout.COMMIT_SUCCESS)
    return signs


def orbax_metadata(manifest: Manifest, folder: StoragePath) -> bytes:
    """Returns the contents of Orbax's metadata file for the step in ``folder``. Its commit time is the present time."""
    more: dict[str, Any] = {"item_handlers": {}, "custom_metadata": {}}
    if layout.MORE_METADATA in manifest.files:
        more = json.loads((folder / layout.MORE_METADATA).read_bytes())
    handlers = {manifest.item: _STATE_HANDLER, layout.HOST_STATE_ITEM: _HOST_STATE_HANDLER, **more["item_handlers"]}
    metadata = {
        "item_handlers": handlers if manifest.item else _STATE_HANDLER,
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": manifest.begun_ns,
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": more["custom_metadata"],
    }
    return json.dumps(metadata).encode()


def orbax_success(target: StoragePath, by: str = "") -> bytes:
    """Returns the contents of Orbax's mark of a finished checkpoint.

    ``by`` identifies the save. It is told in stores that cannot rename, as some tell versions apart by their contents.
    """
    return f"Checkpoint commit was successful to {target}{by and f' by {by}'}".encode()
