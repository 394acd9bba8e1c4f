"""Deletes compiled programs that nobody used for long, and the oldest ones when there are too many bytes.

The time at which a file last changed is about the time at which its program was last used. For when a program is used
and its file has not changed for a quarter of ``Bounds.unused_s``, the file is written again (``program_cache``). So no
index of uses is needed, to which several jobs would have to write.

One process of a job cleans. Another job that shares the folder may clean at the same time, or read a program that is
deleted. It then compiles that program. Files that Gracepoint did not write are never deleted.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence

from gracepoint.checkpoint.storage.backend import Entry
from gracepoint.checkpoint.storage.objects import requests
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.compile_cache.program_folders import place_of

logger = logging.getLogger(__name__)

#: Seconds after which a file whose writer died is deleted.
UNFINISHED_S = 86_400.0
_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class Bounds:
    """How much is kept.

    Attributes:
        bytes: Bytes of all programs together, of all versions and topologies.
        unused_s: Seconds after its last use at which a program is deleted.
    """

    bytes: int
    unused_s: float


@dataclasses.dataclass(frozen=True)
class CleaningPlan:
    """What to delete.

    Attributes:
        files: Keys of files, relative to the top.
        folders: Folders in which no file is left.
        too_old: How many of the files are programs that were not used for ``Bounds.unused_s``.
        too_many: How many of the files are programs for which ``Bounds.bytes`` leaves no room.
    """

    files: Sequence[str]
    folders: Sequence[str]
    too_old: int
    too_many: int


def plan(entries: Iterable[Entry], now_s: float, bounds: Bounds) -> CleaningPlan:
    """Returns what to delete of the files below the top.

    Args:
        entries: The files. Those that Gracepoint did not write are never in the plan.
        now_s: The time by the clock of the store.
        bounds: How much is kept.
    """
    entries = list(entries)
    ours = [(entry, place) for entry in entries if (place := place_of(entry.key)) is not None]
    unfinished = [e.key for e, place in ours if not place.is_program and now_s - e.changed_s > UNFINISHED_S]
    programs = sorted((e for e, place in ours if place.is_program), key=lambda e: (-e.changed_s, e.key))
    too_old = [e.key for e in programs if now_s - e.changed_s > bounds.unused_s]
    too_many, total = [], 0
    for entry in programs[: len(programs) - len(too_old)]:
        total += entry.bytes
        if total > bounds.bytes:
            too_many.append(entry.key)
    deleted = {*unfinished, *too_old, *too_many}
    left = {entry.key.partition("/")[0] for entry in entries if entry.key not in deleted}
    folders = {place.folder for entry, place in ours if entry.key in deleted} - left
    return CleaningPlan([*unfinished, *too_old, *too_many], sorted(folders), len(too_old), len(too_many))


def clean(top: StoragePath, bounds: Bounds) -> None:
    """Deletes what ``plan`` says.

    Raises:
        OSError: The store cannot be listed, or a file cannot be deleted.
    """
    entries = top.entries()
    if not entries:
        return
    found = plan(entries, top.now_s(), bounds)
    requests.run([(top / key).delete for key in found.files], threads=_AT_ONCE)
    if top.backend.renames:
        for folder in found.folders:
            (top / folder).delete_folder()
    if found.too_old or found.too_many:
        logger.info(
            "compiled programs deleted directory=%s unused=%d beyond_bound=%d",
            top,
            found.too_old,
            found.too_many,
        )
