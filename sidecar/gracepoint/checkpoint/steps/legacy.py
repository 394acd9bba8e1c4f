"""Recognizes checkpoints in old formats. They are refused with an error that names the format.

Flax's ``flax.training.checkpoints`` wrote a checkpoint as one file of msgpack. Orbax before its version 0.2 wrote the
tree, with the values of small leaves, to a msgpack file ``checkpoint`` beside the arrays. Neither has metadata.
"""

from __future__ import annotations

from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointRefused

_AGGREGATE = "checkpoint"


def check(path: StoragePath) -> None:
    """Raises CheckpointRefused if there is a checkpoint in an old format at ``path``, or in its ``default`` item."""
    if path.is_value():
        raise CheckpointRefused(
            f"{path} is a file: expected the folder of a checkpoint. If flax.training.checkpoints wrote it, it is "
            "msgpack, which is not supported: restore it with Flax, and save the state again"
        )
    for folder in (path, path / layout.STATE_ITEM):
        if (folder / _AGGREGATE).is_value() and not (folder / layout.TREE_METADATA).is_value():
            raise CheckpointRefused(
                f"{folder} has its tree in a msgpack file, {_AGGREGATE}, as old versions of Orbax wrote it, which is "
                "not supported: restore it with Orbax (PyTreeCheckpointer), and save the state again"
            )
