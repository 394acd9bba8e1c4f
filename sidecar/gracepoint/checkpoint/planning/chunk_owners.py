"""Which process writes each chunk of a state, in closed form.

The chunks of all leaves are assigned with arrays of numpy, leaf by leaf. A chunk that only one process holds is written
by that process. The other chunks are assigned after these, leaves with the largest chunks first. The holders of a group
of shards share out the chunks of the group: each next chunk goes to the holder with the fewest bytes. How many chunks
each holder gets is computed at once, not chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.planning.shard_holders import HolderGroups, Numbers, Shape, ShardHolders, holders_of
from gracepoint.checkpoint.storage.checksum import crc32

Owners = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, eq=False)
class LeafOwners:
    """The chunks of one leaf.

    Attributes:
        shards: The shards of the leaf and their holders.
        grid: How many chunks a shard has along each axis.
        owners: The process that writes each chunk. One row for each shard, with its chunks. Shards and the chunks of a
            shard are in C order.
        chunk_bytes: Size of the values of a chunk.
    """

    shards: ShardHolders
    grid: Shape
    owners: Owners
    chunk_bytes: int

    @property
    def checksum(self) -> int:
        """Equal in all processes that compute the same owners."""
        return crc32(self.owners.tobytes())

    def in_grid_order(self) -> Owners:
        """Returns the owners in C order of the grid of all chunks of the leaf."""
        axes = len(self.grid)
        nested = self.owners.reshape((*self.shards.grid, *self.grid))
        return nested.transpose([axis + part for axis in range(axes) for part in (0, axes)]).reshape(-1)


def assign(
    leaves: Sequence[pytree.Leaf],
    process_count: int,
    processes: Sequence[int] | None = None,
    *,
    max_replicas: int | None = None,
) -> dict[int, LeafOwners]:
    """Returns the owners of the chunks of all leaves that are arrays, by index of the leaf.

    The result is the same in all processes.

    Args:
        leaves: The leaves with the specs that are stored.
        process_count: Number of processes that save together.
        processes: ``jax.process_index()`` of each of these processes. None if they are 0 to ``process_count - 1``.
        max_replicas: Upper bound on the number of processes that write chunks of one shard. None: no bound.

    Raises:
        CheckpointError: The shards of a leaf cannot be stored. The message names the leaf.
    """
    found = {}
    for position, leaf in enumerate(leaves):
        if leaf.spec is not None:
            shards = holders_of(leaf, process_count, processes)
            chunk = leaf.spec.chunk
            grid = tuple(-(-length // max(1, size)) for length, size in zip(shards.shard_shape, chunk, strict=True))
            owners = np.zeros((shards.count, _product(grid)), np.uint32)
            found[position] = LeafOwners(shards, grid, owners, leaf.spec.chunk_bytes)
    load = np.zeros(process_count, np.int64)
    for of_leaf in found.values():
        for group in of_leaf.shards.groups:
            if group.holders.shape[1] == 1:
                of_leaf.owners[group.shards] = group.holders[:, :, None]
                own_bytes = group.shards.shape[1] * of_leaf.owners.shape[1] * of_leaf.chunk_bytes
                np.add.at(load, group.holders[:, 0], own_bytes)
    for position in sorted(found, key=lambda position: (-found[position].chunk_bytes, position)):
        for group in found[position].shards.groups:
            if group.holders.shape[1] > 1:
                _share_out(found[position], group, load, max_replicas)
    return found


def fill(loads: Numbers, count: int, size: int) -> Numbers:
    """Returns how many of ``count`` items each holder of a group gets.

    Each next item goes to the holder with the smallest load; among equal ones, to the first.

    Args:
        loads: Load of each holder before. One row for each group.
        count: Number of items to share out in each group.
        size: What an item adds to the load. At least 1.
    """
    rows = np.arange(len(loads))
    counts: Numbers = np.zeros_like(loads)
    if count == 1:
        counts[rows, loads.argmin(axis=1)] = 1
        return counts
    # If items could be divided, the holders with the smallest loads would be filled up to one level. ``levels`` has
    # that level for each number of holders that are filled, and ``filled`` is the right number: the next holder is not
    # below the level. Whole items leave each of these holders at most one item short of the level. The items that are
    # left go to the smallest loads.
    ordered = np.sort(loads, axis=1)
    numbers = np.arange(1, loads.shape[1] + 1)
    levels = -(-(count * size + np.cumsum(ordered, axis=1)) // numbers)
    filled = np.maximum((levels > ordered).sum(axis=1), 1)
    # For up to ``filled`` holders, the level is above the load of the last one of them. For more holders it is not.
    level = levels[rows, filled - 1][:, None]
    counts = np.maximum(-((loads - level + size) // size), 0)
    left = count - counts.sum(axis=1)
    order = np.argsort(loads + counts * size, axis=1, kind="stable")
    chosen = np.arange(loads.shape[1]) < left[:, None]
    np.put_along_axis(counts, order, np.take_along_axis(counts, order, axis=1) + chosen, axis=1)
    return counts


def table(owners: Mapping[int, LeafOwners]) -> bytes:
    """Returns the owners of all chunks, compressed: array by array, each in C order of its grid of chunks."""
    parts = [found.in_grid_order() for _, found in sorted(owners.items())]
    return zlib.compress(b"".join(np.ascontiguousarray(part, "<u4").tobytes() for part in parts), level=1)


def from_table(data: bytes) -> Owners:
    """Returns the owners that ``table`` was made from, one after the other.

    Raises:
        ValueError: The data are not a table.
    """
    try:
        return np.frombuffer(zlib.decompress(data), "<u4")
    except zlib.error as error:
        raise ValueError(str(error)) from error


def _share_out(leaf: LeafOwners, group: HolderGroups, load: Numbers, max_replicas: int | None) -> None:
    """Assigns the chunks of the shards of a group, and adds their bytes to ``load``."""
    size = max(1, leaf.chunk_bytes)
    if max_replicas is None or max_replicas >= group.holders.shape[1]:
        _assign(leaf, group.shards, group.holders, load, size)
        return
    for column in range(group.shards.shape[1]):  # each shard has writers of its own
        least = np.argsort(load[group.holders], axis=1, kind="stable")[:, :max_replicas]
        writers = np.sort(np.take_along_axis(group.holders, least, axis=1), axis=1)
        _assign(leaf, group.shards[:, column : column + 1], writers, load, size)


def _assign(leaf: LeafOwners, shards: Numbers, holders: Numbers, load: Numbers, size: int) -> None:
    each = leaf.owners.shape[1]
    counts = fill(load[holders], shards.shape[1] * each, size)
    owners = np.repeat(holders.ravel(), counts.ravel())  # neighbouring chunks have the same owner
    leaf.owners[shards] = owners.reshape(*shards.shape, each)
    np.add.at(load, holders.ravel(), counts.ravel() * size)


def _product(numbers: Shape) -> int:
    return int(np.prod(numbers, dtype=np.int64))
