"""What a job does with the steps of a bucket: the lease, salvage, promotion, damage, what it learns of the store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import json
import threading
import time
from types import ModuleType
from typing import Any

import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import CheckpointManager, all_steps
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps.lease import Holder
from gracepoint.checkpoint.steps.manifest_commit import ManifestCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.writing import chunk_writer
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, SaveFailed
from tests.object_stores.servers import Bucket
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, save, small_state
from tests.waiting import until

PATIENCE_S = 60.0


@pytest.fixture
def root(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(ManifestCommit, "quiet_s", 0.0)  # nobody else writes
    return f"{bucket.uri}/run"


def restored_step(root: str) -> int:
    restored = restore(root, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(restored.step))
    return restored.step


def pass_a_second(root: str) -> None:
    """Returns when a save begins later, by the store's clock, than one that began before. S3 dates to the second."""
    store = storage_path(root)
    begun_s = store.now_s()
    until(lambda: store.now_s() > begun_s, "the store's clock to go on")


def test_a_checkpoint_manager_saves_restores_and_lists(root: str) -> None:
    with CheckpointManager(root, keep_last=2) as manager:
        for step in (1, 2, 3):
            manager.save(step, small_state(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        assert_same(manager.restore(3, like=small_state()).state, small_state(3))


def test_a_tree_is_saved_and_restored_by_its_path(root: str) -> None:
    checkpoint.save(f"{root}/a", small_state(1))
    checkpoint.save(f"{root}/a", small_state(2), force=True)
    assert_same(checkpoint.restore(f"{root}/a", small_state()), small_state(2))


def test_a_bucket_is_held_by_one_job(root: str) -> None:
    elsewhere = Holder("job-b", "job-b-0", "another-machine", "4026531836:7:123")
    lease = Layout(storage_path(root)).lease()
    lease.put(json.dumps(dataclasses.asdict(elsewhere)).encode())
    checkpointer = engine(root)
    with pytest.raises(CheckpointError, match=r"another job uses it: job-b \(attempt job-b-0, on another-machine\)"):
        checkpointer.access.claim("job-0", timeout_s=1)
    lease.delete()
    checkpointer.access.claim("job-0", timeout_s=PATIENCE_S)
    assert json.loads(lease.read_bytes())["job"] == "job-0"
    checkpointer.close(PATIENCE_S)
    assert storage_path(root).entries() == []


def test_a_durable_save_is_committed_by_the_next_start(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> bool:
        raise OSError("the process dies here")

    save(engine(root), 1, small_state(1))
    with monkeypatch.context() as patch:
        patch.setattr(ManifestCommit, "finalize", fails)
        with pytest.raises(SaveFailed):
            save(engine(root, attempt="job-1-b"), 2, small_state(2))
    assert all_steps(root) == [1]
    assert restored_step(root) == 2


def test_the_newest_snapshot_is_promoted(root: str) -> None:
    checkpointer = engine(root)
    checkpointer.save_in_background(1, small_state(1), {})
    checkpointer.executor.stop("a notice")
    stages: list[str] = []
    deadline = Deadline.after(PATIENCE_S, time.monotonic)
    assert checkpointer.promote(deadline=deadline, on_stage=stages.append).step == 1
    assert stages[-1] == "committed"
    checkpointer.close(PATIENCE_S)
    assert restored_step(root) == 1


def test_a_damaged_step_is_passed_over_marked_and_replaced(root: str) -> None:
    for step in (1, 2):
        save(engine(root), step, small_state(step))
    storage_path(f"{root}/2/default/b/0").delete()
    assert restored_step(root) == 1
    mark = Layout(storage_path(root)).damage_mark(2)
    assert mark.exists()
    pass_a_second(root)
    checkpointer = engine(root, attempt="job-2-c")
    assert checkpointer.restore(small_state(), timeout_s=PATIENCE_S) is not None
    save(checkpointer, 2, small_state(2))
    checkpointer.close(PATIENCE_S)
    assert not mark.exists()
    assert restored_step(root) == 2


def test_the_speed_of_a_bucket_is_learnt_and_kept_in_it(root: str) -> None:
    checkpointer = engine(root, remember_throughput=True)
    save(checkpointer, 1, small_state(1))
    checkpointer.close(PATIENCE_S)
    again = engine(root, attempt="job-1-b", remember_throughput=True)
    again.prepare(small_state())
    assert again.throughput.streamed_bytes_per_s == checkpointer.throughput.streamed_bytes_per_s
    again.close(PATIENCE_S)


@pytest.mark.parametrize(
    ("owner", "function"),
    [
        pytest.param(chunk_writer, "_write_chunk", id="before a chunk"),
        pytest.param(ManifestCommit, "record", id="before the done-record"),
        pytest.param(ManifestCommit, "finalize", id="before the commit"),
    ],
)
def test_a_save_that_wakes_after_the_next_attempt_committed_changes_nothing(
    root: str, monkeypatch: pytest.MonkeyPatch, owner: ModuleType | type, function: str
) -> None:
    asleep, wake, calls = threading.Event(), threading.Event(), itertools.count()
    real = getattr(owner, function)

    def sleeps_first(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == 0:
            asleep.set()
            assert wake.wait(PATIENCE_S)
        return real(*arguments, **keywords)

    monkeypatch.setattr(owner, function, sleeps_first)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(save, engine(root, attempt="job-0-a"), 5, small_state(1))
        assert asleep.wait(PATIENCE_S)
        pass_a_second(root)
        save(engine(root, attempt="job-1-b"), 5, small_state(2))
        before = {entry.key: entry.generation for entry in storage_path(f"{root}/5").entries()}
        wake.set()
        assert isinstance(zombie.exception(PATIENCE_S), SaveFailed)
    assert {entry.key: entry.generation for entry in storage_path(f"{root}/5").entries()} == before
    restored = restore(root, small_state(), attempt="job-2-c")
    assert restored is not None
    assert_same(restored.state, small_state(2))
