"""Saves with Orbax in a worker process. This module is imported by the worker, so it does nothing when imported."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save(state: dict[str, Any], directory: str) -> None:
    """Saves a tree of NumPy arrays. Runs in the worker, where JAX finds only the CPU.

    Args:
        state: The arrays. They lie in memory that the training process filled.
        directory: Where the checkpoint goes. It must not exist.
    """
    import orbax.checkpoint as ocp  # in the worker: the training process need not load it

    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(Path(directory).absolute(), state)
