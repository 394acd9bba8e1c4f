"""Gracepoint's library: a preemption costs a training job at most the step that was under way.

    import gracepoint

    session = gracepoint.attach()
    state, step = session.restore(like=state)
    while step < steps:
        state, loss = train_step(state, next(loader)); step += 1
        session.step(step, state)
    session.close()

Importing this package needs the standard library alone and loads no JAX: the names below that need it load
it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gracepoint.errors import (
    AgreementError,
    BarrierError,
    BarrierFailed,
    BarrierReused,
    BarrierTimeout,
    CannotKnow,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    GracepointError,
    Preempted,
    SaveFailed,
    SettingsError,
    WireError,
)

if TYPE_CHECKING:
    from gracepoint.session import Session, attach

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "BarrierError",
    "BarrierFailed",
    "BarrierReused",
    "BarrierTimeout",
    "CannotKnow",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "GracepointError",
    "Preempted",
    "SaveFailed",
    "Session",
    "SettingsError",
    "WireError",
    "__version__",
    "attach",
]

_LAZY = {"Session": "gracepoint.session", "attach": "gracepoint.session"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
