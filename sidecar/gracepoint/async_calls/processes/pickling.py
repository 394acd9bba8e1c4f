"""A call as bytes: its small parts as a pickle, and its large buffers beside it, so that they are copied once.

``pack`` writes a call into shared memory, and ``unpack`` reads it in the worker without copying: the arrays lie in the
shared memory. The layout of a block is: a header, the pickle, the buffers. The message that accompanies a block holds
the size of the header.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gracepoint.async_calls.processes.shared_memory import Block, BlockPool
from gracepoint.jax_isolation import to_numpy

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
