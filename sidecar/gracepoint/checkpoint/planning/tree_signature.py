"""The form of a state. Two states of the same form can be saved with the same plan. It holds no data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.pytree import Leaf
from gracepoint.checkpoint.handler_registry import HandlerRegistry


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
        rest, found = iter(values), []
        for leaf, form in zip(self._leaves, self._data, strict=True):
            if leaf.is_empty and not leaf.is_code:
                found.append(leaf)
                continue
            value = next(rest)
            pytree.check_there(leaf.path, value)
            if leaf.spec is None or leaf.spec.kind != "array":
                again = pytree.leaf_of(leaf.path, value, self._handlers)
                if again.spec != leaf.spec or again.value_type != leaf.value_type or _form_of(again.data) != form:
                    return None
                found.append(again)
            elif not isinstance(value, jax.Array) or _form_of(value) != form:
                return None
            else:
                found.append(Leaf(leaf.name, leaf.keys, leaf.value_type, leaf.spec, value, leaf.path))
        return found

    def _by_leaves(self, state: Any) -> list[Leaf] | None:
        """As ``leaves_of``, for a tree whose nodes differ at least in static fields, which are not saved.

        These may have no equality at all, as numpy arrays, or differ each time, as functions that are made anew.
        """
        found = pytree.flatten(state, self._handlers)
        same = len(found) == len(self._leaves) and all(
            dataclasses.replace(leaf, data=None) == known and _form_of(leaf.data) == form
            for leaf, known, form in zip(found, self._leaves, self._data, strict=True)
        )
        return found if same else None


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
