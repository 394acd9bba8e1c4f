"""Saves that fail or are interrupted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.writing.chunk_writer import ChunkWriter
from gracepoint.process_group import SingleProcess
from tests.unit.checkpoint.fakes.engine import (
    engine,
    save,
    small_state,
)


class DyingGang(SingleProcess):
    """One process of two, whose peer never comes: what it leaves is what a crash before the commit leaves."""

    def __init__(self, process_index: int, process_count: int = 2) -> None:
        self.process_index = process_index
        self.process_count = process_count

    def barrier(self, key: str, *, timeout_s: float, on_last: Any = None, **_: Any) -> None:
        raise SystemExit("killed")


def leave_uncommitted(
    root: Path,
    step: int,
    processes: tuple[int, ...],
    *,
    attempt: str = "job-0-a",
    more: Mapping[str, Any] | None = None,
    options: WriteOptions | None = None,
) -> Path:
    """Leaves a save of two processes in which ``processes`` finished writing; returns its folder.

    The state is that of ``small_state``, and ``more``.
    """
    state = small_state(step) | (more or {})
    for process in processes:
        with pytest.raises(SystemExit):
            save(engine(root, DyingGang(process), attempt=attempt, options=options), step, state, {"data": process})
    return root / f"{step}.gracepoint-tmp.{attempt}.1"


def break_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ChunkWriter, "write", no_space)
