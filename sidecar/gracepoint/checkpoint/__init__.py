"""Saving and restoring: parallel sharded saves in Orbax's layout, atomic commit, salvage, restore.

From the outside in: ``functions``, ``async_checkpointer`` and ``manager`` (the public API, on processes that
``joined`` brings together), ``checkpointer`` (what the session holds), ``saver`` with ``saving``, and ``restoring``
(one save and one restore, over the gang), ``under_way`` and ``newest`` (the save in the background),
``planner``, ``snapshot``, ``writer`` and ``reader`` (the bytes), ``commit``, ``catalog``, ``retention`` and ``lease``
(folders), ``throughput``, ``plan``, ``tree``, ``target``, ``records``, ``host_state`` and ``layout`` (data).
docs/checkpoint.md says how it is used, docs/checkpoint-format.md what is promised.
"""

from gracepoint.checkpoint.args import ArrayRestoreArgs, RestoreArgs, SaveArgs, SingleReplicaArrayRestoreArgs
from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer
from gracepoint.checkpoint.checkpointer import Checkpointer
from gracepoint.checkpoint.dispatch import Dispatcher, InProcessDispatcher
from gracepoint.checkpoint.functions import all_steps, latest_step, restore, save
from gracepoint.checkpoint.handlers import ArrayHandler, NumpyHandler, ScalarHandler, default_handlers
from gracepoint.checkpoint.integrity import Damage, Report, verify
from gracepoint.checkpoint.manager import CheckpointManager
from gracepoint.checkpoint.measures import Saved, SaveStats
from gracepoint.checkpoint.metadata import LeafMetadata, TreeMetadata
from gracepoint.checkpoint.options import SaveCallback, TransferPriority, WriteOptions
from gracepoint.checkpoint.restore_tree import PLACEHOLDER, RestoreOptions
from gracepoint.checkpoint.restoring import Reshard, Restored
from gracepoint.checkpoint.single_replica_handler import SingleReplicaArrayHandler
from gracepoint.checkpoint.string_handler import StringHandler
from gracepoint.checkpoint.type_handlers import HandlerRegistry, ParamInfo, TypeHandler

__all__ = [
    "PLACEHOLDER",
    "ArrayHandler",
    "ArrayRestoreArgs",
    "AsyncCheckpointer",
    "CheckpointManager",
    "Checkpointer",
    "Damage",
    "Dispatcher",
    "HandlerRegistry",
    "InProcessDispatcher",
    "LeafMetadata",
    "NumpyHandler",
    "ParamInfo",
    "Report",
    "Reshard",
    "RestoreArgs",
    "RestoreOptions",
    "Restored",
    "SaveArgs",
    "SaveCallback",
    "SaveStats",
    "Saved",
    "ScalarHandler",
    "SingleReplicaArrayHandler",
    "SingleReplicaArrayRestoreArgs",
    "StringHandler",
    "TransferPriority",
    "TreeMetadata",
    "TypeHandler",
    "WriteOptions",
    "all_steps",
    "default_handlers",
    "latest_step",
    "restore",
    "save",
    "verify",
]
