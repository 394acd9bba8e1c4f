"""A call as bytes in shared memory: its small parts as a pickle, and its large buffers after it, copied once.

``pack`` writes a call into a ``Block``, and ``unpack`` reads it in the worker without copying: the arrays lie in the
shared memory. A block holds a header, the pickle, and the buffers. The message that accompanies a block holds the size
of the header.

A block is anonymous shared memory (``memfd_create``), without a name in any file system. The kernel frees it when the
last process that holds it ends, however it ends, so nothing is left behind. The pages are charged to the container of
the process that touches them first: the trainer. One process writes a block, and hands it to one worker. A
``BlockPool`` belongs to one caller; its methods may be called from any thread.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

from gracepoint.jax_isolation import to_numpy

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


#: Buffers begin at multiples of this many bytes, so that they can be written with O_DIRECT.
_ALIGNMENT = 4096
#: Bytes that are copied at once. Other threads get the interpreter lock in between.
_PIECE = 16 << 20


def pack(
    function: Callable[..., Any], arguments: Sequence[Any], keywords: dict[str, Any], pool: BlockPool
) -> tuple[Block, int, list[Block]]:
    """Copies a call into shared memory. Blocks among the arguments are not copied: the worker maps them, too.

    Returns:
        The block, the size of its header in bytes, and the blocks among the arguments.

    Raises:
        TypeError: The function or an argument cannot be sent to another process. The message says why.
        OSError: There is no memory left for the call.
    """
    _check_importable(function)
    buffers: list[memoryview] = []
    stream = io.BytesIO()
    pickler = _Pickler(stream, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
    try:
        pickler.dump((function, tuple(arguments), keywords))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"the arguments of {_name(function)} cannot be sent to a worker process: {error}; expected values that can "
            "be pickled, and functions that can be imported"
        ) from error
    pickled = stream.getbuffer()
    offsets, end = [], 0
    for buffer in buffers:
        offsets.append((end, buffer.nbytes))
        end += -(-buffer.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = pickle.dumps((len(pickled), offsets))
    start = _start_of_buffers(len(header), len(pickled))
    block = pool.take(start + end)
    with memoryview(block.memory) as memory:
        memory[: len(header)] = header
        memory[len(header) : len(header) + len(pickled)] = pickled
        for buffer, (offset, size) in zip(buffers, offsets, strict=True):
            for piece in range(0, size, _PIECE):
                stop = min(piece + _PIECE, size)
                memory[start + offset + piece : start + offset + stop] = buffer[piece:stop]
    return block, len(header), pickler.shared


def unpack(
    memory: memoryview, header_bytes: int, fds: Sequence[int] = ()
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Returns the function, its arguments and its keyword arguments.

    Arrays are read-only and lie in ``memory``. Blocks among the arguments are mapped from ``fds``, and can be written.
    """
    pickled_bytes, offsets = pickle.loads(memory[:header_bytes])
    pickled = memory[header_bytes : header_bytes + pickled_bytes]
    start = _start_of_buffers(header_bytes, pickled_bytes)
    buffers = [memory[start + offset : start + offset + size].toreadonly() for offset, size in offsets]
    unpickler = _Unpickler(io.BytesIO(pickled), buffers=buffers)
    unpickler.fds = fds
    function, arguments, keywords = unpickler.load()
    return function, arguments, keywords


def _start_of_buffers(header_bytes: int, pickled_bytes: int) -> int:
    return -(-(header_bytes + pickled_bytes) // _ALIGNMENT) * _ALIGNMENT


class _Pickler(pickle.Pickler):
    """Sends JAX arrays as NumPy arrays: to unpickle a JAX array would start a backend in the worker.

    NumPy pickles arrays of its own types out of band. Other arrays, such as those of bfloat16, are sent as bytes.

    Attributes:
        shared: The blocks that were found. In the pickle stand their positions in this list.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.shared: list[Block] = []

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Block:
            self.shared.append(value)
            return _mapped, (len(self.shared) - 1, value.bytes)
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(value, jax.Array):
            if not value.is_fully_addressable:
                raise TypeError(
                    f"found a jax.Array of shape {value.shape} with shards in other processes; expected arrays of this "
                    "process, for example its addressable shards"
                )
            return self._reduced(to_numpy(value))
        numpy = sys.modules.get("numpy")
        if numpy is not None and type(value) is numpy.ndarray:
            return self._reduced(value)
        return NotImplemented

    @staticmethod
    def _reduced(array: Any) -> Any:
        if array.dtype.kind == "V" and array.dtype.names is None and array.flags.c_contiguous:
            return _of_bytes, (array.reshape(-1).view("uint8"), array.dtype, array.shape)
        return array.__reduce_ex__(5)


class _Unpickler(pickle.Unpickler):
    """Maps the blocks that came with a call."""

    fds: Sequence[int] = ()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _mapped.__name__):
            return lambda index, size: Block.received(os.dup(self.fds[index]), size)
        return super().find_class(module, name)


def _mapped(index: int, size: int) -> Block:
    raise TypeError(f"block {index} of {size} bytes was pickled: only a call to a worker process can hold it")


def _of_bytes(data: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return data.view(dtype).reshape(shape)


def _check_importable(function: Callable[..., Any]) -> None:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if "<lambda>" in name or "<locals>" in name:
        reason = "it is a lambda, or it is defined inside another function"
    elif module == "__main__":
        reason = "it is defined in the main script, which a worker process does not run"
    else:
        return
    raise TypeError(
        f"async_fn {_name(function)} cannot be sent to a worker process because {reason}; define it at the top of a "
        "module that can be imported, or use ThreadAsyncCaller"
    )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
