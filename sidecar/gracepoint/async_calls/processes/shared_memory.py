"""Anonymous shared memory (``memfd_create``) for calls on their way to a worker process.

A block has no name in any file system. The kernel frees it when the last process that holds it ends, however it ends.
So nothing is left behind. The pages are charged to the container of the process that touches them first: the trainer.

One process writes a block, and hands it to one worker. A ``BlockPool`` belongs to one caller; its methods may be called
from any thread.
"""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import weakref
from typing import Self

#: Blocks are whole pages of this size, so that blocks of nearly equal calls can be used again.
_GRANULE = 1 << 20


class Block:
    """A piece of shared memory, writable in the process that made it.

    Attributes:
        fd: File descriptor of the memory. It can be sent to another process.
        bytes: Size of the memory.
        memory: The memory, mapped.
    """

    def __init__(self, size: int) -> None:
        self._own(_anonymous_file())
        try:
            os.ftruncate(self.fd, size)
            self._map(size)
        except BaseException:
            self._closing()
            raise

    @classmethod
    def received(cls, fd: int, size: int) -> Self:
        """Returns the memory behind a descriptor that another process has sent. Takes the descriptor over."""
        block = cls.__new__(cls)
        block._own(fd)  # noqa: SLF001  of this class
        block._map(size)  # noqa: SLF001
        return block

    def _own(self, fd: int) -> None:
        # From here on, only this closes the descriptor, and once: closed twice, it could be that of another file.
        self._closing = weakref.finalize(self, os.close, fd)
        self._closing.atexit = False
        self.fd = fd

    def _map(self, size: int) -> None:
        self.bytes = size
        self.memory = mmap.mmap(self.fd, size)

    def free(self) -> None:
        """Gives the memory back once no process maps it. Safe to repeat.

        Nobody has to call it: a block that is deleted is freed with the last array in it.
        """
        self.memory.close()
        self.fd = -1
        self._closing()


def _anonymous_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("gracepoint", os.MFD_CLOEXEC)
    fd, name = tempfile.mkstemp()
    os.unlink(name)
    return fd


class BlockPool:
    """Blocks that are used again: memory that was touched before is filled at the speed of ``memcpy``.

    Args:
        kept: Number of free blocks that are kept for the next calls: the largest.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._free: list[Block] = []
        self._closed = False
        self._lock = threading.Lock()

    def take(self, size: int) -> Block:
        """Returns a block of at least ``size`` bytes.

        Raises:
            OSError: The kernel has no memory left, or the limit of open files is reached.
        """
        size = max(_GRANULE, -(-size // _GRANULE) * _GRANULE)
        with self._lock:
            fitting = sorted((b for b in self._free if size <= b.bytes <= 2 * size), key=lambda b: b.bytes)
            if fitting:
                self._free.remove(fitting[0])
                return fitting[0]
        return Block(size)

    def give_back(self, block: Block) -> None:
        """Takes a block back that nobody reads any more."""
        with self._lock:
            self._free = sorted((*self._free, block), key=lambda b: b.bytes)
            surplus = len(self._free) - (0 if self._closed else self._kept)
            dropped, self._free = self._free[: max(0, surplus)], self._free[max(0, surplus) :]
        for each in dropped:
            each.free()

    def close(self) -> None:
        """Frees the blocks that are not in use. The others are freed when they come back."""
        with self._lock:
            self._closed = True
            dropped, self._free = self._free, []
        for each in dropped:
            each.free()
