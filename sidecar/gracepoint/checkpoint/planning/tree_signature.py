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
        if structure != self._structure:
            return None
        rest, found = iter(values), []
        for leaf, form in zip(self._leaves, self._data, strict=True):
            if leaf.is_empty:
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


def _form_of(data: Any) -> Any:
    if isinstance(data, jax.Array):
        return data.shape, data.dtype, data.sharding
    return None  # the spec describes it
