"""Checkpoints where there are no files: saved, restored, verified and deleted in a store of keys alone."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import CheckpointManager
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checkpoint.verification import verify
from gracepoint.errors import CheckpointCorrupt, CheckpointExists, CheckpointNotFound, CheckpointRefused

FORMS = {
    "raw": WriteOptions(use_ocdbt=False),
    "tensorstore": WriteOptions(use_ocdbt=False, express=False),
    "ocdbt": WriteOptions(use_ocdbt=True),
    "zarr3, compressed": WriteOptions(use_ocdbt=False, use_zarr3=True, compression="zstd"),
}


@pytest.fixture
def directory() -> Iterator[str]:
    found = f"memory://checkpoints-{secrets.token_hex(8)}"
    yield found
    storage_path(found).delete_folder()


def state(step: int) -> dict[str, object]:
    return {"w": jnp.arange(12.0).reshape(3, 4) + step, "b": np.full(5, step), "name": f"step {step}", "n": step}


def check(found: dict[str, object], step: int) -> None:
    expected = state(step)
    assert found.keys() == expected.keys()
    assert (found["name"], found["n"]) == (expected["name"], expected["n"])
    for key in ("w", "b"):
        np.testing.assert_array_equal(np.asarray(found[key]), np.asarray(expected[key]))


def names(directory: str) -> list[str]:
    return sorted(child.name for child in storage_path(directory).children())


@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_steps_are_saved_kept_restored_and_verified(directory: str, options: WriteOptions) -> None:
    with CheckpointManager(directory, keep_last=2, options=options) as manager:
        for step in range(1, 5):
            assert manager.save(step, state(step))
            manager.wait_until_finished()
    assert names(directory) == ["3", "4"]
    assert checkpoint.all_steps(directory) == [3, 4]
    assert [verify(f"{directory}/{step}").ok for step in (3, 4)] == [True, True]
    with CheckpointManager(directory) as manager:
        restored = manager.restore(like=state(0))
    assert restored.step == 4
    check(restored.state, 4)


def test_a_checkpoint_at_a_path_is_replaced_only_by_force(directory: str) -> None:
    path = f"{directory}/model"
    checkpoint.save(path, state(1))
    with pytest.raises(CheckpointExists):
        checkpoint.save(path, state(2))
    checkpoint.save(path, state(2), force=True)
    check(checkpoint.restore(path, state(0)), 2)
    assert names(directory) == ["model"]
    with pytest.raises(CheckpointNotFound):
        checkpoint.restore(f"{directory}/other", state(0))


def test_damage_is_found_and_an_older_step_is_restored(directory: str) -> None:
    with CheckpointManager(directory, options=FORMS["raw"]) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
            manager.wait_until_finished()
    chunk = storage_path(directory) / "2/default/w/0.0"
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.put(bytes(data))
    (damage,) = verify(f"{directory}/2").damage
    assert damage.array == "w"
    assert "do not fit its checksum" in damage.problem
    with CheckpointManager(directory) as manager:
        restored = manager.restore(like=state(0))
    assert restored.step == 1
    with pytest.raises(CheckpointCorrupt):
        checkpoint.restore(f"{directory}/2", state(0))


def test_nothing_of_it_is_in_a_file_system(directory: str) -> None:
    checkpoint.save(f"{directory}/model", state(1))
    path: StoragePath = storage_path(directory) / "model"
    with pytest.raises(TypeError, match="is not in a file system"):
        os.fspath(path)


def test_custom_metadata_is_saved_and_items_of_handlers_are_refused(directory: str) -> None:
    class Handler:
        def save(self, directory: object, args: object) -> None:
            raise AssertionError("no folder for it to write to")

        def restore(self, directory: object, args: object) -> object:
            raise AssertionError("no folder for it to read")

    with CheckpointManager(directory, item_handlers={"iter": Handler()}) as manager:
        with pytest.raises(CheckpointRefused, match="item 'iter': its handler reads and writes files, and memory://"):
            manager.save(1, state(1), items={"iter": None})
        manager.save(2, state(2), custom_metadata={"run": "a"})
        manager.wait_until_finished()
        assert manager.metadata(2).custom_metadata == {"run": "a"}
        assert manager.all_steps() == [2]
