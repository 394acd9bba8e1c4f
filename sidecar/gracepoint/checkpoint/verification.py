"""Compares the files of a checkpoint with its manifest.

``verify`` checks all files of one checkpoint, and writes nothing. Its own threads read the files and compute checksums.
They have ended when it returns.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from gracepoint.checkpoint.format import layout, ocdbt, records
from gracepoint.checkpoint.format.array_spec import ArraySpec, Index, grid
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.format.records import Manifest, StoredFile
from gracepoint.checkpoint.reading.stored_tree import open_tree
from gracepoint.checkpoint.steps import listing
from gracepoint.checkpoint.storage.checks import check_contents
from gracepoint.checkpoint.storage.locations import UserPath, storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CannotKnow, CheckpointCorrupt, CheckpointNotFound

if TYPE_CHECKING:
    from gracepoint.machine import LocalPath

# Most files that are read at once. May exceed the number of cores, as readers mostly wait for the disk.
_MAX_THREADS = 16
# Bytes, and number of files, for each of which one more thread is used.
_THREAD_BYTES = 32 << 20
_THREAD_FILES = 64
# Seconds for TensorStore to read one chunk.
_CHUNK_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Damage:
    """A file that is not what was saved.

    Attributes:
        file: Path of the file below the checkpoint's folder. If a chunk of the merged OCDBT tree is damaged: the tree's
            manifest.
        array: Name of the array that the file holds a part of. None if it does not belong to one array.
        problem: What was found and what was expected, as text.
    """

    file: str
    array: str | None
    problem: str

    def __str__(self) -> str:
        return self.problem if self.array is None else f"array {self.array!r}: {self.problem}"


@dataclasses.dataclass(frozen=True)
class VerificationReport:
    """What ``verify`` found.

    Attributes:
        path: Path of the checkpoint.
        step: The step that the checkpoint holds. None if it has a path to itself.
        files: Number of files that the manifest records.
        bytes: Total size of these files in bytes, as the manifest records it.
        damage: The damaged files. Empty if every file is what was saved.
    """

    path: LocalPath | str
    step: int | None
    files: int
    bytes: int
    damage: tuple[Damage, ...]

    @property
    def ok(self) -> bool:
        return not self.damage

    def __str__(self) -> str:
        verdict = "good:" if self.ok else f"damaged: {len(self.damage)} of"
        return "\n  ".join([f"{self.path}: {verdict} {self.files} files, {self.bytes} bytes", *map(str, self.damage)])


def verify(path: UserPath | StoragePath) -> VerificationReport:
    """Reads a whole checkpoint and compares size and CRC-32 of every file with its manifest.

    Args:
        path: Folder of one checkpoint: of a step, or of a checkpoint that has a path to itself.

    Returns:
        What was found. ``ok`` is True if the checkpoint is as it was saved. The marker files that only Orbax reads have
        no checksums: only their existence is checked.

    Raises:
        CheckpointNotFound: There is no committed checkpoint at ``path``.
        CheckpointRefused: There is a file, or a checkpoint in an old format.
        CheckpointCorrupt: The manifest itself cannot be read.
        CannotKnow: Orbax wrote the checkpoint, and Orbax records no checksums.
        OSError: A file cannot be read for a reason other than damage.
    """
    folder = storage_path(path)
    listing.check(folder)
    manifest = records.read_manifest(folder)
    if manifest is None:
        if lost := listing.lost_manifest(folder):
            raise CheckpointCorrupt(lost)
        if any((folder / item / layout.TREE_METADATA).is_value() for item in (layout.STATE_ITEM, layout.NO_ITEM)):
            raise CannotKnow(
                f"{folder} was written by Orbax, which records no checksums: restoring it is the only test there is"
            )
        steps = listing.steps_instead(folder)
        raise CheckpointNotFound(f"{folder} is no committed checkpoint: it has no {layout.MANIFEST}{steps}")
    try:
        files = dict(records.all_files(folder, manifest))
    except CheckpointCorrupt:
        files = dict(manifest.files)  # the damaged part of the manifest is one of them
    total_bytes = sum(file.bytes for file in files.values())
    thread_count = 1 + max(total_bytes // _THREAD_BYTES, len(files) // _THREAD_FILES)
    with ThreadPoolExecutor(min(thread_count, _MAX_THREADS), "gracepoint-verify") as threads:
        damage = _damaged_files(folder, manifest, files, threads)
        if any(spec.format.ocdbt for spec in manifest.arrays):
            damage += _damaged_chunks(folder, manifest, threads)
    damage += [
        Damage(mark, None, f"{folder / mark} is missing")
        for mark in (layout.STEP_METADATA, layout.COMMIT_SUCCESS)
        if not (folder / mark).is_value()
    ]
    return VerificationReport(folder.for_users(), manifest.step, len(files), total_bytes, tuple(damage))


def checkpoints_at(path: UserPath) -> list[StoragePath]:
    """Returns the folders of the checkpoints at ``path``: of its steps, newest first, or ``path`` itself."""
    folder = storage_path(path)
    paths = Layout(folder)
    if (folder / layout.MANIFEST).exists():
        return [folder]
    return [paths.step(step) for step in paths.steps()] or [folder]


def _damaged_files(
    folder: StoragePath, manifest: Manifest, files: Mapping[str, StoredFile], threads: Executor
) -> list[Damage]:
    arrays = {layout.in_item(manifest.item, spec.name): spec.name for spec in manifest.arrays}

    def look(name: str, file: StoredFile) -> Damage | None:
        try:
            check_contents(folder / name, file.bytes, file.crc32)
        except CheckpointCorrupt as error:
            above = (name[:end] for end in range(len(name), 0, -1) if name[end : end + 1] == "/")
            return Damage(name, next((arrays[path] for path in above if path in arrays), None), str(error))
        return None

    return [damage for damage in threads.map(look, files, files.values()) if damage]


def _damaged_chunks(folder: StoragePath, manifest: Manifest, threads: Executor) -> list[Damage]:
    """Reads all chunks through the OCDBT tree that the commit merged. The manifest has no checksums of that tree."""

    def soon() -> Deadline:
        return Deadline.after(_CHUNK_TIMEOUT_S, time.monotonic)

    merged = layout.in_item(manifest.item, ocdbt.MANIFEST)
    try:
        source = open_tree(folder, soon()).source
    except CheckpointCorrupt as error:
        return [Damage(merged, None, str(error))]

    def look(chunk: tuple[ArraySpec, Index]) -> Damage | None:
        spec, index = chunk
        values = np.empty([stop - start for start, stop in index], spec.numpy_dtype)
        try:
            source.read(spec.name, index, values, soon())
        except CheckpointCorrupt as error:
            return Damage(merged, spec.name, str(error))
        return None

    chunks = [(spec, index) for spec in manifest.arrays for index in grid(spec)]
    return [damage for damage in threads.map(look, chunks) if damage]
