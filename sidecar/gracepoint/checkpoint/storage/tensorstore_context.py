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
