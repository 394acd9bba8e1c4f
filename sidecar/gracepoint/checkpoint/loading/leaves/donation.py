"""Donation of the arrays of ``like``: their memory is freed for the restored arrays.

A state fills most of its devices' memory, so a second one does not fit beside it. With ``RestoreOptions.donate`` the
arrays of ``like`` are therefore deleted. This happens after the checkpoint was found to fit ``like``, and before
anything is read. The shapes, types, shardings and layouts of the arrays are recorded first, so that an older step can
be restored if a newer one is damaged.

JAX raises an error when a deleted array is used, also through other references to it. So a restore that fails after
this point leaves nothing that looks like a state.

``FormByCall`` is for a ``like`` that ``init`` makes. Its arrays are not deleted but dropped: ``init`` may have returned
arrays that other code holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax

from gracepoint.checkpoint.loading.leaves.leaf_request import Donated, as_like
from gracepoint.checkpoint.orbax_calls import AsSaved
from gracepoint.errors import CheckpointError

logger = logging.getLogger(__name__)

_NOTE = (
    "The arrays of the state that was given to restore (like=) are deleted by now, as restore takes their memory over: "
    "make the state anew before it is used."
)


@dataclasses.dataclass(frozen=True)
class FormByCall:
    """A ``like`` that is known once ``init`` was called. That may do what cannot be traced, so the call is a real one.

    Attributes:
        init: Makes a state.
    """

    init: Callable[[], Any]

    def form(self) -> Any:
        """Returns the state with a ``LeafRequest`` in place of each array, whose memory is free then.

        Raises:
            Exception: What ``init`` raises.
        """
        logger.info("init is called to learn the form of the state; one that is compiled by jax.jit is only traced")
        state = jax.block_until_ready(self.init())  # a computation that still runs would hold memory
        return jax.tree.map(lambda leaf: as_like("", leaf) if isinstance(leaf, jax.Array) else leaf, state)


def marked(like: Any) -> Any:
    """Returns ``like`` with its arrays replaced by ``Donated``."""
    return jax.tree.map(
        lambda leaf: Donated(leaf, as_like("", leaf)) if isinstance(leaf, jax.Array) else leaf,
        like,
    )


def kept(leaf: Any) -> Any:
    """Returns a leaf of ``marked`` as the caller gave it, for a leaf that is not restored."""
    if isinstance(leaf, AsSaved):
        return leaf.value
    return leaf.array if isinstance(leaf, Donated) else leaf


def take(given: Iterable[tuple[str, Any]], staying: Iterable[tuple[str, Any]]) -> None:
    """Deletes the arrays of leaves that will be restored.

    Args:
        given: Leaves of ``marked`` that will be restored, with their names. Several leaves may be the same array.
        staying: Leaves that are not restored, with their names.

    Raises:
        CheckpointError: An array is in both, or a leaf that stays has a deleted array. Nothing more is deleted then.
    """
    donated = {id(leaf.array): (name, leaf.array) for name, leaf in given if isinstance(leaf, Donated)}
    for name, leaf in staying:
        array = kept(leaf)
        if isinstance(array, jax.Array) and array.is_deleted():
            raise CheckpointError(
                f"leaf {name!r} is not in the checkpoint and keeps its array, which was deleted: a newer step has the "
                "leaf, and could not be read. Expected a state that is there: restore again with a new one, or with "
                "donate=False"
            )
        if isinstance(array, jax.Array) and id(array) in donated:
            raise CheckpointError(
                f"leaf {name!r} is not in the checkpoint and keeps its array, and leaf {donated[id(array)][0]!r}, "
                "which is restored, has the same one: expected two arrays, or donate=False"
            )
    arrays = [array for _, array in donated.values() if not array.is_deleted()]
    jax.block_until_ready(arrays)  # a computation that still runs would hold their memory
    for array in arrays:
        array.delete()


@contextlib.contextmanager
def telling(like: Any) -> Iterator[None]:
    """Adds a note to an error that leaves the block, if arrays of ``like`` were deleted in the block."""
    arrays = [leaf for leaf in map(kept, jax.tree.leaves(like)) if isinstance(leaf, jax.Array)]
    there = [array for array in arrays if not array.is_deleted()]
    try:
        yield
    except Exception as error:
        if any(array.is_deleted() for array in there) and _NOTE not in getattr(error, "__notes__", ()):
            error.add_note(_NOTE)
        raise
