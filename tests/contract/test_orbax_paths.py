"""Checkpoints with a path of their own: stock Orbax's checkpointers read ours there, and we read theirs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from gracepoint import checkpoint
from gracepoint.errors import CheckpointCorrupt
from tests.unit.checkpoint.fakes.engine import assert_same, bits, rich_state, sharding, small_state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path, state = tmp_path_factory.mktemp("ours") / "checkpoint", rich_state()
    checkpoint.save(path, state)
    return path, state


def test_a_standard_checkpointer_restores_ours(ours: tuple[Path, Any]) -> None:
    path, state = ours
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(path, state), state)
        found = checkpointer.restore(path)
    assert bits(found["params"]["w"]) == bits(state["params"].w)
    assert found["params"]["w"].sharding == state["params"].w.sharding


def test_a_pytree_checkpointer_restores_ours_into_another_sharding(ours: tuple[Path, Any]) -> None:
    path, state = ours
    arguments = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding()) if isinstance(leaf, jax.Array) else ocp.RestoreArgs(),
        state,
    )
    found = ocp.PyTreeCheckpointer().restore(path, args=ocp.args.PyTreeRestore(state, restore_args=arguments))
    assert_same(found, state)
    assert found["params"].w.sharding.is_fully_replicated


def test_orbax_reads_the_metadata_of_ours(ours: tuple[Path, Any]) -> None:
    path, state = ours
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.metadata(path).item_metadata
    assert (found["params"]["w"].shape, found["params"]["w"].dtype) == ((8, 8), np.float32)
    assert found["params"]["w"].sharding.to_jax_sharding() == state["params"].w.sharding


def test_orbax_refuses_to_overwrite_ours_and_overwrites_it_on_request(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", small_state(1))
    with ocp.StandardCheckpointer() as checkpointer:
        with pytest.raises(ValueError, match="already exists"):
            checkpointer.save(tmp_path / "a", small_state(2))
        checkpointer.save(tmp_path / "a", small_state(2), force=True)
    assert_same(checkpoint.restore(tmp_path / "a", small_state()), small_state(2))


@pytest.mark.parametrize("kind", ["standard", "pytree", "async"])
def test_ours_restores_what_orbax_wrote_at_a_path(tmp_path: Path, kind: str) -> None:
    state = small_state(4)
    if kind == "standard":
        with ocp.StandardCheckpointer() as standard:
            standard.save(tmp_path / "a", state)
    elif kind == "pytree":
        ocp.PyTreeCheckpointer().save(tmp_path / "a", state)
    else:
        with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as asynchronous:
            asynchronous.save(tmp_path / "a", args=ocp.args.PyTreeSave(state))
    assert_same(checkpoint.restore(tmp_path / "a", state), state)
    found = checkpoint.restore(tmp_path / "a")
    assert found["w"].sharding == state["w"].sharding


def test_single_item_of_an_orbax_step_is_restored_by_the_step_path(tmp_path: Path) -> None:
    for items in (("params",), ("params", "more")):
        root = tmp_path / "-".join(items)
        with ocp.CheckpointManager(root, item_names=items) as manager:
            manager.save(5, args=ocp.args.Composite(**dict.fromkeys(items, ocp.args.StandardSave(small_state(5)))))
            manager.wait_until_finished()
        assert_same(checkpoint.restore(root / "5" / "params", small_state()), small_state(5))
    assert_same(checkpoint.restore(tmp_path / "params" / "5", small_state()), small_state(5))
    with pytest.raises(CheckpointCorrupt, match="has several items with a tree of arrays: expected"):
        checkpoint.restore(tmp_path / "params-more" / "5", small_state())


def test_what_the_next_api_of_orbax_wrote_is_restored(tmp_path: Path) -> None:
    ocp.v1.save_pytree(tmp_path / "a", small_state())
    assert_same(checkpoint.restore(tmp_path / "a", small_state()), small_state())


def test_ours_replaces_orbaxs_on_request_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", {"w": jnp.zeros(3)})
    checkpoint.save(tmp_path / "a", small_state(), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(tmp_path / "a", small_state()), small_state())


def without_marks(path: Path) -> Path:
    """Makes a checkpoint one as Orbax wrote them before it made marks."""
    for mark in path.rglob("commit_success.txt"):
        mark.unlink()
    (path / "_CHECKPOINT_METADATA").unlink()
    return path


def not_committed(path: Path) -> Path:
    (path / "commit_success.txt").unlink()
    metadata = json.loads((path / "_CHECKPOINT_METADATA").read_bytes())
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(metadata | {"commit_timestamp_nsecs": None}))
    return path


def with_a_temporary_name(path: Path) -> Path:
    return without_marks(path).rename(path.with_name(f"{path.name}.orbax-checkpoint-tmp-17"))


@pytest.mark.parametrize("leave", [not_committed, with_a_temporary_name], ids=lambda leave: leave.__name__)
def test_what_orbax_did_not_finish_is_refused(tmp_path: Path, leave: Callable[[Path], Path]) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", small_state())
    path = leave(tmp_path / "a")
    with pytest.raises(CheckpointCorrupt, match="was written by Orbax, and not finished"):
        checkpoint.restore(path, small_state())


def test_what_orbax_wrote_without_marks_is_restored_as_orbax_does(tmp_path: Path) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "a", small_state())
    path = without_marks(tmp_path / "a")
    assert_same(checkpoint.restore(path, small_state()), ocp.StandardCheckpointer().restore(path, small_state()))


def lose_an_array(path: Path) -> None:
    shutil.rmtree(path / "w")


def lose_a_chunk(path: Path) -> None:
    max(file for file in (path / "w").iterdir() if file.name != ".zarray").unlink()


def cut_the_metadata_off(path: Path) -> None:
    (path / "_METADATA").write_bytes((path / "_METADATA").read_bytes()[:20])


@pytest.mark.parametrize("tear", [lose_an_array, lose_a_chunk, cut_the_metadata_off], ids=lambda tear: tear.__name__)
def test_what_is_torn_and_has_no_marks_is_refused(tmp_path: Path, tear: Callable[[Path], None]) -> None:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(tmp_path / "a", small_state())
    tear(without_marks(tmp_path / "a"))
    with pytest.raises(CheckpointCorrupt):
        checkpoint.restore(tmp_path / "a", small_state())
