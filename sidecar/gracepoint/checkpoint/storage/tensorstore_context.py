"""Makes TensorStore contexts. All of them share the same values in memory.

This module has no threads of its own. TensorStore's threads belong to the contexts.
"""

from __future__ import annotations

from typing import Any

import tensorstore as ts

#: Holds the values of ``memory://``, for the life of the process.
SHARED = ts.Context({"memory_key_value_store": {}})


def new_context(resources: dict[str, Any]) -> ts.Context:
    """Returns a context with its own ``resources``. The ``kvstore_spec`` of every back end can be opened in it."""
    return ts.Context(resources, SHARED)
