"""Fixtures of several tests of the checkpoint engine."""

from __future__ import annotations

import pytest

from gracepoint.checkpoint import planner
from gracepoint.checkpoint.snapshot import Snapshot


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The memory for snapshots that is reserved from here on."""
    made: list[object] = []

    class Noted(Snapshot):
        def __init__(self, *form: object) -> None:
            super().__init__(*form)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(planner, "Snapshot", Noted)
    return made
