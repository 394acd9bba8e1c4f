"""Which process writes which chunk.

Every process computes the same plan from the shardings alone, without a message. A chunk that several
processes hold is written by the one with the fewest bytes so far, largest chunks first, so that replicated
arrays are spread over all. A leaf that is local to each process (a numpy array, a number, an array on local
devices) counts as replicated: one process writes it, and the others record their copy's checksum, so that
copies that differ fail the save instead of being lost silently.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint import tree
from gracepoint.checkpoint.spec import ArraySpec
from gracepoint.errors import CheckpointError

Index = tuple[tuple[int, int], ...]  # start and stop in each dimension


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One chunk of the leaf ``leaves[leaf]`` that this process holds."""

    leaf: int
    file: str  # below default/
    index: Index
    mine: bool  # this process writes it; else only its checksum is recorded


@dataclasses.dataclass(frozen=True)
class Plan:
    """This process's part of a save.

    Attributes:
        chunks: What it reads from devices: the chunks that it writes, and copies to compare.
        arrays: Leaves (by index) whose ``.zarray`` it writes.
        total_bytes: Size of the state's data, counted once, over all processes.
    """

    chunks: tuple[Chunk, ...]
    arrays: tuple[int, ...]
    total_bytes: int


def make_plan(leaves: Sequence[tree.Leaf], process_index: int, process_count: int) -> Plan:
    """Returns what process ``process_index`` of ``process_count`` writes of ``leaves``."""
    held = [
        (leaf_index, index, sorted(holders))
        for leaf_index, leaf in enumerate(leaves)
        if leaf.spec is not None
        for index, holders in _holders(leaf, process_count).items()
    ]
    chunk_bytes = {i: _chunk_bytes(leaf) for i, leaf in enumerate(leaves) if leaf.spec is not None}
    load = [0] * process_count
    owners: dict[tuple[int, Index], int] = {}
    # First what leaves no choice, then the largest first: the remaining choices then even out the load.
    for leaf_index, index, holders in sorted(held, key=lambda h: (len(h[2]) > 1, -chunk_bytes[h[0]], h[0], h[1])):
        owner = min(holders, key=lambda process: (load[process], process))
        load[owner] += chunk_bytes[leaf_index]
        owners[leaf_index, index] = owner
    chunks = []
    writers: dict[int, int] = {}  # of .zarray, by leaf: who writes the first chunk; process 0 where there is none
    for leaf_index, index, _ in held:
        owner = owners[leaf_index, index]
        leaf = leaves[leaf_index]
        assert leaf.spec is not None
        writers.setdefault(leaf_index, owner)
        if owner == process_index or not leaf.is_global:
            chunks.append(Chunk(leaf_index, chunk_file(leaf.spec, index), index, owner == process_index))
    arrays = tuple(leaf_index for leaf_index in chunk_bytes if writers.get(leaf_index, 0) == process_index)
    return Plan(tuple(chunks), arrays, sum(load))


def chunk_file(spec: ArraySpec, index: Index) -> str:
    """Returns the file of the chunk at ``index``, below ``default/``."""
    grid = [str(start // max(1, size)) for (start, _), size in zip(index, spec.chunk, strict=True)]
    return f"{spec.name}/{'.'.join(grid) or '0'}"


def grid(spec: ArraySpec) -> list[Index]:
    """Returns the indices of all chunks of an array."""
    if 0 in spec.shape:
        return []  # zarr has no chunks of what has no data
    axes = [
        [(start, min(start + size, length)) for start in range(0, length, size)]
        for length, size in zip(spec.shape, spec.chunk, strict=True)
    ]
    return list(itertools.product(*axes))


def normal_index(slices: Sequence[slice], shape: Sequence[int]) -> Index:
    return tuple(slc.indices(size)[:2] for slc, size in zip(slices, shape, strict=True))


def local_shards(data: Any) -> dict[Index, Any]:
    """Returns this process's distinct shards of ``data`` by index: JAX arrays of one device, or a numpy
    array."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): data}
    shards: dict[Index, Any] = {}
    for shard in data.addressable_shards:
        shards.setdefault(normal_index(shard.index, data.shape), shard.data)
    return shards


def to_host(shard: Any) -> npt.NDArray[Any]:
    """Returns the shard's values in C order.

    A view of JAX's own memory where that is possible (on CPU), so valid only until the array is donated.
    Arrays with a transposed device layout come as strided views, whose raw bytes would be in another order.
    """
    return np.asarray(np.asarray(shard), order="C")


def _holders(leaf: tree.Leaf, process_count: int) -> dict[Index, set[int]]:
    spec, data = leaf.spec, leaf.data
    assert spec is not None
    if 0 in spec.shape:
        return {}
    if not leaf.is_global:
        return {index: set(range(process_count)) for index in local_shards(data)}
    holders: dict[Index, set[int]] = {}
    for device, slices in data.sharding.devices_indices_map(spec.shape).items():
        index = normal_index(slices, spec.shape)
        if any(stop - start != size for (start, stop), size in zip(index, spec.chunk, strict=True)):
            raise CheckpointError(f"leaf {leaf.name!r}: shards of different shapes cannot be saved ({data.sharding})")
        if not 0 <= device.process_index < process_count:
            raise CheckpointError(
                f"leaf {leaf.name!r} has a shard on process {device.process_index}, but the gang has only "
                f"{process_count} processes: attach to all processes of the JAX cluster"
            )
        holders.setdefault(index, set()).add(device.process_index)
    return holders


def _chunk_bytes(leaf: tree.Leaf) -> int:
    assert leaf.spec is not None
    return int(np.prod(leaf.spec.chunk, dtype=np.int64)) * int(leaf.data.dtype.itemsize)
