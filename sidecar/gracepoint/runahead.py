"""Keeps the host from running far ahead of its devices.

JAX dispatches steps asynchronously: without a bound the host may be dozens of steps ahead when a notice comes,
and all of them have to be drained before anything can be saved. So before a new step is let through, the one
``LIMIT`` before it must be done.

What is waited for cannot be the state itself: it is donated to the next step, which deletes it. A copy of one
element of the smallest array, on one device of this process, is made by a tiny program that is compiled at the
first step; it is done when the step is, since the element is one of the step's outputs.
"""

from __future__ import annotations

import collections
from typing import Any

#: Steps in flight after ``throttle``.
LIMIT = 2


class RunAhead:
    """Used by the training thread alone."""

    def __init__(self) -> None:
        self._marks: collections.deque[Any] = collections.deque()
        self._copy_first: Any = None

    def throttle(self, state: Any) -> None:
        """Notes the newest step's output and waits for the step ``LIMIT`` before it.

        Raises:
            jax.errors.JaxRuntimeError: That step failed on the device.
        """
        shard = _smallest_shard(state)
        if shard is None:  # no array of JAX in it: nothing runs ahead
            return
        if self._copy_first is None:
            self._copy_first = _compile()
        self._marks.append(self._copy_first(shard))
        if len(self._marks) > LIMIT:
            self._marks.popleft().block_until_ready()

    def forget(self) -> None:
        """Drops what is noted (arrays must not outlive the session)."""
        self._marks.clear()


def _smallest_shard(state: Any) -> Any:
    import jax

    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) and leaf.size > 0]
    if not arrays:
        return None
    smallest = min(arrays, key=lambda a: a.size)
    return smallest.addressable_shards[0].data


def _compile() -> Any:
    import jax

    def copy_first(x: Any) -> Any:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        # copy=True: an output that is merely the input would be its buffer, and be donated with it.
        return jax.numpy.array(x.reshape(-1)[0], copy=True)

    return jax.jit(copy_first)
