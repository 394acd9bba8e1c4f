"""Fixtures of several tests of the checkpoint engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from gracepoint.checkpoint.saving import planner
from gracepoint.checkpoint.saving.host_snapshot import HostSnapshot
from gracepoint.checkpoint.storage.objects.persistence import Pace


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The memory for snapshots that is reserved from here on."""
    made: list[object] = []

    class Noted(HostSnapshot):
        def __init__(self, *form: object, **options: bool) -> None:
            super().__init__(*form, **options)  # type: ignore[arg-type]
            made.append(self)

    monkeypatch.setattr(planner, "HostSnapshot", Noted)
    return made


@pytest.fixture
def unhedged(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request is made a second time because it is slow: on a busy machine, that says nothing of the store."""
    monkeypatch.setattr(Pace, "hedge_after_s", lambda pace, size_bytes: 3600.0)


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)
