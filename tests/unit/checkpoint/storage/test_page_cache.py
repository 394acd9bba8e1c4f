"""Files that are read into the page cache before they are needed: the whole of them, not only their beginnings."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage.posix import advise_read_ahead
from tests.waiting import until

LARGE_BYTES = 32 << 20  # more than disks read for one request


def cached_bytes(path: Path) -> int:
    """Returns how much of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = path.stat().st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        start = ctypes.c_char.from_buffer(mapped)
        answer = libc.mincore(ctypes.byref(start), ctypes.c_size_t(size), pages)
        del start
    assert answer == 0, os.strerror(ctypes.get_errno())
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_the_whole_of_a_large_file_is_read(tmp_path: Path) -> None:
    # Where the folder for temporary files is in memory, everything is cached from the start.
    path = tmp_path / "chunk"
    path.write_bytes(os.urandom(1 << 20) * (LARGE_BYTES >> 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    advise_read_ahead(str(path))
    wanted_bytes = LARGE_BYTES * 3 // 4  # the kernel may have dropped some where others need the memory
    until(lambda: cached_bytes(path) >= wanted_bytes, lambda: f"{wanted_bytes} bytes, found {cached_bytes(path)}")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        advise_read_ahead(str(tmp_path / "missing"))
