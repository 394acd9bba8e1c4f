"""TensorStore's contexts: all of them see the same values in memory.

Nothing here has threads of its own; TensorStore's belong to the contexts.
"""

from __future__ import annotations

from typing import Any

import tensorstore as ts

#: Holds the values of ``memory://``, for the life of the process.
SHARED = ts.Context({"memory_key_value_store": {}})


def new_context(resources: dict[str, Any]) -> ts.Context:
    """Returns a context with ``resources`` of its own, in which every back end's ``kvstore_spec`` can be opened."""
    return ts.Context(resources, SHARED)
