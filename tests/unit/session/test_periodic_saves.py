"""Periodic saves of several processes in a preemption: a save is begun by all of them, or left out by all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from gracepoint.checkpoint.saving.background import background_save
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import AgreementError, SaveFailed
from gracepoint.preemption.coordinator import Coordinator
from gracepoint.process_group import ProcessGroup
from gracepoint.session.periodic_saves import PeriodicSaves
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    in_gang,
    outcomes_in_gang,
    restore,
    save,
    small_state,
)
from tests.unit.preemption.fakes.reporters import without_operator


class Preempted:
    """A coordinator whose freeze has begun, which this process may not have heard yet, with time left."""

    noticed = True
    sync_point = 1

    def __init__(self, *, in_epoch: bool) -> None:
        self.in_epoch = in_epoch
        self.reporter = without_operator()

    def time_left_s(self) -> float:
        return 10.0

    def doubt(self) -> str:
        return ""


@pytest.mark.parametrize("stuck_asks_first", [False, True])
def test_stuck_storage_of_one_process_keeps_saves_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck_asks_first: bool
) -> None:
    stuck, goes_on, first = threading.Event(), threading.Event(), threading.Event()

    put = StoragePath.put

    def hang(path: StoragePath, data: bytes) -> None:
        if path.name == "done.process_0.json" and path.parent.name.startswith("1."):
            stuck.set()
            assert goes_on.wait(30)
        put(path, data)

    monkeypatch.setattr(StoragePath, "put", hang)
    monkeypatch.setattr(background_save, "_STOPPED_ENDS_S", 0.01)

    def run(gang: ProcessGroup) -> tuple[Any, ...]:
        is_stuck = gang.process_index == 0
        checkpointer = engine(tmp_path, gang, save_every_steps=1)
        begun_by_all, asked = checkpointer.due_saves.are_begun, []

        def ask(step: int, *, sync_point: int, ready: bool) -> bool:
            if is_stuck is not stuck_asks_first:
                assert first.wait(30)
            answer = begun_by_all(step, sync_point=sync_point, ready=ready)
            first.set()
            if is_stuck:
                goes_on.set()
            asked.append((ready, answer))
            return answer

        preempted = Preempted(in_epoch=is_stuck)  # who is stuck stops the save for all
        saves = PeriodicSaves(checkpointer, str(tmp_path), cast(Coordinator, preempted))
        assert saves.begins(1)
        checkpointer.save_in_background(1, small_state(1), {})
        assert stuck.wait(30)
        monkeypatch.setattr(checkpointer.due_saves, "are_begun", ask)
        if saves.begins(2):
            checkpointer.save_in_background(2, small_state(2), {})
        newest = checkpointer.executor.background.newest_snapshot
        assert asked == [(not is_stuck, not stuck_asks_first)]
        return None if newest is None else newest.step, save(checkpointer, 3, small_state(3)).step

    assert in_gang(2, run) == [(1 if stuck_asks_first else 2, 3)] * 2
    found = restore(tmp_path, small_state())
    assert found is not None
    assert found.step == 3
    assert_same(found.state, small_state(3))


class AtSyncPoint:
    """A coordinator without a preemption."""

    noticed = in_epoch = False

    def __init__(self, sync_point: int) -> None:
        self.sync_point = sync_point
        self.reporter = without_operator()


@pytest.mark.parametrize(
    ("steps", "sync_points"),
    [
        pytest.param((10, 20), (10, 10), id="other steps at the same sync point"),
        pytest.param((10, 10), (10, 9), id="the same step at other sync points"),
    ],
)
def test_process_at_another_step_is_found_at_the_periodic_save(
    tmp_path: Path, steps: tuple[int, int], sync_points: tuple[int, int]
) -> None:
    begun = threading.Event()

    def run(gang: ProcessGroup) -> None:
        me = gang.process_index
        checkpointer = engine(tmp_path, gang, save_every_steps=10)
        saves = PeriodicSaves(checkpointer, str(tmp_path), cast(Coordinator, AtSyncPoint(sync_points[me])))
        if me == 1:
            assert begun.wait(30)
        try:
            if saves.begins(steps[me]):
                checkpointer.save_in_background(steps[me], small_state(), {})
        finally:
            begun.set()
        checkpointer.executor.background.wait_until_finished(30)

    first, second = outcomes_in_gang(2, run)
    both = (
        f"process 0 with step {steps[0]} at sync point {sync_points[0]}, "
        f"and in process 1 with step {steps[1]} at sync point {sync_points[1]}"
    )
    assert isinstance(second, AgreementError)
    assert both in str(second)
    assert isinstance(first, SaveFailed)
    assert both in str(first)
