"""Looks at several steps or saves of a directory: in an object store several at once, elsewhere one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TypeVar

from gracepoint.checkpoint.steps.object_store.object_deletion import store_of
from gracepoint.checkpoint.storage.storage_path import StoragePath

K = TypeVar("K")
V = TypeVar("V")


def look_at(root: StoragePath, keys: Iterable[K], look: Callable[[K], V]) -> dict[K, V]:
    """Returns what ``look`` finds for each of ``keys``, in their order. Raises its first error.

    In a store that cannot rename, several threads call ``look``. They end with the call.
    """
    keys = list(keys)
    if root.backend.renames:
        return {key: look(key) for key in keys}
    found: dict[K, V] = {}

    def note(key: K) -> None:
        found[key] = look(key)

    store_of(root).at_once(functools.partial(note, key) for key in keys)
    return {key: found[key] for key in keys}
