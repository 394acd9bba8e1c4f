"""What ``benchmarks.checkpoint`` compares: Gracepoint as a session uses it, and Orbax, in two ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import orbax.checkpoint as ocp

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.groups import JoinedGroup
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.locations import storage_path

GRACEPOINT = "Gracepoint"
ORBAX = "Orbax"
ORBAX_PLAIN = "Orbax, not compressed"
#: In the order in which they take turns.
NAMES = (GRACEPOINT, ORBAX, ORBAX_PLAIN)

_TIMEOUT_S = 300.0


class Engine(Protocol):
    """Saves in the background and restores; every call is collective."""

    def prepare(self, state: Any) -> None:
        """Does what comes before training."""

    def save(self, step: int, state: Any) -> None:
        """Returns when training may go on and donate ``state``."""

    def wait(self) -> None:
        """Returns when the save is committed."""

    def restore(self, step: int, like: Any) -> Any:
        """Returns the state of ``step``."""

    def folder(self, step: int) -> Path:
        """Returns where ``step`` is."""

    def close(self) -> None:
        """Ends it."""


class Gracepoint:
    """As the session holds it."""

    def __init__(self, root: Path, joined: JoinedGroup) -> None:
        self._root = root
        self._checkpointer = StepCheckpointer(
            Layout(storage_path(root)),
            gang=joined.gang,
            attempt=joined.attempt,
            retention=Retention(keep_last=1_000_000),
            settings=SaveSettings(processes=joined.processes),
        )

    def prepare(self, state: Any) -> None:
        self._checkpointer.prepare(state)

    def save(self, step: int, state: Any) -> None:
        self._checkpointer.save_in_background(step, state, {})

    def wait(self) -> None:
        self._checkpointer.executor.wait_until_finished(_TIMEOUT_S)

    def restore(self, step: int, like: Any) -> Any:
        restored = self._checkpointer.restore(like, step=step, timeout_s=_TIMEOUT_S)
        if restored is None:
            raise RuntimeError(f"step {step} of {self._root} is not there, expected what was just saved")
        return restored.state

    def folder(self, step: int) -> Path:
        return self._root / str(step)

    def close(self) -> None:
        self._checkpointer.close(_TIMEOUT_S)


class Orbax:
    """Orbax's ``AsyncCheckpointer`` of a tree of arrays."""

    def __init__(self, root: Path, *, use_compression: bool) -> None:
        self._root = root
        self._checkpointer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=use_compression))

    def prepare(self, state: Any) -> None:
        """There is nothing that its user could do."""

    def save(self, step: int, state: Any) -> None:
        self._checkpointer.save(self.folder(step), args=ocp.args.PyTreeSave(state))

    def wait(self) -> None:
        self._checkpointer.wait_until_finished()

    def restore(self, step: int, like: Any) -> Any:
        wanted = ocp.checkpoint_utils.construct_restore_args(like)
        return self._checkpointer.restore(
            self.folder(step), args=ocp.args.PyTreeRestore(item=like, restore_args=wanted)
        )

    def folder(self, step: int) -> Path:
        return self._root / str(step)

    def close(self) -> None:
        self._checkpointer.close()


def make(name: str, root: Path, joined: JoinedGroup) -> Engine:
    """Returns the engine of that name, which saves below ``root``; the folder exists."""
    if name == GRACEPOINT:
        return Gracepoint(root, joined)
    return Orbax(root, use_compression=name == ORBAX)
