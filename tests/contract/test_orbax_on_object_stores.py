"""Gracepoint and stock Orbax restore each other's checkpoints on ``gs://``, bit for bit, in all formats.

Orbax has no ``s3://``; there Gracepoint restores its own.
"""

from __future__ import annotations

from typing import Any

import orbax.checkpoint as ocp
import pytest
from etils import epath  # type: ignore[import-untyped]

from gracepoint import checkpoint
from gracepoint.checkpoint import AsyncCheckpointer, CheckpointManager, WriteOptions
from tests.object_stores.servers import Bucket
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, rich_state, save, small_state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::ResourceWarning")

OF_ORBAX: dict[str, dict[str, Any]] = {
    "default (OCDBT, zstd)": {},
    "OCDBT, zarr3": {"use_ocdbt": True, "use_zarr3": True},
    "zarr2 files": {"use_ocdbt": False},
    "zarr2 files, uncompressed": {"use_ocdbt": False, "use_compression": False},
    "zarr3 files": {"use_ocdbt": False, "use_zarr3": True},
}
OURS: dict[str, WriteOptions] = {
    "default": WriteOptions(),
    "OCDBT": WriteOptions(use_ocdbt=True),
    "OCDBT, zarr3": WriteOptions(use_ocdbt=True, use_zarr3=True),
    "zarr2 files": WriteOptions(use_ocdbt=False),
    "zarr2 files, zstd": WriteOptions(use_ocdbt=False, compression="zstd"),
    "zarr3 files": WriteOptions(use_ocdbt=False, use_zarr3=True),
    "zarr2 files by TensorStore": WriteOptions(use_ocdbt=False, express=False),
}


@pytest.mark.parametrize("form", OF_ORBAX.values(), ids=OF_ORBAX)
def test_a_step_written_by_orbax_is_restored(gs_bucket: Bucket, form: dict[str, Any]) -> None:
    root, state = f"{gs_bucket.uri}/run", rich_state()
    with ocp.CheckpointManager(root, item_handlers=ocp.PyTreeCheckpointHandler(**form)) as manager:
        manager.save(5, args=ocp.args.PyTreeSave(state))
        manager.wait_until_finished()
    restored = restore(root, state)
    assert restored is not None
    assert (restored.step, restored.by_orbax) == (5, True)
    assert_same(restored.state, state)


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_orbax_restores_a_step_of_ours(gs_bucket: Bucket, options: WriteOptions) -> None:
    root, state = f"{gs_bucket.uri}/run", rich_state()
    save(engine(root, options=options), 3, state)
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [3]
        assert_same(manager.restore(3, args=ocp.args.StandardRestore(state)), state)


@pytest.mark.parametrize("options", OURS.values(), ids=OURS)
def test_our_steps_are_restored_from_s3(s3_bucket: Bucket, options: WriteOptions) -> None:
    root, state = f"{s3_bucket.uri}/run", rich_state()
    save(engine(root, options=options), 3, state, {"data": 7})
    restored = restore(root, state)
    assert restored is not None
    assert (restored.step, restored.host_state) == (3, {"data": 7})
    assert_same(restored.state, state)


def test_both_list_the_steps_of_both(gs_bucket: Bucket) -> None:
    root = f"{gs_bucket.uri}/run"
    save(engine(root), 1, small_state(1))
    with ocp.CheckpointManager(root) as manager:
        manager.save(2, args=ocp.args.StandardSave(small_state(2)))
        manager.wait_until_finished()
        assert sorted(manager.all_steps()) == [1, 2]
    assert sorted(checkpoint.all_steps(root)) == [1, 2]
    restored = restore(root, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(2))


def test_paths_as_orbax_s_users_have_them_are_the_same_places(bucket: Bucket) -> None:
    root = epath.Path(bucket.uri) / "run"
    with AsyncCheckpointer() as checkpointer, CheckpointManager(root / "steps") as manager:
        checkpointer.save(root / "by itself", small_state(1))
        checkpointer.wait_until_finished()
        manager.save(2, small_state(2))
        manager.wait_until_finished()
        assert_same(checkpointer.restore(f"{bucket.uri}/run/by itself", small_state()), small_state(1))
        assert_same(manager.restore(2, like=small_state()).state, small_state(2))
    assert_same(checkpoint.restore(root / "by itself", small_state()), small_state(1))
    assert list(checkpoint.all_steps(root / "steps")) == list(checkpoint.all_steps(f"{bucket.uri}/run/steps")) == [2]
    assert checkpoint.verify(root / "by itself").damage == ()
