"""Saves and restores train states: parallel sharded saves in Orbax's layout, atomic commit, recovery, restore.

The public names are below. A ``Session`` uses ``step_checkpointer``, which is not public. The packages, from the
outermost to the innermost: ``handlers`` (leaves by type), ``loading``, ``saving``, ``reading``, ``steps``,
``transfer``, ``writing``, ``planning``, ``format``, ``storage`` and ``memory``. ``make imports`` checks that each
package imports only packages after it. docs/checkpoint.md explains the use. docs/checkpoint-format.md says what is
guaranteed about files.
"""

from gracepoint.checkpoint.api import all_steps, latest_step, restore, save
from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer
from gracepoint.checkpoint.checkpoint_manager import CheckpointManager
from gracepoint.checkpoint.handler_registry import HandlerRegistry, ItemHandler, ParamInfo, TypeHandler
from gracepoint.checkpoint.handlers.array_handler import ArrayHandler, default_handlers
from gracepoint.checkpoint.handlers.dispatcher import Dispatcher, InProcessDispatcher
from gracepoint.checkpoint.handlers.numpy_handler import NumpyHandler, ScalarHandler
from gracepoint.checkpoint.handlers.single_replica_handler import SingleReplicaArrayHandler
from gracepoint.checkpoint.handlers.string_handler import StringHandler
from gracepoint.checkpoint.loading.own_host_state import Reshard
from gracepoint.checkpoint.loading.restore_step import Restored
from gracepoint.checkpoint.loading.restore_tree import PLACEHOLDER
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
