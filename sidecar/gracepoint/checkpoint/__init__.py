"""Saves and restores train states: parallel sharded saves in Orbax's layout, atomic commit, recovery, restore.

The public names are below. A ``Session`` uses ``engine``, which is not public. The packages, from the outermost to the
innermost: ``restoring``, ``saving``, ``reading``, ``steps``, ``writing``, ``planning``, ``format`` and ``storage``; all
of them may use ``memory``. ``make imports`` checks that each package imports only packages after it. docs/checkpoint.md
explains the use. docs/checkpoint-format.md says what is guaranteed about files.

Each name is imported when it is first used. So the worker process that writes saves can import packages below this one
without JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer, all_steps, latest_step, restore, save
    from gracepoint.checkpoint.checkpoint_manager import CheckpointManager
    from gracepoint.checkpoint.handler_registry import HandlerRegistry, ItemHandler, ParamInfo, TypeHandler
    from gracepoint.checkpoint.handlers import (
        ArrayHandler,
        Dispatcher,
        InProcessDispatcher,
        NumpyHandler,
        ScalarHandler,
        SingleReplicaArrayHandler,
        StringHandler,
        default_handlers,
    )
    from gracepoint.checkpoint.metadata import LeafMetadata, TreeMetadata
    from gracepoint.checkpoint.metrics import Saved, SaveStats
    from gracepoint.checkpoint.options import (
        ArrayRestoreArgs,
        RestoreArgs,
        RestoreOptions,
        SaveArgs,
        SaveCallback,
        SingleReplica,
        SingleReplicaArrayRestoreArgs,
        TransferPriority,
        Transform,
        WriteOptions,
    )
    from gracepoint.checkpoint.restoring.restore_step import Reshard, Restored
    from gracepoint.checkpoint.restoring.restore_tree import PLACEHOLDER
    from gracepoint.checkpoint.verification import Damage, VerificationReport, verify
    from gracepoint.errors import (
        CheckpointCorrupt,
        CheckpointError,
        CheckpointExists,
        CheckpointMismatch,
        CheckpointNotFound,
        CheckpointRefused,
        CheckpointTooNew,
        InvalidSharding,
        SaveFailed,
    )

__all__ = [
    "PLACEHOLDER",
    "ArrayHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointer",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointManager",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointRefused",
    "CheckpointTooNew",
    "Damage",
    "Dispatcher",
    "HandlerRegistry",
    "InProcessDispatcher",
    "InvalidSharding",
    "ItemHandler",
    "LeafMetadata",
    "NumpyHandler",
    "ParamInfo",
    "Reshard",
    "RestoreArgs",
    "RestoreOptions",
    "Restored",
    "SaveArgs",
    "SaveCallback",
    "SaveFailed",
    "SaveStats",
    "Saved",
    "ScalarHandler",
    "SingleReplica",
    "SingleReplicaArrayHandler",
    "SingleReplicaArrayRestoreArgs",
    "StringHandler",
    "TransferPriority",
    "Transform",
    "TreeMetadata",
    "TypeHandler",
    "VerificationReport",
    "WriteOptions",
    "all_steps",
    "default_handlers",
    "latest_step",
    "restore",
    "save",
    "verify",
]

# The module of each name.
_MODULES = {
    "ArrayHandler": "gracepoint.checkpoint.handlers",
    "ArrayRestoreArgs": "gracepoint.checkpoint.options",
    "AsyncCheckpointer": "gracepoint.checkpoint.async_checkpointer",
    "CheckpointCorrupt": "gracepoint.errors",
    "CheckpointError": "gracepoint.errors",
    "CheckpointExists": "gracepoint.errors",
    "CheckpointManager": "gracepoint.checkpoint.checkpoint_manager",
    "CheckpointMismatch": "gracepoint.errors",
    "CheckpointNotFound": "gracepoint.errors",
    "CheckpointRefused": "gracepoint.errors",
    "CheckpointTooNew": "gracepoint.errors",
    "Damage": "gracepoint.checkpoint.verification",
    "Dispatcher": "gracepoint.checkpoint.handlers",
    "HandlerRegistry": "gracepoint.checkpoint.handler_registry",
    "InProcessDispatcher": "gracepoint.checkpoint.handlers",
    "InvalidSharding": "gracepoint.errors",
    "ItemHandler": "gracepoint.checkpoint.handler_registry",
    "LeafMetadata": "gracepoint.checkpoint.metadata",
    "NumpyHandler": "gracepoint.checkpoint.handlers",
    "PLACEHOLDER": "gracepoint.checkpoint.restoring.restore_tree",
    "ParamInfo": "gracepoint.checkpoint.handler_registry",
    "Reshard": "gracepoint.checkpoint.restoring.restore_step",
    "RestoreArgs": "gracepoint.checkpoint.options",
    "RestoreOptions": "gracepoint.checkpoint.options",
    "Restored": "gracepoint.checkpoint.restoring.restore_step",
    "SaveArgs": "gracepoint.checkpoint.options",
    "SaveCallback": "gracepoint.checkpoint.options",
    "SaveFailed": "gracepoint.errors",
    "SaveStats": "gracepoint.checkpoint.metrics",
    "Saved": "gracepoint.checkpoint.metrics",
    "ScalarHandler": "gracepoint.checkpoint.handlers",
    "SingleReplica": "gracepoint.checkpoint.options",
    "SingleReplicaArrayHandler": "gracepoint.checkpoint.handlers",
    "SingleReplicaArrayRestoreArgs": "gracepoint.checkpoint.options",
    "StringHandler": "gracepoint.checkpoint.handlers",
    "TransferPriority": "gracepoint.checkpoint.options",
    "Transform": "gracepoint.checkpoint.options",
    "TreeMetadata": "gracepoint.checkpoint.metadata",
    "TypeHandler": "gracepoint.checkpoint.handler_registry",
    "VerificationReport": "gracepoint.checkpoint.verification",
    "WriteOptions": "gracepoint.checkpoint.options",
    "all_steps": "gracepoint.checkpoint.async_checkpointer",
    "default_handlers": "gracepoint.checkpoint.handlers",
    "latest_step": "gracepoint.checkpoint.async_checkpointer",
    "restore": "gracepoint.checkpoint.async_checkpointer",
    "save": "gracepoint.checkpoint.async_checkpointer",
    "verify": "gracepoint.checkpoint.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
