"""The engine on real object stores: every format, one and two processes, verification, retention, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from gracepoint import checkpoint
from gracepoint.__main__ import main
from gracepoint.checkpoint import all_steps, verification
from gracepoint.checkpoint.async_checkpointer import AsyncCheckpointer
from gracepoint.checkpoint.options import (
    RestoreArgs,
    RestoreOptions,
    SingleReplica,
    SingleReplicaArrayRestoreArgs,
    WriteOptions,
)
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import CheckpointExists, SettingsError
from gracepoint.process_group import ProcessGroup
from tests.object_stores.servers import Bucket
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    in_gang,
    outcomes_in_gang,
    restore,
    rich_state,
    save,
    sharding,
    small_state,
)
from tests.unit.checkpoint.fakes.formats import each_format


@each_format
def test_what_was_saved_is_restored_and_verified(bucket: Bucket, options: WriteOptions) -> None:
    root: Any = f"{bucket.uri}/run"
    state = rich_state()
    save(engine(root, options=options), 3, state, {"data": {"position": 7}})
    restored = restore(root, state)
    assert restored is not None
    assert (restored.step, restored.host_state) == (3, {"data": {"position": 7}})
    assert_same(restored.state, state)
    assert main(["verify", f"{bucket.uri}/run"]) == 0


@each_format
def test_two_processes_save_and_restore_together(bucket: Bucket, options: WriteOptions) -> None:
    root: Any = f"{bucket.uri}/run"

    def run(gang: ProcessGroup) -> None:
        save(engine(root, gang, options=options), 5, small_state(2.0), {"rank": gang.process_index})

    in_gang(2, run)

    def back(gang: ProcessGroup) -> Any:
        restored = restore(root, small_state(), gang=gang)
        assert restored is not None
        assert restored.host_state == {"rank": gang.process_index}
        return restored.state

    for found in in_gang(2, back):
        assert_same(found, small_state(2.0))


def test_a_checkpoint_with_its_own_path_is_saved_and_replaced(bucket: Bucket) -> None:
    path: Any = f"{bucket.uri}/run/a"
    state = rich_state()
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(path, small_state())
        checkpointer.wait_until_finished()
        with pytest.raises(CheckpointExists):
            checkpointer.save(path, state)
        checkpointer.save(path, state, force=True)
        checkpointer.wait_until_finished()
        assert_same(checkpointer.restore(path, state), state)
    assert main(["verify", path]) == 0
    below = {entry.key.partition("/")[0] for entry in storage_path(f"{bucket.uri}/run").entries()}
    assert below == {"a"}


def test_two_processes_save_to_a_path_together(bucket: Bucket) -> None:
    path: Any = f"{bucket.uri}/run/a"

    def run(gang: ProcessGroup) -> Any:
        with AsyncCheckpointer(gang=gang, options=WriteOptions(use_ocdbt=False)) as checkpointer:
            checkpointer.save(path, small_state(3.0))
            checkpointer.wait_until_finished()
            return checkpointer.restore(path, small_state())

    for found in in_gang(2, run):
        assert_same(found, small_state(3.0))


@pytest.mark.parametrize("use_ocdbt", [False, True])
def test_one_replica_reads_for_all(bucket: Bucket, use_ocdbt: bool) -> None:
    root: Any = f"{bucket.uri}/run"
    save(engine(root, options=WriteOptions(use_ocdbt=use_ocdbt)), 3, small_state(2.0))
    args = {
        "w": SingleReplicaArrayRestoreArgs(sharding=sharding(None, "y")),
        "b": SingleReplicaArrayRestoreArgs(sharding=sharding()),
    }
    restored = checkpoint.restore(
        f"{root}/3",
        small_state(),
        restore_args=args | {"count": RestoreArgs()},
        options=RestoreOptions(single_replica=SingleReplica()),
    )
    assert_same(restored, small_state(2.0))


def test_a_step_that_is_saved_again_is_replaced(bucket: Bucket) -> None:
    root: Any = f"{bucket.uri}/run"
    save(engine(root), 5, small_state(1.0))
    save(engine(root, attempt="job-1-b"), 5, small_state(2.0))
    restored = restore(root, small_state(), attempt="job-2-c")
    assert restored is not None
    assert_same(restored.state, small_state(2.0))
    assert main(["verify", f"{root}/5"]) == 0


def fails() -> dict[str, Any]:
    raise OSError("the data loader could not be asked")


@each_format
@pytest.mark.parametrize("stood", [False, True], ids=["new step", "step saved before"])
def test_a_save_that_fails_in_one_process_leaves_no_object(bucket: Bucket, options: WriteOptions, stood: bool) -> None:
    root: Any = f"{bucket.uri}/run"
    if stood:
        save(engine(root, options=options), 5, small_state(1.0))
    before = {entry.key for entry in storage_path(root).entries()}

    def run(gang: ProcessGroup) -> None:
        checkpointer = engine(root, gang, attempt="job-1-b", options=options)
        checkpointer.save_in_background(5, small_state(2.0), fails if gang.process_index == 1 else {})
        checkpointer.executor.wait_until_finished(60)

    for outcome in outcomes_in_gang(2, run):
        assert "the data loader could not be asked" in str(outcome)
    assert {entry.key for entry in storage_path(root).entries()} == before
    restored = restore(root, small_state(), attempt="job-2-c")
    assert (restored is not None) is stood
    if restored is not None:
        assert_same(restored.state, small_state(1.0))


def test_retention_leaves_nothing_behind(bucket: Bucket) -> None:
    root: Any = f"{bucket.uri}/run"
    checkpointer = engine(root, keep_last=2)
    for step in range(6):
        checkpointer.save_in_background(step, small_state(step), {})
    checkpointer.close(30)
    assert all_steps(root) == [4, 5]
    assert {entry.key.partition("/")[0] for entry in storage_path(root).entries()} == {"4", "5"}


def test_damage_is_found(bucket: Bucket) -> None:
    root: Any = f"{bucket.uri}/run"
    save(engine(root), 5, small_state())
    chunk = storage_path(f"{root}/5/default/b/0")
    chunk.put(bytes(len(chunk.read_bytes())))
    report = verification.verify(f"{root}/5")
    assert [damage.array for damage in report.damage] == ["b"]
    assert str(report.path) == f"{root}/5"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        (
            "az://bucket/run",
            "az:// is not known; expected an absolute path, or one of file://, gs://, memory://, s3://",
        ),
        ("gs://", "found bucket ''"),
        ("s3://B_d/run", "found bucket 'B_d'"),
        ("gs://bucket/a//b", "no empty part"),
        ("gs://bucket/../b", "no empty part"),
    ],
)
def test_a_wrong_uri_is_refused(uri: str, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        storage_path(uri)
