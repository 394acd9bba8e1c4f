"""Periodic saves of several processes in a preemption: a save is begun by all of them, or left out by all."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest

from gracepoint.checkpoint.saving import save_in_flight
from gracepoint.checkpoint.storage.posix import write_durably
from gracepoint.multihost import Agreement
from gracepoint.preemption.time_budget import TimeBudget
from gracepoint.process_group import ProcessGroup
from gracepoint.session.periodic_saves import PeriodicSaves
from tests.unit.checkpoint.support import assert_same, engine, in_gang, restore, save, small_state


class Preempted:
    """An agreement whose freeze has begun, which this process may not have heard yet, and the time that it leaves."""

    noticed = True

    def __init__(self, *, in_epoch: bool) -> None:
        self.in_epoch = in_epoch

    def time_left_s(self) -> float:
        return 10.0

    def doubt(self, *, drained: bool) -> str:
        return ""


@pytest.mark.parametrize("stuck_asks_first", [False, True])
def test_where_the_storage_of_one_process_is_stuck_all_begin_a_save_or_none_and_the_emergency_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck_asks_first: bool
) -> None:
    stuck, goes_on, first = threading.Event(), threading.Event(), threading.Event()

    def hang(path: Path, data: bytes) -> None:
        if path.name == "done.process_0.json" and path.parent.name.startswith("1."):
            stuck.set()
            assert goes_on.wait(30)
        write_durably(path, data)

    monkeypatch.setattr("gracepoint.checkpoint.saving.save_operation.write_durably", hang)
    monkeypatch.setattr(save_in_flight, "_STOPPED_ENDS_S", 0.01)

    def run(gang: ProcessGroup) -> tuple[Any, ...]:
        is_stuck = gang.process_index == 0
        checkpointer = engine(tmp_path, gang, save_every_steps=1)
        begun_by_all, asked = checkpointer.is_begun_by_all, []

        def ask(*, ready: bool) -> bool:
            if is_stuck is not stuck_asks_first:
                assert first.wait(30)
            answer = begun_by_all(ready=ready)
            first.set()
            if is_stuck:
                goes_on.set()
            asked.append((ready, answer))
            return answer

        preempted = Preempted(in_epoch=is_stuck)  # who is stuck stops the save for all
        saves = PeriodicSaves(checkpointer, str(tmp_path), cast(Agreement, preempted), cast(TimeBudget, preempted))
        saves.save_if_due(1, small_state(1), dict)
        assert stuck.wait(30)
        monkeypatch.setattr(checkpointer, "is_begun_by_all", ask)
        saves.save_if_due(2, small_state(2), dict)
        newest = checkpointer.newest_snapshot
        assert asked == [(not is_stuck, not stuck_asks_first)]
        return None if newest is None else newest.step, save(checkpointer, 3, small_state(3)).step

    assert in_gang(2, run) == [(1 if stuck_asks_first else 2, 3)] * 2
    found = restore(tmp_path, small_state())
    assert found is not None
    assert found.step == 3
    assert_same(found.state, small_state(3))
