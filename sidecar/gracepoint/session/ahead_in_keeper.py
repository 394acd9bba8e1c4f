"""Has the operating system read the newest step into the page cache before the step is restored.

A save bypasses the page cache, so a restore finds none of its files there. A process needs again what it wrote, unless
the shardings or the number of processes have changed. If they have, reading ahead is useless and does no harm. Object
stores have no page cache. There, listing the steps makes the credentials and a connection ready, and nothing more is
read. The trainer does this while it joins (``attach``), and the keeper's container while that of the trainer starts:

    python -m gracepoint.session.ahead_in_keeper

The kubelet starts the keeper before the training container, and the keeper starts this process, with the variables and
volumes of the training container. So it knows the directory and the place of the pod's process. It has the system read
what that process wrote of the newest step, and ends. It does not load JAX.

The page cache is charged to the container that fills it. So this fills at most ``_PART`` of what the keeper's memory
limit leaves. If the keeper's workers need that memory, the kernel drops the pages. Of an object store nothing is read:
its bytes would have to be handed over in memory, which the keeper does not have.

One thread. What fails here is only logged: the trainer reads the files itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from gracepoint import machine
from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.format.records import DoneRecord, ManifestPart
from gracepoint.checkpoint.storage.locations import UserPath, storage_path
from gracepoint.checkpoint.storage.posix import PosixPath, advise_read_ahead
from gracepoint.settings import Settings

logger = logging.getLogger(__name__)

_PART = 0.75
_FILE_SCHEME = "file://"
#: Fraction of the free memory that a trainer may fill. The restore needs memory, too. Processes that share a machine
#: share the page cache, and the kernel drops what does not fit.
_TRAINERS_PART = 0.25


def read_ahead(directory: UserPath, process_index: int, *, part: float = _TRAINERS_PART) -> int:
    """Begins to read what a process wrote of the newest step.

    Args:
        directory: The directory of the steps.
        process_index: Index of the process.
        part: Fraction of the free memory of the caller's container and machine that may be filled, 0 to 1.

    Returns:
        How many bytes are being read. 0 if there is no step, if the newest step has no record of this process, or if
        ``directory`` is not in a file system.

    Raises:
        OSError: A file cannot be opened.
        CheckpointError: A record of the step cannot be read.
    """
    root = storage_path(directory)
    paths = Layout(root)
    steps = paths.steps()
    if not steps or not isinstance(root, PosixPath):
        return 0
    folder = paths.step(max(steps))
    where = folder / layout.done_record(process_index)
    if where.entry() is None:  # another number of processes, or Orbax wrote it
        return 0
    record = DoneRecord.from_bytes(where.read_bytes(), str(where))
    files = record.files
    if record.chunks is not None:
        manifest = folder / layout.manifest_part(process_index)
        files = {**files, **ManifestPart.from_bytes(manifest.read_bytes(), str(manifest)).files}
    left_bytes = int(min(machine.left_by_pool().values(), default=0) * part)
    begun_bytes = 0
    for path, file in files.items():
        if begun_bytes + file.bytes > left_bytes:
            break
        advise_read_ahead((folder / path).key)
        begun_bytes += file.bytes
    return begun_bytes


def main(environ: Mapping[str, str]) -> int:
    """Begins to read ahead. Never raises.

    Args:
        environ: The variables of the training container.

    Returns:
        How many bytes are being read. 0 if there is nothing to read, or it cannot be read.
    """
    try:
        settings = Settings.from_environment(environ)
        directory = settings.directory
        if directory is None or settings.process_count is None or not _is_in_file_system(directory):
            return 0
        begun_bytes = read_ahead(directory, settings.process_id, part=_PART)
    except Exception as error:  # noqa: BLE001 - the trainer meets it again, and raises it if it counts
        logger.info("the newest checkpoint is not read ahead: %s", error)
        return 0
    if begun_bytes:
        logger.info("reading ahead what process %d saved last bytes=%d", settings.process_id, begun_bytes)
    return begun_bytes


def _is_in_file_system(directory: str) -> bool:
    return "://" not in directory or directory.startswith(_FILE_SCHEME)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    main(os.environ)
