"""Gracepoint restores what Orbax wrote, by default settings and others, bit for bit."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from gracepoint import checkpoint
from gracepoint.errors import CheckpointCorrupt, CheckpointError
from tests.contract.fakes.orbax_saves import FORMS, save_with_orbax
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, rich_state, save, sharding, small_state

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_step_written_by_orbax_is_restored(
    tmp_path: Path, form: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = rich_state()
    save_with_orbax(tmp_path, 5, state, **form)
    with caplog.at_level(logging.WARNING):
        restored = restore(tmp_path, state)
    assert restored is not None
    assert (restored.step, restored.host_state, restored.by_orbax) == (5, {}, True)
    assert_same(restored.state, state)
    assert "written by Orbax: it has no host state" in caplog.text


def test_it_is_restored_into_another_sharding(tmp_path: Path) -> None:
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    save_with_orbax(tmp_path, 5, {"w": jax.device_put(values, sharding("x", "y"))})
    restored = restore(tmp_path, {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=sharding("y"))})
    assert restored is not None
    assert restored.state["w"].sharding == sharding("y")
    np.testing.assert_array_equal(restored.state["w"], values)


def test_training_continues_from_it_and_keeps_it(tmp_path: Path) -> None:
    save_with_orbax(tmp_path, 5, small_state(5))
    checkpointer = engine(tmp_path, keep_last=1)
    assert checkpointer.restore(small_state(), timeout_s=30) is not None
    for step in (6, 7):
        checkpointer.save_in_background(step, small_state(step), {})
    checkpointer.close(30)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["5", "7"]  # retention is of ours


def test_preemption_right_after_restore_saves_the_step_with_host_state(tmp_path: Path) -> None:
    save_with_orbax(tmp_path, 5, small_state(5))
    checkpointer = engine(tmp_path)
    assert checkpointer.restore(small_state(), timeout_s=30) is not None
    save(checkpointer, 5, small_state(5), {"data": 1})
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert (restored.by_orbax, restored.host_state) == (False, {"data": 1})
    assert (tmp_path / "5.gracepoint-aside.job-0-a.1" / "default" / "_METADATA").is_file()


def test_an_unfinished_step_of_orbax_is_refused(tmp_path: Path) -> None:
    save_with_orbax(tmp_path, 5, small_state())
    (tmp_path / "5" / "commit_success.txt").unlink()
    mark = tmp_path / "5" / "_CHECKPOINT_METADATA"
    mark.write_text(json.dumps(json.loads(mark.read_bytes()) | {"commit_timestamp_nsecs": None}))
    with pytest.raises(CheckpointCorrupt, match=re.escape(f"{tmp_path / '5'} was written by Orbax, and not finished")):
        restore(tmp_path, small_state())


def test_steps_of_orbax_without_marks_are_listed_and_restored(tmp_path: Path) -> None:
    for step in (4, 5):
        save_with_orbax(tmp_path, step, small_state(step))
        for mark in ("commit_success.txt", "default/commit_success.txt", "_CHECKPOINT_METADATA"):
            (tmp_path / str(step) / mark).unlink()
    shutil.rmtree(tmp_path / "5" / "default" / "d")
    shutil.copytree(tmp_path / "4", tmp_path / "6.orbax-checkpoint-tmp-0")
    with ocp.CheckpointManager(tmp_path) as manager:
        assert checkpoint.all_steps(tmp_path) == manager.all_steps() == [4, 5]
    restored = restore(tmp_path, small_state())  # 5 is torn
    assert restored is not None
    assert restored.step == 4
    assert_same(restored.state, small_state(4))


def test_a_damaged_step_of_orbax_is_passed_over(tmp_path: Path) -> None:
    for step in (4, 5):
        save_with_orbax(tmp_path, step, small_state(step))
    for path in (tmp_path / "5" / "default" / "d").iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    for path in (tmp_path / "5" / "default").glob("ocdbt.process_*/d/*"):
        path.write_bytes(path.read_bytes()[:-9])
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert restored.step == 4
    assert_same(restored.state, small_state(4))


def test_a_missing_chunk_of_orbax_is_not_read_as_zeros(tmp_path: Path) -> None:
    save_with_orbax(tmp_path, 5, small_state(), use_ocdbt=False)
    array = tmp_path / "5" / "default" / "w"
    max(file for file in array.iterdir() if file.name != ".zarray").unlink()
    with pytest.raises(CheckpointCorrupt, match="leaf 'w': NOT_FOUND"):
        restore(tmp_path, small_state())


def test_items_under_other_names_are_refused_unless_one_has_a_tree(tmp_path: Path) -> None:
    for items in (("params",), ("params", "more")):
        root = tmp_path / "-".join(items)
        with ocp.CheckpointManager(root, item_names=items) as manager:
            manager.save(5, args=ocp.args.Composite(**dict.fromkeys(items, ocp.args.StandardSave(small_state()))))
            manager.wait_until_finished()
    restored = restore(tmp_path / "params", small_state())
    assert restored is not None
    assert_same(restored.state, small_state())
    with pytest.raises(CheckpointCorrupt, match="Orbax's, in an item named 'default', and several other items"):
        restore(tmp_path / "params-more", small_state())


def test_leaf_kind_of_orbax_alone_is_refused(tmp_path: Path) -> None:
    save_with_orbax(tmp_path, 5, {"w": np.ones(2), "other": 1})
    metadata = tmp_path / "5" / "default" / "_METADATA"
    metadata.write_text(metadata.read_text().replace('"scalar"', '"my.Type"'))
    with pytest.raises(CheckpointError, match="leaf 'other' was saved as 'my.Type', which is not supported"):
        restore(tmp_path, {"w": np.ones(2), "other": 1})


def test_unmerged_folders_are_refused_in_words(tmp_path: Path) -> None:
    save_with_orbax(tmp_path, 5, small_state())
    (tmp_path / "5" / "default" / "manifest.ocdbt").unlink()
    shutil.rmtree(tmp_path / "5" / "default" / "d")
    with pytest.raises(CheckpointError, match="were never merged"):
        restore(tmp_path, small_state())
