"""Keeps the host from running far ahead of its devices.

JAX dispatches steps asynchronously: without a bound the host may be dozens of steps ahead when a notice comes,
and all of them have to be drained before anything can be saved. So before a new step is let through, an earlier one
must be done: the one ``LIMIT`` before it, or the very one before it where steps are long. Two steps in flight keep the
devices busy while the host is at work between steps; where a step takes a second or more, one does that as well, and
a step less has to be drained.

What is waited for cannot be the state itself: it is donated to the next step, which deletes it. A copy of one
element of the smallest array, on one device of this process, is made by a tiny program that is compiled at the
first step; it is done when the step is, since the element is one of the step's outputs. Which array that is, is
looked for once: going through all leaves at every step takes a millisecond for a thousand of them.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

#: Most steps in flight after ``throttle``.
LIMIT = 2
#: Steps that take so long are long: of these one is in flight.
LONG_STEP_S = 1.0


def limit(step_s: float) -> int:
    """How many steps may be in flight where one takes ``step_s``."""
    return 1 if step_s >= LONG_STEP_S else LIMIT


class RunAhead:
    """Used by the training thread alone."""

    def __init__(self) -> None:
        self._marks: collections.deque[Any] = collections.deque()
        self._copy_first: Any = None
        self._path: Sequence[Any] | None = None  # to the array that is waited for

    def throttle(self, state: Any, limit: int = LIMIT) -> None:
        """Notes the newest step's output and waits for the step ``limit`` before it.

        Args:
            state: The newest step's output.
            limit: How many steps may be in flight when this returns.

        Raises:
            jax.errors.JaxRuntimeError: That step failed on the device.
        """
        array = None if self._path is None else _follow(self._path, state)
        if array is None:
            self._path, array = _smallest(state)
        if array is None:  # no array of JAX in it: nothing runs ahead
            return
        if self._copy_first is None:
            self._copy_first = _compile()
        self._marks.append(self._copy_first(array.addressable_data(0)))
        while len(self._marks) > limit:
            self._marks.popleft().block_until_ready()

    def forget(self) -> None:
        """Drops what is noted (arrays must not outlive the session)."""
        self._marks.clear()


def _smallest(state: Any) -> tuple[Sequence[Any] | None, Any]:
    """The path to the smallest array that this process holds a part of, and the array; None where there is none."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = [(path, leaf) for path, leaf in leaves if _is_held_here(leaf)]
    return min(arrays, key=lambda found: int(found[1].size), default=(None, None))


def _is_held_here(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, jax.Array) and leaf.size > 0 and bool(leaf.sharding.addressable_devices)


def _follow(path: Sequence[Any], state: Any) -> Any:
    """The array at ``path``; None if the state has another form by now, or a node that cannot be walked into."""
    import jax

    node = state
    try:
        for key in path:
            match key:
                case jax.tree_util.DictKey():
                    node = node[key.key]
                case jax.tree_util.SequenceKey():
                    node = node[key.idx]
                case jax.tree_util.GetAttrKey():
                    node = getattr(node, key.name)
                case _:
                    return None
    except (AttributeError, IndexError, KeyError, TypeError):
        return None
    return node if _is_held_here(node) else None


def _compile() -> Any:
    import jax

    def copy_first(x: Any) -> Any:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        # copy=True: an output that is merely the input would be its buffer, and be donated with it.
        return jax.numpy.array(x.reshape(-1)[0], copy=True)

    return jax.jit(copy_first)
