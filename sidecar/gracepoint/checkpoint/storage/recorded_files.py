"""Files that code of the user's wrote: listed, made durable, and recorded with their checksums."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gracepoint.checkpoint.storage.posix import crc32_of, sync_folders


def record_files(path: Path, top: Path) -> Iterator[tuple[str, int, int]]:
    """Makes all files at and below ``path`` durable; yields the path below ``top``, size and CRC-32 of each.

    Nobody writes there any more.

    Raises:
        OSError: A file cannot be read.
    """
    files = [path] if path.is_file() else sorted(found for found in path.rglob("*") if found.is_file())
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        yield file.relative_to(top).as_posix(), file.stat().st_size, crc32_of(file)
    sync_folders({path.parent, *(file.parent for file in files), *(f for f in path.rglob("*") if f.is_dir())})
