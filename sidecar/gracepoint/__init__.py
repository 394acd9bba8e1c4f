"""Gracepoint's library: a preemption costs a training job at most the step that was in progress.

    import gracepoint

    session = gracepoint.attach()
    state, step = session.restore(init=init_state)
    while step < steps:
        state, loss = train_step(state, next(loader)); step += 1
        session.step(step, state)
    session.close()

Importing this package needs the standard library alone and loads no JAX: the names below that need it load
it when they are first used, and so do the packages ``gracepoint.checkpoint`` and ``gracepoint.multihost``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from gracepoint.errors import (
    AgreementError,
    AsyncCallFailed,
    BarrierCancelled,
    BarrierError,
    BarrierFailed,
    BarrierReused,
    BarrierTimeout,
    CannotKnow,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointMismatch,
    CheckpointNotFound,
    CheckpointRefused,
    CheckpointTooNew,
    ClusterError,
    GracepointError,
    InvalidSharding,
    NoCluster,
    NotJoined,
    Preempted,
    SaveFailed,
    SettingsError,
    WireError,
)
from gracepoint.version import __version__

if sys.platform == "win32":
    raise ImportError("gracepoint runs on Linux, and on macOS for work on a laptop. On Windows, use it in WSL")

if TYPE_CHECKING:
    from gracepoint.machine import leave_process_group
    from gracepoint.session.attach import attach
    from gracepoint.session.session import Session

__all__ = [
    "AgreementError",
    "AsyncCallFailed",
    "BarrierCancelled",
    "BarrierError",
    "BarrierFailed",
    "BarrierReused",
    "BarrierTimeout",
    "CannotKnow",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointRefused",
    "CheckpointTooNew",
    "ClusterError",
    "GracepointError",
    "InvalidSharding",
    "NoCluster",
    "NotJoined",
    "Preempted",
    "SaveFailed",
    "Session",
    "SettingsError",
    "WireError",
    "__version__",
    "attach",
    "leave_process_group",
]

_LAZY = {
    "Session": "gracepoint.session.session",
    "attach": "gracepoint.session.attach",
    "leave_process_group": "gracepoint.machine",
}
_PACKAGES = frozenset({"async_calls", "checkpoint", "elastic", "multihost"})


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_PACKAGES})  # else completion in an interpreter does not have them


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
