"""How each leaf of a state is stored: its type, its format, and the grid of chunks that its shards are divided into.

The chunk grid of zarr is regular. So the chunk shape must divide the shard shape, which is the same for all shards of
an array. A shard is divided twice: into slices, which the processes that hold it share out (replica-parallel), and
each slice into chunks of bounded size. If several axes are equally suitable, the first one is divided: such chunks are
contiguous, and are written without a copy. The result depends only on shardings and options, so it is the same in all
processes.

Which processes hold which shards is also in arrays of numpy (``holders_of``): an array over thousands of processes has
thousands of shards, and a state has hundreds of such arrays. So no shard is looked at alone: the shards of a
``NamedSharding`` follow from the axes of its mesh, and shards that the same processes hold form a group. The result for
a sharding is kept for other arrays with that sharding.

Two states of the same form (``TreeSignature``) can be saved with the same plan.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec, Format, Index, chunk_count, zarr_dtype
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.handler_registry import HandlerRegistry
from gracepoint.checkpoint.options import SaveArgs, WriteOptions
from gracepoint.checkpoint.orbax import save_args_of
from gracepoint.errors import CheckpointRefused

Shape = tuple[int, ...]
Numbers = npt.NDArray[np.int64]

# Number of shardings whose result is kept. A state has few different ones.
_KEPT = 256


@dataclasses.dataclass(frozen=True, eq=False)
class HolderGroups:
    """Groups of shards. All groups have the same number of shards, and the same number of holders.

    Attributes:
        shards: Numbers of shards in C order of the grid of shards. One row for each group.
        holders: The processes that hold all shards of the group, in ascending order. One row for each group.
    """

    shards: Numbers
    holders: Numbers


@dataclasses.dataclass(frozen=True, eq=False)
class ShardHolders:
    """The shards of one leaf.

    Attributes:
        grid: How many shards the leaf has along each axis.
        shard_shape: Shape of a shard.
        groups: The shards by holders. Each shard is in one group.
    """

    grid: Shape
    shard_shape: Shape
    groups: tuple[HolderGroups, ...]

    @property
    def count(self) -> int:
        """Number of shards."""
        return math.prod(self.grid)

    @property
    def fewest(self) -> int:
        """The number of processes that hold the shard with the fewest holders. 1 if there are no shards."""
        return min((groups.holders.shape[1] for groups in self.groups), default=1)

    def index(self, number: int) -> Index:
        """Returns the index of a shard."""
        place = np.unravel_index(number, self.grid)
        return tuple((int(at) * size, int(at) * size + size) for at, size in zip(place, self.shard_shape, strict=True))


def holders_of(leaf: pytree.Leaf, process_count: int, processes: Sequence[int] | None = None) -> ShardHolders:
    """Returns the shards of a leaf and the processes that hold them. Without groups if the leaf has no elements.

    Processes are counted from 0 to ``process_count - 1``.

    Args:
        leaf: The leaf with its data.
        process_count: Number of processes that save together.
        processes: ``jax.process_index()`` of each of these processes. None if they are 0 to ``process_count - 1``.

    Raises:
        CheckpointError: The shards have different shapes, or a shard is held only by processes that do not take part
            in the save. The message names the leaf.
    """
    spec, data = leaf.spec, leaf.data
    assert spec is not None
    if 0 in spec.shape:
        return ShardHolders((0,) * len(spec.shape), spec.shape, ())
    if not leaf.is_global:
        return _copies(spec.shape, data, process_count)
    ranks = None if processes is None else tuple(processes)
    _check_not_of_one_process(leaf, process_count, ranks)
    shard_shape = tuple(data.sharding.shard_shape(spec.shape))
    grid = tuple(length // size for length, size in zip(spec.shape, shard_shape, strict=True))
    named = _partitions(data.sharding, grid)
    if named is None:
        groups = _of_any_sharding(data.sharding, spec.shape, process_count, ranks)
        if groups is None:
            raise CheckpointRefused(f"leaf {leaf.name!r}: shards of different shapes cannot be saved ({data.sharding})")
    else:
        groups = _of_mesh(data.sharding.mesh, named, process_count, ranks)
    whole = ShardHolders(grid, shard_shape, groups.groups)
    if groups.lost is not None:
        raise CheckpointRefused(
            f"leaf {leaf.name!r}: no process of those that save, {_listed(process_count, ranks)}, holds its shard at "
            f"{list(whole.index(groups.lost))} ({data.sharding}): all that hold a part of the state alone must save it"
        )
    return whole


@functools.lru_cache(maxsize=_KEPT)
def processes_with(sharding: Any) -> frozenset[int]:
    """Returns ``process_index`` of all processes that have devices of a sharding."""
    return frozenset(int(device.process_index) for device in sharding.device_set)


@dataclasses.dataclass(frozen=True, eq=False)
class _Found:
    """The holders of the shards of a sharding.

    Attributes:
        groups: See ``ShardHolders``.
        lost: Number of a shard that no process of the save holds. None if there is none.
    """

    groups: tuple[HolderGroups, ...]
    lost: int | None


def _copies(shape: Shape, data: Any, process_count: int) -> ShardHolders:
    """Returns the shards of a leaf that each process has a copy of."""
    shard_shape = shape if isinstance(data, np.ndarray) else tuple(data.sharding.shard_shape(shape))
    grid = tuple(length // size for length, size in zip(shape, shard_shape, strict=True))
    shards, holders = np.arange(math.prod(grid))[None], np.arange(process_count)[None]
    return ShardHolders(grid, shard_shape, (HolderGroups(shards, holders),))


def _partitions(sharding: Any, grid: Shape) -> tuple[tuple[str, ...], ...] | None:
    """Returns the mesh axes over which each array axis is partitioned. None if they do not describe the sharding."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = sharding.spec
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        return None
    axes: list[tuple[str, ...]] = []
    for entry in spec:
        if entry is None:
            axes.append(())
        elif isinstance(entry, str):
            axes.append((entry,))
        elif isinstance(entry, tuple) and all(isinstance(name, str) for name in entry):
            axes.append(entry)
        else:
            return None
    axes += [()] * (len(grid) - len(axes))
    sizes = sharding.mesh.shape
    if grid != tuple(math.prod(sizes[name] for name in names) for names in axes):
        return None
    return tuple(axes)


@functools.lru_cache(maxsize=_KEPT)
def _of_mesh(
    mesh: Any, axes: tuple[tuple[str, ...], ...], process_count: int, processes: tuple[int, ...] | None
) -> _Found:
    """Groups the shards of an array whose axes are partitioned over ``axes`` of a mesh."""
    sizes = dict(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    numbers = np.zeros(mesh.devices.shape, np.int64)
    for name in (name for names in axes for name in names):  # C order: the last name varies fastest
        place = [1] * mesh.devices.ndim
        place[mesh.axis_names.index(name)] = sizes[name]
        numbers = numbers * sizes[name] + np.arange(sizes[name]).reshape(place)
    count = math.prod(sizes[name] for names in axes for name in names)
    return _grouped(numbers.ravel(), _processes_of(mesh), count, process_count, processes)


@functools.lru_cache(maxsize=_KEPT)
def _processes_of(mesh: Any) -> Numbers:
    return np.fromiter((device.process_index for device in mesh.devices.flat), np.int64, mesh.devices.size)


@functools.lru_cache(maxsize=_KEPT)
def _of_any_sharding(
    sharding: Any, shape: Shape, process_count: int, processes: tuple[int, ...] | None
) -> _Found | None:
    """Groups the shards by the index that JAX gives for each device. None if the shards have different shapes."""
    shard_shape = sharding.shard_shape(shape)
    grid = tuple(length // size for length, size in zip(shape, shard_shape, strict=True))
    numbers, indices = [], []
    for device, slices in sharding.devices_indices_map(shape).items():
        index = normal_index(slices, shape)
        if any(stop - start != size for (start, stop), size in zip(index, shard_shape, strict=True)):
            return None
        place = [start // size for (start, _), size in zip(index, shard_shape, strict=True)]
        numbers.append(int(np.ravel_multi_index(place, grid)) if grid else 0)
        indices.append(device.process_index)
    return _grouped(
        np.asarray(numbers, np.int64), np.asarray(indices, np.int64), math.prod(grid), process_count, processes
    )


def _grouped(
    shards: Numbers, indices: Numbers, count: int, process_count: int, processes: tuple[int, ...] | None
) -> _Found:
    """Groups ``count`` shards by their holders.

    Args:
        shards: For each device, the number of the shard that it holds.
        indices: For each device, ``jax.process_index()`` of its process.
        count: Number of shards.
        process_count: Number of processes that save together.
        processes: Their ``jax.process_index()``. None if they are 0 to ``process_count - 1``.
    """
    ranks = np.full(max(int(indices.max(initial=0)), max(processes or (0,)), process_count - 1) + 1, -1)
    ranks[np.arange(process_count) if processes is None else np.asarray(processes)] = np.arange(process_count)
    saves = ranks[indices] >= 0  # other holders do not take part in the save
    pairs = np.unique(shards[saves] * process_count + ranks[indices[saves]])
    held, holders = np.divmod(pairs, process_count)
    holder_counts = np.bincount(held, minlength=count)
    if not holder_counts.all():
        return _Found((), int(np.flatnonzero(holder_counts == 0)[0]))
    groups = []
    for holder_count in np.unique(holder_counts):
        numbers = np.flatnonzero(holder_counts == holder_count)
        rows = holders[np.isin(held, numbers)].reshape(-1, holder_count)
        sets, group_of = np.unique(rows, axis=0, return_inverse=True)
        group_of = group_of.reshape(-1)
        sizes = np.bincount(group_of)
        in_groups = numbers[np.argsort(group_of, kind="stable")]
        starts = np.cumsum(sizes) - sizes
        for size in np.unique(sizes):
            chosen = np.flatnonzero(sizes == size)
            groups.append(HolderGroups(in_groups[starts[chosen][:, None] + np.arange(size)], sets[chosen]))
    return _Found(tuple(groups), None)


def _check_not_of_one_process(leaf: pytree.Leaf, process_count: int, processes: tuple[int, ...] | None) -> None:
    """Raises CheckpointError if the array is on the devices of one other process alone.

    To that process the array looks like a copy that every process has. The processes would compute different plans.
    """
    writers = processes_with(leaf.data.sharding)
    if len(writers) > 1 or process_count == 1:
        return
    (process,) = writers
    if process in (range(process_count) if processes is None else processes):
        raise CheckpointRefused(
            f"leaf {leaf.name!r}: expected an array over devices of all processes, or a copy in each, found one on the "
            f"devices of process {process} alone ({leaf.data.sharding}): replicate it over all processes, or keep it "
            "in process-local host state (host_state)"
        )


def _listed(process_count: int, processes: tuple[int, ...] | None) -> str:
    return ", ".join(map(str, range(process_count) if processes is None else processes))


def normal_index(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    """Returns the index that JAX gives as slices."""
    return tuple(slc.indices(size)[:2] for slc, size in zip(slices, shape, strict=True))


logger = logging.getLogger(__name__)


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
    size_bytes = args.chunk_byte_size
    for axis in args.shard_axes:
        if not 0 <= axis < len(shape):
            raise CheckpointRefused(
                f"leaf {name!r}: SaveArgs.shard_axes has {axis}; expected axes of shape {list(shape)}"
            )
    if size_bytes is None and args.shard_axes:
        # Without a size, these axes are divided completely, as in Orbax.
        return tuple(1 if axis in args.shard_axes else length for axis, length in enumerate(shape))
    if size_bytes is None:
        target_bytes = options.target_chunk_bytes
        chunk = chunk_shape(shape, itemsize, max(target_bytes, itemsize), smallest_bytes=target_bytes // _FAR_TOO_SMALL)
        if chunk == shape and math.prod(shape) * itemsize > target_bytes:
            logger.info("leaf %r is written in chunks of %s: it cannot be cut evenly", name, list(shape))
        return chunk
    if size_bytes < itemsize:
        raise CheckpointRefused(
            f"leaf {name!r}: SaveArgs.chunk_byte_size is {size_bytes}; expected at least the {itemsize} bytes of an "
            "element"
        )
    return chunk_shape(shape, itemsize, size_bytes, shard_axes=args.shard_axes)


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
    args_of_leaf = {}
    names = {leaf.name for leaf in leaves}
    for path, args in jax.tree_util.tree_flatten_with_path(save_args)[0]:
        name = pytree.name_of(pytree.path_of(path))
        if name not in names:
            raise CheckpointRefused(f"save_args{jax.tree_util.keystr(path)}: the state has no leaf {name!r}")
        args_of_leaf[name] = save_args_of(args, f"save_args{jax.tree_util.keystr(path)}")
    return args_of_leaf


def _smallest_factor(length: int) -> int:
    return next((factor for factor in range(2, math.isqrt(length) + 1) if length % factor == 0), length)


class TreeSignature:
    """Names, shapes, types and shardings of the leaves of one state."""

    def __init__(self, state: Any, leaves: Sequence[Leaf], handlers: HandlerRegistry | None = None) -> None:
        """``leaves`` is the result of ``pytree.flatten`` for ``state`` and ``handlers``."""
        self._handlers = handlers
        self._is_leaf = pytree.leaf_test(handlers)
        self._structure = jax.tree_util.tree_structure(state, is_leaf=self._is_leaf)
        self._leaves = [dataclasses.replace(leaf, data=None) for leaf in leaves]
        self._data = [_form_of(leaf.data) for leaf in leaves]

    def leaves_of(self, state: Any) -> list[Leaf] | None:
        """Returns the leaves of ``state``, or None if its form differs. Much faster than ``pytree.flatten``.

        Raises:
            CheckpointError: A leaf cannot be saved. The message names the leaf.
        """
        values, structure = jax.tree_util.tree_flatten(state, is_leaf=self._is_leaf)
        if not _equal(structure, self._structure):
            return self._by_leaves(state)
        rest, leaves = iter(values), []
        for leaf, form in zip(self._leaves, self._data, strict=True):
            if leaf.is_empty and not leaf.is_code:
                leaves.append(leaf)
                continue
            value = next(rest)
            pytree.check_there(leaf.path, value)
            if leaf.spec is None or leaf.spec.kind != "array":
                again = pytree.leaf_of(leaf.path, value, self._handlers)
                if again.spec != leaf.spec or again.value_type != leaf.value_type or _form_of(again.data) != form:
                    return None
                leaves.append(again)
            elif not isinstance(value, jax.Array) or _form_of(value) != form:
                return None
            else:
                leaves.append(Leaf(leaf.name, leaf.keys, leaf.value_type, leaf.spec, value, leaf.path))
        return leaves

    def _by_leaves(self, state: Any) -> list[Leaf] | None:
        """As ``leaves_of``, for a tree whose nodes differ at least in static fields, which are not saved.

        These may have no equality at all, as numpy arrays, or differ each time, as functions that are made again.
        """
        leaves = pytree.flatten(state, self._handlers)
        same = len(leaves) == len(self._leaves) and all(
            dataclasses.replace(leaf, data=None) == recorded and _form_of(leaf.data) == form
            for leaf, recorded, form in zip(leaves, self._leaves, self._data, strict=True)
        )
        return leaves if same else None


def _equal(structure: Any, other: Any) -> bool:
    """Returns whether two trees have equal nodes. False if their static fields cannot be compared."""
    try:
        return bool(structure == other)
    except Exception:  # noqa: BLE001 - the equality of the user's own types, which may raise anything
        return False


def _form_of(data: Any) -> Any:
    if isinstance(data, jax.Array):
        return data.shape, data.dtype, data.sharding
    return None  # the spec describes it
