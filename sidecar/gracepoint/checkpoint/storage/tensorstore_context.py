"""Makes TensorStore contexts. All of them share the same values in memory.

This module has no threads of its own. TensorStore's threads belong to the contexts.
"""

from __future__ import annotations

from typing import Any

import tensorstore as ts

#: Holds the values of ``memory://``, for the life of the process. Files are not locked, as some file systems have no
#: locks: each file has one writer, or writers of which any may win (``format.ocdbt``), and appears by a rename.
SHARED = ts.Context({"memory_key_value_store": {}, "file_io_locking": {"mode": "none"}})


def new_context(resources: dict[str, Any]) -> ts.Context:
    """Returns a context with its own ``resources``. The ``kvstore_spec`` of every back end can be opened in it."""
    return ts.Context(resources, SHARED)


def read_alone(kvstore: dict[str, Any], timeout_s: float) -> bytes:
    """Returns the value whose key is all of the path of ``kvstore``, as TensorStore reads it.

    Raises:
        ValueError: TensorStore cannot read it, or there is no such value.
        TimeoutError: It took too long.
    """
    store = ts.KvStore.open(kvstore, context=new_context({})).result(timeout=timeout_s)
    found = store.read("").result(timeout=timeout_s)
    if found.state != "value":
        raise ValueError(f"it finds no value at {kvstore}")
    return bytes(found.value)
