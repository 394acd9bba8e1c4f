"""Keeps the host from running far ahead of its devices.

JAX dispatches steps asynchronously. Without a limit the host may be dozens of steps ahead when a notice comes, and the
devices must finish all of them before anything can be saved. So before the host goes on to a new step, an earlier step
must be done: the one ``LIMIT`` before it, or the one just before it if steps are long. Two steps in flight keep the
devices busy while the host works between steps. If a step takes a second or more, one step in flight is enough for
that, and there is one step less to finish.

The state itself cannot be waited for: it is donated to the next step, which deletes it. Instead, a tiny program copies
one element of the smallest array, on one device of this process. The copy is done when the step is, as the element is
one of the step's outputs. The program is compiled at the first step. The smallest array is looked up once, and then
found by its path: going through a thousand leaves at every step would take milliseconds.

A node whose children cannot be looked up is flattened for that, by a function of its author, which may take as long.
Then an array is waited for at every n-th step alone, so that all this takes a two-hundredth of the steps' time.
It takes more if flattening takes more than half a millisecond, as no more than a tenth of a second goes unseen.
"""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from gracepoint.jax_isolation import jit
from gracepoint.preemption.forecast import LIMIT

#: The way to a leaf: at each node the key of the child, and its number among the children for nodes without such keys.
Path = Sequence[tuple[Any, int]]

# A state without arrays of JAX, such as one of numpy's, is searched for them once in so many calls.
_REST = 50
# What finding the array may take: so many seconds, or such a part of the steps' time.
_MOST_S, _MOST_PART = 50e-6, 0.005
# For how many seconds of steps none is waited for, at most.
_UNSEEN_S = 0.1


class RunAhead:
    """Used by the training thread alone. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: collections.deque[Any] = collections.deque()
        self._copy_first: Any = None
        self._path: Path | None = None  # to the array that is waited for
        self._found = False  # whether the newest look found an array
        self._every = 1  # an array is looked for in each so-many-th call
        self._calls = 0  # since it was looked for
        self._looked_s = -math.inf  # when that was
        self._took_s = 0.0  # how long that took

    def throttle(self, state: Any, limit: int = LIMIT) -> int:
        """Waits until no more than ``limit`` steps are in flight, and returns how many steps it has waited for.

        These are the steps since the last call that waited; 0 if this one has not. What passed between two calls that
        waited is the time of the steps; between others, it is that of the host.

        Args:
            state: The newest step's output.
            limit: How many steps may be in flight when this returns.

        Raises:
            jax.errors.JaxRuntimeError: That step failed on the device.
        """
        self._calls += 1
        if self._calls < self._every:
            return 0 if self._found else 1
        steps = self._calls if self._found else 1
        began_s = self._clock()
        array = None if self._path is None else _follow(self._path, state)
        if array is None:
            array, self._path = _smallest(state)
        self._found = array is not None
        self._rest(began_s)
        if array is None:  # no array of JAX in it: nothing runs ahead
            return 1
        if self._copy_first is None:
            self._copy_first = _compile()
        self._marks.append(self._copy_first(array.addressable_data(0)))
        while len(self._marks) > (limit if self._every == 1 else 1):
            self._marks.popleft().block_until_ready()
        return steps

    def _rest(self, began_s: float) -> None:
        """Sets in which call an array is looked for again, after a look that began at ``began_s``."""
        step_s = (began_s - self._looked_s) / self._calls
        took_s = self._clock() - began_s
        least_s = min(took_s, self._took_s)  # one look alone may be the machine's fault
        self._calls, self._looked_s, self._took_s = 0, began_s, took_s
        if not self._found:
            self._every = _REST
        elif least_s <= max(_MOST_S, _MOST_PART * step_s):
            self._every = 1
        else:
            wanted = min(least_s / _MOST_PART, _UNSEEN_S) / step_s
            # Not at once: what a step takes is known only where one was waited for.
            self._every = max(1, math.ceil(min(wanted, 2 * self._every)))

    def forget(self) -> None:
        """Drops the copies: arrays must not outlive the session."""
        self._marks.clear()


def _smallest(state: Any) -> tuple[Any, Path | None]:
    """Returns the smallest array that this process holds a part of, and its path. None twice if there is none."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = [(keys, leaf) for keys, leaf in leaves if _is_held_here(leaf)]
    if not arrays:
        return None, None
    keys, array = min(arrays, key=lambda found: int(found[1].size))
    path, node = [], state
    for key in keys:
        children, _ = jax.tree_util.default_registry.flatten_one_level_with_keys(node)
        index, node = next((i, child) for i, (other, child) in enumerate(children) if other == key)
        path.append((key, index))
    if _follow(path, state) is not array:  # what a node has at a key is something else than the child of that key
        path = [(None, index) for _, index in path]
    return array, path


def _is_held_here(leaf: Any) -> bool:
    import jax

    return isinstance(leaf, jax.Array) and leaf.size > 0 and bool(leaf.sharding.addressable_devices)


def _follow(path: Path, state: Any) -> Any:
    """Returns the array at ``path``. None if the state has changed its form."""
    import jax

    flatten = jax.tree_util.default_registry.flatten_one_level
    node = state
    try:
        for key, index in path:
            try:
                node = _at(node, key)
            except (AttributeError, IndexError, KeyError, TypeError):
                node = flatten(node)[0][index]
    except (IndexError, TypeError, ValueError):  # fewer children, or none
        return None
    return node if _is_held_here(node) else None


def _at(node: Any, key: Any) -> Any:
    """Returns the child at ``key`` without going through the others. Raises an error of a look-up if it cannot."""
    import jax

    match key:
        case jax.tree_util.DictKey():
            return node[key.key]
        case jax.tree_util.SequenceKey():
            return node[key.idx]
        case jax.tree_util.GetAttrKey():
            return getattr(node, key.name)
    raise KeyError(key)


def _compile() -> Any:
    import jax

    def copy_first(x: Any) -> Any:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        # copy=True: an output that is merely the input would be its buffer, and be donated with it.
        return jax.numpy.array(x.reshape(-1)[0], copy=True)

    return jit(copy_first)
