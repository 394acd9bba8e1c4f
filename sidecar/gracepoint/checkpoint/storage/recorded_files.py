"""Lists files that the user's code wrote, makes them durable, and returns their checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gracepoint.checkpoint.storage.checks import crc32_of
from gracepoint.checkpoint.storage.storage_path import StoragePath, local_path, sync_folders


def record_files(where: StoragePath, above: StoragePath) -> Iterator[tuple[str, int, int]]:
    """Makes all files at and below ``where`` durable. Yields the path below ``above``, size and CRC-32 of each.

    All writes there must have ended.

    Raises:
        OSError: A file cannot be read.
    """
    path, top = Path(where), Path(above)  # handlers write to the local file system
    files = [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield file.relative_to(top).as_posix(), file.stat().st_size, crc32_of(local_path(file))
    above_it = {folder for folder in path.parents if folder == top or top in folder.parents}
    inside = {path, *(found for found in path.rglob("*") if found.is_dir())} if path.is_dir() else set()
    folders = above_it | inside
    sync_folders(local_path(folder) for folder in folders)
