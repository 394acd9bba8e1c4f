"""Steps for loops without a session: when to save, what stays, which step is restored."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint.checkpoint_manager import CheckpointManager
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import lease
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    SaveFailed,
    SettingsError,
)
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    chunk_files,
    engine,
    flip_bit,
    in_gang,
    outcomes_in_gang,
    save,
    small_state,
)
from tests.unit.checkpoint.fakes.failures import break_writer
from tests.waiting import until_no_thread

pytestmark = pytest.mark.integration


def numbers(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name.isdigit())


def test_steps_that_are_due_are_saved_and_the_newest_stay(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_every_steps=2, keep_last=2, keep_every_steps=6) as manager:
        saved = [step for step in range(1, 14) if manager.save(step, small_state(step))]
    assert saved == [2, 4, 6, 8, 10, 12]
    assert numbers(tmp_path) == ["10", "12", "6"]
    assert not list(tmp_path.glob(".gracepoint-*"))


def test_the_first_save_after_prepare_reserves_no_memory(tmp_path: Path, reserved: list[object]) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.prepare(small_state())
        assert len(reserved) == 1
        manager.save(1, small_state())
        manager.save(2, small_state(2))
    assert len(reserved) == 1


def test_manager_has_its_directory_and_says_whether_a_save_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, real = threading.Event(), RenameCommit.finalize

    def late(*arguments: Any, **options: Any) -> bool:
        assert go.wait(30)
        return real(*arguments, **options)

    monkeypatch.setattr(RenameCommit, "finalize", late)
    with CheckpointManager(tmp_path) as manager:
        assert manager.directory == tmp_path
        assert not manager.is_saving_in_progress()
        manager.save(1, small_state())
        assert manager.is_saving_in_progress()
        go.set()
        manager.wait_until_finished()
        assert not manager.is_saving_in_progress()


def test_without_an_interval_every_step_is_due(tmp_path: Path) -> None:
    now = [0.0]
    with (
        CheckpointManager(tmp_path / "a") as every,
        CheckpointManager(tmp_path / "b", save_every_s=10, clock=lambda: now[0]) as timed,
    ):
        assert all(every.should_save(step) for step in range(3))
        due = []
        for step in range(100):
            now[0] += 1
            if timed.should_save(step):
                due.append(step)
                assert timed.save(step, small_state())  # asked again, the answer is the same
    assert 7 <= len(due) <= 10


def test_a_step_that_is_not_due_is_saved_on_request(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_every_steps=100) as manager:
        assert not manager.save(1, small_state())
        assert manager.save(1, small_state(), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
        assert manager.last_save is not None
        assert manager.last_save.step == 1


def test_a_step_that_is_there_is_saved_again_on_request(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, small_state(1))
    with CheckpointManager(tmp_path) as manager:
        manager.restore(5)
        assert manager.save(5, small_state(2))  # it is there
        assert_same(checkpoint.restore(tmp_path / "5", small_state()), small_state(1))
        for state in ({"w": jnp.ones(3), "lora": jnp.ones(2)}, small_state(3)):
            assert manager.save(5, state, force=True)
            manager.wait_until_finished()
            assert_same(checkpoint.restore(tmp_path / "5", state), state)
    assert numbers(tmp_path) == ["5"]


def test_the_newest_step_is_restored_or_the_one_that_was_asked_for(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 3):
            manager.save(step, small_state(step))
        manager.wait_until_finished()
        assert (manager.all_steps(), manager.latest_step()) == ([1, 2, 3], 3)
        newest = manager.restore(like=small_state())
        assert newest.step == 3
        assert_same(newest.state, small_state(3))
        older = manager.restore(2)
        assert older.step == 2
        assert older.state["count"] == 7
        assert manager.metadata(2).tree["w"].shape == (4, 4)


def test_an_evaluation_that_only_restores_deletes_nothing_of_what_another_job_keeps(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_last=9) as training:
        for step in range(1, 7):
            training.save(step, small_state(step))
        training.wait_until_finished()
        with CheckpointManager(tmp_path, keep_last=1) as evaluation:
            assert evaluation.restore(5, like=small_state()).step == 5
            assert evaluation.restore(like=small_state()).step == 6
        assert training.all_steps() == [1, 2, 3, 4, 5, 6]


def test_unfinished_saves_are_deleted_by_the_first_save_after_a_restore(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, small_state())
    left = tmp_path / "2.gracepoint-tmp.killed.2"
    left.mkdir()
    os.utime(left, (1, 1))
    with CheckpointManager(tmp_path) as manager:
        manager.restore(like=small_state())
        assert left.is_dir()  # who only looks leaves that alone, too
        manager.save(2, small_state())
    assert (numbers(tmp_path), left.exists()) == (["1", "2"], False)


@pytest.mark.parametrize("step", [3, 5])
def test_first_save_behind_existing_steps_is_refused_without_a_restore(tmp_path: Path, step: int) -> None:
    def start(gang: ProcessGroup) -> list[bool]:
        with CheckpointManager(tmp_path, gang=gang) as manager:
            with pytest.raises(CheckpointExists, match=rf"save\({step}\): .* has a complete step 5, and nothing was"):
                manager.save(step, small_state())
            assert manager.restore(like=small_state()).step == 5
            return [manager.save(6, small_state())]

    with CheckpointManager(tmp_path) as manager:
        manager.save(5, small_state())
    assert in_gang(2, start) == [[True], [True]]
    with CheckpointManager(tmp_path) as manager:
        assert manager.save(step, small_state(), force=True)
    with CheckpointManager(tmp_path) as manager:
        assert manager.save(7, small_state())
    assert numbers(tmp_path)[-3:] == ["5", "6", "7"]


def test_damaged_newest_step_is_skipped_unless_it_was_requested(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            manager.save(step, small_state(step))
        manager.wait_until_finished()
        flip_bit(chunk_files(tmp_path, 2, "w")[0])
        with pytest.raises(CheckpointCorrupt, match=r"step 2 of .* cannot be restored: .*checksum"):
            manager.restore(2, like=small_state())
        found = manager.restore(like=small_state())
        assert (found.step, list(found.passed_over)) == (1, [2])


def test_what_is_not_there_is_an_error_that_says_what_is(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() is None
        with pytest.raises(CheckpointNotFound, match="has no checkpoint"):
            manager.restore()
        manager.save(4, small_state())
        manager.wait_until_finished()
        with pytest.raises(CheckpointNotFound, match="no complete checkpoint of step 5: complete are 4"):
            manager.restore(5)
        with pytest.raises(CheckpointNotFound, match="there is no checkpoint at"):
            manager.metadata(5)


def test_what_it_saves_a_session_restores_and_the_other_way_round(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state(1), {"data": 5})
    with CheckpointManager(tmp_path) as manager:
        assert_same(manager.restore(like=small_state()).state, small_state(1))
        manager.save(2, small_state(2))
    restored = engine(tmp_path, attempt="job-1-b").restore(small_state(), timeout_s=30)
    assert restored is not None
    assert (restored.step, restored.host_state) == (2, {})


def test_an_error_of_the_background_surfaces_at_the_next_call_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path) as manager:
        with monkeypatch.context() as patch:
            break_writer(patch)
            manager.save(1, small_state())
            with pytest.raises(SaveFailed, match="No space left"):
                manager.wait_until_finished()
        manager.check_for_errors()
        manager.save(2, small_state())
    assert numbers(tmp_path) == ["2"]


def test_directory_of_another_job_is_refused_for_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "PATIENCE_S", 0.01)
    save(engine(tmp_path), 1, small_state())
    other = lease.Holder("job-b", "job-b-0", "another-machine", "1:7:123")
    Layout(storage_path(tmp_path)).lease().put(json.dumps(dataclasses.asdict(other)).encode())
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore().step == 1  # an evaluation may read
        with pytest.raises(CheckpointError, match="another job uses it: job-b"):
            manager.save(2, small_state())


@pytest.mark.long
def test_gang_saves_and_restores_the_same_steps(tmp_path: Path) -> None:
    state = small_state()

    def run(gang: ProcessGroup) -> tuple[list[int], int]:
        now = [1000.0 * gang.process_index]

        def clock() -> float:
            now[0] += 0.3 if gang.process_index else 1.0
            return now[0]

        with CheckpointManager(tmp_path, save_every_s=20, keep_last=2, gang=gang, clock=clock) as manager:
            saved = [step for step in range(200) if manager.save(step, state)]
            return saved, manager.restore(like=state).step

    (first, restored), *others = in_gang(3, run)
    assert others == [(first, restored)] * 2
    assert len(first) > 2
    assert (restored, numbers(tmp_path)) == (first[-1], sorted(map(str, first[-2:])))


def test_unsavable_leaf_fails_its_process_and_is_reported_to_peers(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        with CheckpointManager(tmp_path, gang=gang, timeout_s=20) as manager:
            manager.save(1, {"w": jnp.zeros(2), "bad": object() if gang.process_index else 1})

    told, failed = outcomes_in_gang(2, run)
    assert "state['bad']: cannot save" in str(failed)
    assert isinstance(told, SaveFailed)
    assert "process 1 reported" in str(told)


def test_one_failure_in_one_process_is_raised_once_in_each_and_no_later_save_fails(tmp_path: Path) -> None:
    def run(gang: ProcessGroup) -> list[int]:
        raised = []
        with CheckpointManager(tmp_path, gang=gang, keep_last=10, timeout_s=20) as manager:
            for step in range(1, 7):
                bad = {"bad": object()} if (step, gang.process_index) == (2, 1) else {}
                try:
                    manager.save(step, {"w": jnp.zeros(2)} | bad)
                except CheckpointError:
                    raised.append(step)
                until_no_thread("gracepoint: the save")
                gang.barrier(f"after {step}", timeout_s=30)
        return raised

    assert in_gang(2, run) == [[3], [2]]
    assert numbers(tmp_path) == ["1", "4", "5", "6"]


@pytest.mark.parametrize("wrong", [{"save_every_steps": -1}, {"keep_last": 0}, {"save_every_s": -1.0}], ids=str)
def test_arguments_out_of_range_are_refused_at_once(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        CheckpointManager(tmp_path, **wrong)


def test_a_closed_one_says_so(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, small_state())
    for harmless in (manager.close, manager.close, manager.wait_until_finished, manager.check_for_errors):
        harmless()
    for call in (lambda: manager.save(2, small_state()), manager.restore, lambda: manager.should_save(2)):
        with pytest.raises(SettingsError, match="closed"):
            call()


def test_looking_at_steps_needs_no_manager_and_changes_nothing(tmp_path: Path) -> None:
    assert (checkpoint.all_steps(tmp_path / "none"), checkpoint.latest_step(tmp_path / "none")) == (
        [],
        None,
    )
    for step in (12, 3):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    (tmp_path / "99").mkdir()
    (tmp_path / "100.gracepoint-tmp.job-0.1").mkdir()
    assert (checkpoint.all_steps(tmp_path), checkpoint.latest_step(f"file://{tmp_path}")) == (
        [3, 12],
        12,
    )
    assert len(list(tmp_path.iterdir())) == 4
