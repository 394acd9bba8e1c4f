"""Reads and makes the records that a save and a committed step consist of: done-records, manifests, Orbax's marks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Temporary, is_claim, is_whole
from gracepoint.checkpoint.format.manifest import DoneRecord, Manifest, ManifestPart, StoredFile
from gracepoint.checkpoint.memory import ArrayBytes
from gracepoint.checkpoint.storage import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointCorrupt, CheckpointTooNew

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
