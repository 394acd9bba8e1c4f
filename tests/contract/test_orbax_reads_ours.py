"""Stock Orbax finds and restores what Gracepoint wrote, bit for bit, and leaves our other folders alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental.layout import Format, Layout

from gracepoint import checkpoint
from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.storage.locations import storage_path
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    bits,
    chunk_files,
    engine,
    flip_bit,
    rich_state,
    save,
    sharding,
    small_state,
)
from tests.unit.checkpoint.fakes.failures import leave_uncommitted

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    root, state = tmp_path_factory.mktemp("root"), rich_state()
    save(engine(root), 3, state, {"data": {"position": 7}}, note="for gpt-1")
    return root, state


def test_a_checkpoint_manager_finds_the_steps_and_only_those(tmp_path: Path) -> None:
    for step in (1, 12):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    left = leave_uncommitted(tmp_path, 13, (0,), attempt="job-z")
    trash, aside = (
        Path(layout.Layout(storage_path(tmp_path)).trash(14, "job-z", 1)),
        Path(layout.Layout(storage_path(tmp_path)).aside(15, "job-z", 1)),
    )
    for folder in (trash, aside):
        folder.mkdir()
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(cleanup_tmp_directories=True)) as manager:
        assert sorted(manager.all_steps()) == [1, 12]
        assert manager.latest_step() == 12
    assert all(folder.is_dir() for folder in (left, trash, aside))  # its cleaning up is of its own only


def test_orbax_s_functions_for_evaluations_find_our_steps(tmp_path: Path) -> None:
    for step in (1, 12):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state(step))
    leave_uncommitted(tmp_path, 13, (0,), attempt="job-z")
    found = []
    for step in ocp.checkpoint_utils.checkpoints_iterator(tmp_path, seconds_to_sleep=0, timeout=0):
        found.append(step)
        assert_same(checkpoint.restore(tmp_path / str(step), small_state()), small_state(step))
        assert checkpoint.all_steps(tmp_path) == [1, 12]  # Orbax's snapshots of steps are no steps
    assert found == [12]
    with ocp.checkpoint_utils.wait_for_new_checkpoint(tmp_path, until_step=5, timeout=0) as newest:
        assert newest == 12
    assert sorted(ocp.utils.checkpoint_steps(tmp_path)) == [1, 12]


def test_a_checkpoint_manager_restores_into_a_given_state(saved: tuple[Path, Any]) -> None:
    root, state = saved
    with ocp.CheckpointManager(root) as manager:
        assert_same(manager.restore(3, args=ocp.args.StandardRestore(state)), state)


def test_a_checkpoint_manager_restores_without_any_arguments(saved: tuple[Path, Any]) -> None:
    root, state = saved
    with ocp.CheckpointManager(root) as manager:
        found = manager.restore(3)
    assert bits(found["params"]["w"]) == bits(state["params"].w)
    assert bits(found["moments"]["nu"][0]) == bits(state["moments"].nu[0])
    assert found["params"]["w"].sharding == state["params"].w.sharding
    assert found["nothing"] == {"none": None, "dict": {}, "list": [], "tuple": ()}


def test_a_checkpoint_manager_restores_both_items_by_name(saved: tuple[Path, Any]) -> None:
    root, state = saved
    with ocp.CheckpointManager(root, item_names=("default", "host_state")) as manager:
        found = manager.restore(
            3, args=ocp.args.Composite(default=ocp.args.StandardRestore(state), host_state=ocp.args.JsonRestore())
        )
    assert_same(found["default"], state)
    assert found["host_state"] == {"processes": 1, "names": ["data"]}


def test_orbax_reads_the_metadata_of_all_leaves(saved: tuple[Path, Any]) -> None:
    root, state = saved
    with ocp.CheckpointManager(root, item_handlers=ocp.StandardCheckpointHandler()) as manager:
        found = manager.item_metadata(3)
    assert (found["params"]["w"].shape, found["params"]["w"].dtype) == ((8, 8), np.float32)
    assert found["params"]["w"].sharding.to_jax_sharding() == state["params"].w.sharding
    assert found["int4"].dtype == state["int4"].dtype


def test_a_standard_checkpointer_restores_the_item_s_folder(saved: tuple[Path, Any]) -> None:
    root, state = saved
    with ocp.StandardCheckpointer() as checkpointer:
        assert_same(checkpointer.restore(root / "3" / "default", state), state)


def test_a_pytree_checkpointer_restores_into_another_sharding(saved: tuple[Path, Any]) -> None:
    root, state = saved
    arguments = jax.tree.map(
        lambda leaf: ocp.ArrayRestoreArgs(sharding=sharding()) if isinstance(leaf, jax.Array) else ocp.RestoreArgs(),
        state,
    )
    found = ocp.PyTreeCheckpointer().restore(
        root / "3" / "default", args=ocp.args.PyTreeRestore(state, restore_args=arguments)
    )
    assert_same(found, state)
    assert found["params"].w.sharding.is_fully_replicated


def test_arrays_of_zeros_and_without_elements_are_restored(tmp_path: Path) -> None:
    state = {"zeros": np.zeros((4, 4), np.float32), "none": np.zeros((0, 3), np.float32)}
    save(engine(tmp_path), 1, state)
    found = ocp.StandardCheckpointer().restore(tmp_path / "1" / "default", state)
    assert_same(found, state)


def test_what_was_written_past_the_page_cache_is_restored(tmp_path: Path) -> None:
    turned = Format(Layout(major_to_minor=(1, 0)), sharding("x", "y"))
    values = np.random.default_rng(0).standard_normal((602, 998), np.float32)  # no whole blocks of a disk
    state = {
        "split": jax.device_put(values, sharding("x", "y")),
        "whole": jax.device_put(values.astype(jnp.bfloat16), sharding()),
        "turned": jax.device_put(values, turned),
        "bytes": np.frombuffer(values.tobytes(), np.uint8)[1:],
    }
    save(engine(tmp_path), 1, state)
    assert_same(ocp.StandardCheckpointer().restore(tmp_path / "1" / "default", state), state)


def test_a_salvaged_step_is_restored(tmp_path: Path) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1))
    commit.salvage(layout.Layout(storage_path(tmp_path)))
    with ocp.CheckpointManager(tmp_path) as manager:
        assert_same(manager.restore(4, args=ocp.args.StandardRestore(small_state())), small_state(4))


def test_orbax_continues_in_our_directory(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state(1))
    with ocp.CheckpointManager(tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=1)) as manager:
        assert manager.save(2, args=ocp.args.StandardSave(small_state(2)))
        manager.wait_until_finished()
        assert manager.all_steps() == [2]
    assert not (tmp_path / "1").exists()


def test_a_flipped_bit_passes_orbax_unseen_and_not_us(saved: tuple[Path, Any], tmp_path: Path) -> None:
    # What the checksums are for; if Orbax ever finds this, docs/checkpoint-format.md should say so.
    save(engine(tmp_path), 1, small_state())
    flip_bit(chunk_files(tmp_path, 1, "w")[0])
    found = ocp.StandardCheckpointer().restore(tmp_path / "1" / "default", small_state())
    assert bits(found["w"]) != bits(small_state()["w"])
