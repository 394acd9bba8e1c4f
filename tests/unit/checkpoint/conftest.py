"""Fixtures of several tests of the checkpoint engine."""

from __future__ import annotations

import pytest

from gracepoint.checkpoint.saving import save_planner
from gracepoint.checkpoint.transfer.snapshot_memory import HostSnapshot


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The memory for snapshots that is reserved from here on."""
    made: list[object] = []

    class Noted(HostSnapshot):
        def __init__(self, *form: object, **options: bool) -> None:
            super().__init__(*form, **options)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(save_planner, "HostSnapshot", Noted)
    return made
