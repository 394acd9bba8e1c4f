"""Reads ahead the newest checkpoint in the keeper's container, while the container of the trainer starts.

    python -m gracepoint.session.ahead_in_keeper

The kubelet starts the keeper before the training container, and the keeper starts this process, with the variables and
volumes of the training container. So it knows the directory and the place of the pod's process. It has the system read
what that process wrote of the newest step, as ``attach`` does in the trainer after its imports, and ends.

The page cache is charged to the container that fills it. So this fills at most ``_PART`` of what the keeper's memory
limit leaves. If the keeper's workers need that memory, the kernel drops the pages. Of an object store nothing is read:
its bytes would have to be handed over in memory, which the keeper does not have.

One thread. What fails here is only logged: the trainer reads the files itself.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from gracepoint.checkpoint.reading.parallel_reader import read_ahead
from gracepoint.settings import Settings

logger = logging.getLogger(__name__)

_PART = 0.75
_FILE_SCHEME = "file://"


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
