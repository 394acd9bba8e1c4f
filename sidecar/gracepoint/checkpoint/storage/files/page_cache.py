"""Has the system read a file into its page cache before the file is needed.

This module has no threads and no state.
"""

from __future__ import annotations

import os
import sys

#: For one request the kernel reads no more than the device's window of read-ahead, whatever was asked for. 128 KiB is
#: the default window of disks and of network file systems; larger ones only make the requests of a file overlap less.
_PIECE_BYTES = 128 << 10


def read_ahead(key: str) -> None:
    """Asks the system to read a whole file into the page cache. Waits only while the device takes no more requests.

    Does nothing where the system takes no such advice (macOS).

    Args:
        key: The path of the file.

    Raises:
        OSError: The file cannot be opened.
    """
    if sys.platform != "linux":
        return
    descriptor = os.open(key, os.O_RDONLY)
    try:
        for offset in range(0, os.fstat(descriptor).st_size, _PIECE_BYTES):
            os.posix_fadvise(descriptor, offset, _PIECE_BYTES, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(descriptor)
