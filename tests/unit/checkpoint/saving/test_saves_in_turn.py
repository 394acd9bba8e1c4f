"""A save begins while the one before it has not ended yet, or has ended badly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint.checkpoint.steps import retention
from gracepoint.deadline import Deadline
from gracepoint.errors import SaveFailed
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import engine, in_gang, save, small_state

PATIENCE_S = 30.0


class LeavesLate(StoreProcessGroup):
    """Process 0 learns late that the first save is committed."""

    goes_on = threading.Event()

    def barrier(self, key: str, **options: Any) -> None:
        super().barrier(key, **options)
        if self.process_index == 0 and key.endswith("/save/1/commit"):
            assert self.goes_on.wait(PATIENCE_S)


def test_save_without_time_to_wait_fails_in_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that all count it, and the next save is written to one folder by all of them."""
    store, goes_on, failed = InMemoryStore(), threading.Event(), threading.Barrier(2)
    monkeypatch.setattr(LeavesLate, "goes_on", goes_on)

    def run(gang: ProcessGroup) -> tuple[int, int | None]:
        checkpointer = engine(tmp_path, LeavesLate(store, gang.process_index, 2))
        checkpointer.save_in_background(100, small_state(100), {})
        left_s = 0.0 if gang.process_index == 0 else 3.0
        with pytest.raises(SaveFailed):
            save(checkpointer, 105, small_state(105), deadline=Deadline.after(left_s, time.monotonic))
        failed.wait(PATIENCE_S)
        goes_on.set()
        saves = checkpointer.executor.saves
        checkpointer.save_in_background(110, small_state(110), {})
        checkpointer.close(PATIENCE_S)
        return saves, checkpointer.committed_step

    assert in_gang(2, run) == [(2, 110), (2, 110)]
    assert (tmp_path / "110").is_dir()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set while a look at the old steps is under way. It goes on at the end of the test."""
    looks, goes_on, real = threading.Event(), threading.Event(), retention.apply

    def slow(*arguments: Any, **options: Any) -> None:
        looks.set()
        assert goes_on.wait(PATIENCE_S)
        real(*arguments, **options)

    monkeypatch.setattr(retention, "apply", slow)
    yield looks
    goes_on.set()


def test_emergency_save_does_not_wait_for_looks_at_old_steps(tmp_path: Path, held: threading.Event) -> None:
    checkpointer = engine(tmp_path)
    checkpointer.save_in_background(100, small_state(100), {})
    assert held.wait(PATIENCE_S)
    assert save(checkpointer, 105, small_state(105), timeout_s=PATIENCE_S / 3).step == 105
    assert checkpointer.committed_step == 105


def test_periodic_save_does_not_wait_for_looks_at_old_steps(tmp_path: Path, held: threading.Event) -> None:
    checkpointer = engine(tmp_path)
    for step in (100, 200):
        checkpointer.save_in_background(step, small_state(step), {})
        checkpointer.executor.wait_until_finished(PATIENCE_S / 3)
    assert held.is_set()
    assert checkpointer.committed_step == 200
