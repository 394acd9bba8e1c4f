"""How each leaf is stored: its type, its format, and the grid of chunks that its shards are divided into.

The chunk grid of zarr is regular. So the chunk shape must divide the shard shape, which is the same for all shards of
an array. A shard is divided twice: into slices, which the processes that hold it share out (replica-parallel), and
each slice into chunks of bounded size. If several axes are equally suitable, the first one is divided: such chunks are
contiguous, and are written without a copy. The result depends only on shardings and options, so it is the same in all
processes.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec, Format, chunk_count, zarr_dtype
from gracepoint.checkpoint.options import SaveArgs, WriteOptions
from gracepoint.checkpoint.orbax_objects import save_args_of
from gracepoint.checkpoint.planning.shard_holders import holders_of
from gracepoint.errors import CheckpointRefused

logger = logging.getLogger(__name__)

Shape = tuple[int, ...]

# With more chunks than this, the files can cost more than their contents. A file system takes some tenths of a
# millisecond to create and sync each file. OCDBT writes all chunks at once (10,000 leaves of 1 KiB: 0.2 s, as files
# 6 s).
_MANY_CHUNKS = 512
_SMALL_CHUNK_BYTES = 1 << 18  # on average
# If no chunk size was asked for, a shape is left whole if its chunks would be more than this many times smaller than
# the target.
_FAR_TOO_SMALL = 16


def stored_specs(
    leaves: Sequence[pytree.Leaf],
    process_count: int,
    options: WriteOptions,
    save_args: Any = None,
    processes: Sequence[int] | None = None,
) -> list[ArraySpec | None]:
    """Returns what is stored of each leaf. None for a leaf that is not an array.

    Args:
        leaves: The leaves as they were found in the state.
        process_count: Number of processes that save the state together.
        options: Options for all leaves.
        save_args: ``SaveArgs`` for all leaves, or a tree of them with the structure of the state. The tree may have
            fewer leaves.
        processes: ``jax.process_index()`` of each of these processes. None if they are 0 to ``process_count - 1``.

    Raises:
        CheckpointError: A leaf cannot be saved, or not with these arguments. The message names its path.
    """
    args = args_by_name(leaves, save_args)
    specs = []
    for leaf in leaves:
        replicas = 1
        if leaf.spec is not None and options.replica_parallel:
            replicas = holders_of(leaf, process_count, processes).fewest
        specs.append(leaf.spec and _stored(leaf, leaf.spec, args.get(leaf.name, SaveArgs()), replicas, options))
    form = _format([spec for spec in specs if spec], options)
    return [spec and dataclasses.replace(spec, format=form) for spec in specs]


def chunk_shape(
    shape: Shape, itemsize: int, max_bytes: int, *, shard_axes: Sequence[int] = (), smallest_bytes: int = 0
) -> Shape:
    """Returns the shape of the largest chunks found that divide ``shape`` and have at most ``max_bytes``.

    Args:
        shape: The shape to divide, without axes of length 0.
        itemsize: Size of one element in bytes.
        max_bytes: Upper bound on the size of a chunk, at least ``itemsize``.
        shard_axes: Axes that are divided before all others.
        smallest_bytes: Lower bound on the size of a chunk. If smaller chunks would be needed, ``shape`` is returned.
    """
    chunk = list(shape)
    while (size_bytes := math.prod(chunk) * itemsize) > max_bytes:
        axes = [axis for axis in shard_axes if chunk[axis] > 1] or range(len(chunk))
        # The smallest factor overshoots least. Among equal factors, the first axis gives contiguous chunks.
        factor, axis = min((_smallest_factor(chunk[axis]), axis) for axis in axes if chunk[axis] > 1)
        if size_bytes // factor < smallest_bytes:
            return shape
        chunk[axis] //= factor
    return tuple(chunk)


def slice_shape(shape: Shape, replicas: int, itemsize: int, min_bytes: int) -> Shape:
    """Returns the shape of the slices of a shard of shape ``shape`` that ``replicas`` processes share out.

    One axis is divided into as many equal parts as possible, at most ``replicas``, and so that a slice has at least
    ``min_bytes``. If several axes are equally suitable, it is the first one. Returns ``shape`` if no axis is suitable.
    """
    size_bytes = math.prod(shape) * itemsize
    for parts in range(min(replicas, size_bytes // min_bytes), 1, -1):
        for axis, length in enumerate(shape):
            if length % parts == 0:
                return (*shape[:axis], length // parts, *shape[axis + 1 :])
    return shape


def _stored(leaf: pytree.Leaf, spec: ArraySpec, args: SaveArgs, replicas: int, options: WriteOptions) -> ArraySpec:
    spec = dataclasses.replace(spec, dtype=_dtype(leaf, spec, args))
    if 0 in spec.shape:
        return spec
    itemsize = spec.numpy_dtype.itemsize
    write_shape = slice_shape(
        spec.chunk, min(replicas, options.max_replicas or replicas), itemsize, options.min_slice_bytes
    )
    chunk = _chunk(spec.name, write_shape, itemsize, args, options)
    return dataclasses.replace(spec, chunk=chunk, write_shape=None if chunk == write_shape else write_shape)


def _chunk(name: str, shape: Shape, itemsize: int, args: SaveArgs, options: WriteOptions) -> Shape:
    asked = args.chunk_byte_size
    for axis in args.shard_axes:
        if not 0 <= axis < len(shape):
            raise CheckpointRefused(
                f"leaf {name!r}: SaveArgs.shard_axes has {axis}; expected axes of shape {list(shape)}"
            )
    if asked is None and args.shard_axes:
        # Without a size, these axes are divided completely, as in Orbax.
        return tuple(1 if axis in args.shard_axes else length for axis, length in enumerate(shape))
    if asked is None:
        wanted = options.target_chunk_bytes
        chunk = chunk_shape(shape, itemsize, max(wanted, itemsize), smallest_bytes=wanted // _FAR_TOO_SMALL)
        if chunk == shape and math.prod(shape) * itemsize > wanted:
            logger.info("leaf %r is written in chunks of %s: it cannot be cut evenly", name, list(shape))
        return chunk
    if asked < itemsize:
        raise CheckpointRefused(
            f"leaf {name!r}: SaveArgs.chunk_byte_size is {asked}; expected at least the {itemsize} bytes of an element"
        )
    return chunk_shape(shape, itemsize, asked, shard_axes=args.shard_axes)


def _dtype(leaf: pytree.Leaf, spec: ArraySpec, args: SaveArgs) -> str:
    if args.dtype is None:
        return spec.dtype
    if spec.kind == "key":
        raise CheckpointRefused(f"leaf {leaf.name!r}: typed PRNG keys cannot be cast; SaveArgs.dtype is {args.dtype}")
    dtype = np.dtype(args.dtype)
    stored = zarr_dtype(dtype)
    if stored is None:
        raise CheckpointRefused(f"leaf {leaf.name!r}: SaveArgs.dtype is {dtype}, which cannot be stored")
    if leaf.data.dtype.kind == "c" and dtype.kind != "c":
        raise CheckpointRefused(f"leaf {leaf.name!r}: {leaf.data.dtype} would lose its imaginary part as {dtype}")
    return stored


def _format(specs: Sequence[ArraySpec], options: WriteOptions) -> Format:
    ocdbt = options.use_ocdbt
    if ocdbt is None:
        chunks = sum(map(chunk_count, specs))
        total_bytes = sum(math.prod(spec.shape) * spec.numpy_dtype.itemsize for spec in specs)
        ocdbt = chunks > _MANY_CHUNKS and total_bytes < chunks * _SMALL_CHUNK_BYTES
    level = None if options.compression is None else options.compression_level
    return Format(3 if options.use_zarr3 else 2, ocdbt, level)


def args_by_name(leaves: Sequence[pytree.Leaf], save_args: Any) -> Mapping[str, SaveArgs]:
    """Returns the arguments by the names of their leaves, for the leaves that have arguments.

    Raises:
        CheckpointError: The state has no leaf for an argument.
    """
    if save_args is None:
        return {}
    if jax.tree_util.all_leaves([save_args]):  # one object for all leaves
        save_args = save_args_of(save_args, "save_args")
        return {leaf.name: save_args for leaf in leaves if leaf.spec is not None and leaf.spec.kind != "key"}
    found = {}
    names = {leaf.name for leaf in leaves}
    for path, args in jax.tree_util.tree_flatten_with_path(save_args)[0]:
        name = pytree.name_of(pytree.path_of(path))
        if name not in names:
            raise CheckpointRefused(f"save_args{jax.tree_util.keystr(path)}: the state has no leaf {name!r}")
        found[name] = save_args_of(args, f"save_args{jax.tree_util.keystr(path)}")
    return found


def _smallest_factor(length: int) -> int:
    return next((factor for factor in range(2, math.isqrt(length) + 1) if length % factor == 0), length)
