"""The shards of an array that this process holds.

JAX makes the list of an array's shards when a shard is asked for the first time. If several threads ask at once, the
list can lack shards, or have some of them twice, and the array keeps it. This was seen with JAX 0.10.2, and
``tests/unit/checkpoint/planning/test_local_shards.py`` shows it without the lock. So all threads of the checkpoint
engine ask here, one after the other.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.planning.shard_holders import normal_index

_asking = threading.Lock()  # held for microseconds: no values are copied


def local_shard(array: Any, position: int) -> Any:
    """Returns ``array.addressable_data(position)``, an array of one device. Any thread may ask."""
    with _asking:
        return array.addressable_data(position)


def local_shards(data: Any) -> dict[Index, Any]:
    """Returns this process's distinct shards of ``data`` by index: JAX arrays of one device, or a numpy array."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): data}
    return {index: local_shard(data, position) for index, position in local_positions(data).items()}


def local_positions(data: Any) -> dict[Index, int]:
    """Returns the first position of each distinct shard among this process's shards of ``data``, by index."""
    if isinstance(data, np.ndarray):
        return {tuple((0, size) for size in data.shape): 0}
    with _asking:
        shards = data.addressable_shards
    positions: dict[Index, int] = {}
    for position, shard in enumerate(shards):
        positions.setdefault(normal_index(shard.index, data.shape), position)
    return positions
