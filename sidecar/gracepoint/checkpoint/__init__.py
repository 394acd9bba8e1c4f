"""Saving and restoring: parallel sharded saves in Orbax's layout, atomic commit, salvage, restore.

From the outside in: ``functions``, ``async_checkpointer`` and ``manager`` (the public API, on processes that
``joined`` brings together), ``checkpointer`` (what the session holds), ``saver`` with ``saving``, and ``restoring``
(one save and one restore, over the gang), ``under_way`` and ``newest`` (the save in the background),
``planner``, ``snapshot``, ``writer`` and ``reader`` (the bytes), ``commit``, ``catalog``, ``retention`` and ``lease``
(folders), ``throughput``, ``plan``, ``tree``, ``target``, ``records``, ``host_state`` and ``layout`` (data).
docs/checkpoint.md says how it is used, docs/checkpoint-format.md what is promised.
"""

from gracepoint.checkpoint.api import all_steps, latest_step, restore, save
from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer
from gracepoint.checkpoint.checkpoint_manager import CheckpointManager
from gracepoint.checkpoint.handlers.array_handler import ArrayHandler, NumpyHandler, ScalarHandler, default_handlers
from gracepoint.checkpoint.handlers.dispatcher import Dispatcher, InProcessDispatcher
from gracepoint.checkpoint.handlers.registry import HandlerRegistry, ParamInfo, TypeHandler
from gracepoint.checkpoint.handlers.single_replica_handler import SingleReplicaArrayHandler
from gracepoint.checkpoint.handlers.string_handler import StringHandler
from gracepoint.checkpoint.leaf_args import ArrayRestoreArgs, RestoreArgs, SaveArgs, SingleReplicaArrayRestoreArgs
from gracepoint.checkpoint.loading.restore_step import Reshard, Restored
from gracepoint.checkpoint.loading.restore_tree import PLACEHOLDER, RestoreOptions
from gracepoint.checkpoint.loading.single_replica import SingleReplica
from gracepoint.checkpoint.metadata import LeafMetadata, TreeMetadata
from gracepoint.checkpoint.metrics import Saved, SaveStats
from gracepoint.checkpoint.options import SaveCallback, TransferPriority, WriteOptions
from gracepoint.checkpoint.step_checkpointer import StepCheckpointer
from gracepoint.checkpoint.verification import Damage, VerificationReport, verify

__all__ = [
    "PLACEHOLDER",
    "ArrayHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointer",
    "CheckpointManager",
    "Damage",
    "Dispatcher",
    "HandlerRegistry",
    "InProcessDispatcher",
    "LeafMetadata",
    "NumpyHandler",
    "ParamInfo",
    "Reshard",
    "RestoreArgs",
    "RestoreOptions",
    "Restored",
    "SaveArgs",
    "SaveCallback",
    "SaveStats",
    "Saved",
    "ScalarHandler",
    "SingleReplica",
    "SingleReplicaArrayHandler",
    "SingleReplicaArrayRestoreArgs",
    "StepCheckpointer",
    "StringHandler",
    "TransferPriority",
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
