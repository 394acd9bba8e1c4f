"""Host memory that holds a copy of this process's part of the state while training goes on.

Reserved and touched once: the first touch of memory is an order of magnitude slower than a copy into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint.plan import Chunk, Plan, local_shards, to_host
from gracepoint.checkpoint.tree import Leaf


def device_chunks(leaves: Sequence[Leaf], plan: Plan) -> Iterator[tuple[Chunk, npt.NDArray[Any]]]:
    """Yields this process's chunks as host arrays, one after the other.

    All transfers are started before the first is waited for. The arrays may be JAX's own memory: they are
    good until the state is donated.
    """
    shards = {i: local_shards(leaves[i].data) for i in {chunk.leaf for chunk in plan.chunks}}
    for chunk in plan.chunks:
        if hasattr(shard := shards[chunk.leaf][chunk.index], "copy_to_host_async"):
            shard.copy_to_host_async()
    for chunk in plan.chunks:
        yield chunk, to_host(shards[chunk.leaf][chunk.index])


class Snapshot:
    """One reserved buffer for each chunk of a plan; holds one state at a time."""

    def __init__(self, leaves: Sequence[Leaf], plan: Plan) -> None:
        self._buffers = []
        for chunk in plan.chunks:
            shape = [stop - start for start, stop in chunk.index]
            buffer = np.empty(shape, leaves[chunk.leaf].data.dtype)
            buffer.fill(0)  # numpy.zeros would leave the touching to the first copy
            self._buffers.append(buffer)

    def take(self, leaves: Sequence[Leaf], plan: Plan) -> list[tuple[Chunk, npt.NDArray[Any]]]:
        """Copies the chunks of ``leaves`` in; on return the state may be donated.

        ``plan`` is the one that the buffers were reserved for.
        """
        taken = []
        for (chunk, values), buffer in zip(device_chunks(leaves, plan), self._buffers, strict=True):
            np.copyto(buffer, values)
            taken.append((chunk, buffer))
        return taken
