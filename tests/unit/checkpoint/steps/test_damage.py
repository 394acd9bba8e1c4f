"""Damaged, torn, foreign and empty folders: never restored, always said, and never step 0 in silence."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.checkpoint import all_steps
from gracepoint.checkpoint.format import layout
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.reading import stored_arrays
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, CheckpointRefused, SaveFailed
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    chunk_files,
    engine,
    flip_bit,
    in_gang,
    outcomes_in_gang,
    restore,
    save,
    sharding,
    small_state,
)


def two_steps(root: Path) -> None:
    checkpointer = engine(root)
    for step in (1, 2):
        save(checkpointer, step, small_state(step), {"data": step})


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: list[tuple[str, Callable[[Path], None], str]] = [
    ("default/w/0.1", flip_bit, "do not fit its checksum"),
    ("default/w/1.0", cut, "has 15 bytes, expected 16"),
    ("default/w/1.1", Path.unlink, "is missing"),
    ("default/b/0", flip_bit, "do not fit its checksum"),
    ("host_state/process_0.json", flip_bit, "do not fit its checksum"),
    ("host_state/process_0.json", Path.unlink, "is missing"),
    ("_GRACEPOINT", flip_bit, "_GRACEPOINT"),
    ("_GRACEPOINT", cut, "_GRACEPOINT cannot be read"),
]


@pytest.mark.parametrize(
    ("file", "damage", "message"), DAMAGE, ids=[f"{damage.__name__} {file}" for file, damage, _ in DAMAGE]
)
def test_damaged_step_is_skipped_and_its_path_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str, damage: Callable[[Path], None], message: str
) -> None:
    two_steps(tmp_path)
    damage(tmp_path / "2" / file)
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert (restored.step, restored.host_state) == (1, {"data": 1})
    assert_same(restored.state, small_state(1))
    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert any(message in text and str(tmp_path / "2") in text for text in errors), errors


@pytest.mark.parametrize("damage", [flip_bit, Path.unlink], ids=["damaged", "missing"])
def test_a_step_is_restored_though_its_note_cannot_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    save(engine(tmp_path), 2, small_state(), note="for gpt-1")
    damage(tmp_path / "2" / layout.NOTE)
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert (restored.step, restored.note) == (2, None)
    assert_same(restored.state, small_state())
    assert str(tmp_path / "2" / layout.NOTE) in caplog.text


def test_damage_that_one_process_finds_sends_all_to_the_older_step(tmp_path: Path) -> None:
    for step in (1, 2):
        in_gang(2, lambda gang: save(engine(tmp_path, gang), step, small_state(step), {"data": gang.process_index}))  # noqa: B023
    flip_bit(tmp_path / "2" / "host_state" / "process_1.json")
    restored = in_gang(2, lambda gang: restore(tmp_path, small_state(), gang=gang))
    assert [(r.step, r.host_state) for r in restored if r] == [(1, {"data": 0}), (1, {"data": 1})]


def replaced_at_read(root: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Another attempt has replaced step 2, which then holds the state 5, when a chunk of ``step`` is first read."""
    other, lock = root.with_name("other"), threading.Lock()
    save(engine(other, attempt="job-9-x"), 2, small_state(5))

    def replaces(path: StoragePath, *rest: Any) -> None:
        with lock:
            if path.below(storage_path(root)).startswith(f"{step}/") and (other / "2").exists():
                shutil.rmtree(root / "2")
                (other / "2").rename(root / "2")
        read_checked(path, *rest)

    monkeypatch.setattr(stored_arrays, "read_checked", replaces)


def test_a_step_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        save(engine(root), step, small_state(step))
    replaced_at_read(root, monkeypatch, 2)
    for restored in in_gang(2, lambda gang: restore(root, small_state(), gang=gang)):
        assert restored is not None
        assert restored.step == 2
        assert_same(restored.state, small_state(5))
    assert not Layout(storage_path(root)).damage_mark(2).exists()


def test_a_step_that_replaces_a_damaged_one_is_not_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        save(engine(root), step, small_state(step))
    flip_bit(chunk_files(root, 2, "w")[0])
    replaced_at_read(root, monkeypatch, 1)
    restored = restore(root, small_state())
    assert restored is not None
    assert (restored.step, list(restored.passed_over)) == (1, [2])
    assert not Layout(storage_path(root)).damage_mark(2).exists()


def test_when_every_step_is_damaged_nothing_starts_from_zero(tmp_path: Path) -> None:
    two_steps(tmp_path)
    for step in (1, 2):
        flip_bit(chunk_files(tmp_path, step, "w")[0])
    with pytest.raises(CheckpointCorrupt) as error:
        restore(tmp_path, small_state())
    for step in (1, 2):
        assert str(tmp_path / str(step) / "default/w/0.0") in str(error.value)


def test_a_folder_without_anything_in_it_is_no_checkpoint_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two_steps(tmp_path)
    (tmp_path / "7").mkdir()
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert restored.step == 2
    assert f"{tmp_path / '7'} is empty" in caplog.text


@pytest.mark.parametrize("name", ["7/notes.txt", "7/default/weights.bin"])
def test_a_foreign_folder_named_like_a_step_is_never_restored_nor_ignored(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text("not ours")
    with pytest.raises(CheckpointCorrupt, match=re.escape(f"{tmp_path / '7'} is not a checkpoint")):
        restore(tmp_path, small_state())
    assert path.read_text() == "not ours"


def test_a_step_copied_to_another_name_is_refused(tmp_path: Path) -> None:
    two_steps(tmp_path)
    shutil.copytree(tmp_path / "2", tmp_path / "9")
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert restored.step == 2


def test_directory_without_checkpoints_is_logged_with_its_contents(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "README").write_text("")
    (tmp_path / "logs_5").mkdir()
    (tmp_path / "data").symlink_to(tmp_path)
    assert restore(tmp_path, small_state()) is None
    assert "no checkpoint to restore" in caplog.text
    assert "also has README, data, logs_5" in caplog.text


def test_missing_directory_has_no_checkpoint_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert restore(tmp_path / "nowhere", small_state()) is None
    assert f"there is no folder {tmp_path / 'nowhere'}" in caplog.text


def test_saving_a_step_that_was_found_damaged_replaces_it(tmp_path: Path) -> None:
    two_steps(tmp_path)
    flip_bit(chunk_files(tmp_path, 2, "w")[0])
    checkpointer = engine(tmp_path, attempt="job-1-b")
    restored = checkpointer.restore(small_state(), timeout_s=30)
    assert restored is not None
    save(checkpointer, 2, small_state(2))
    again = restore(tmp_path, small_state(), attempt="job-2-c")
    assert again is not None
    assert again.step == 2
    assert_same(again.state, small_state(2))
    checkpointer.close(30)  # until then, the sweeper may have a file there that shows the time
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]


def test_foreign_folder_at_a_step_is_moved_aside(tmp_path: Path) -> None:
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "notes.txt").write_text("not ours")
    save(engine(tmp_path), 2, small_state())
    assert (tmp_path / "2.gracepoint-aside.job-0-a.1" / "notes.txt").read_text() == "not ours"
    assert restore(tmp_path, small_state()) is not None


def test_a_file_in_the_place_of_a_step_is_named_and_kept_until_it_is_moved(tmp_path: Path) -> None:
    in_the_way = tmp_path / "2"
    checkpointer = engine(tmp_path)
    save(checkpointer, 1, small_state(1))
    in_the_way.write_text("not ours")
    told = rf"{in_the_way} is a file, and step 2 is to be a folder of that name.*move the file away"
    with pytest.raises(SaveFailed, match=told):
        save(checkpointer, 2, small_state(2))
    checkpointer.close(30)
    with pytest.raises(CheckpointRefused, match=told):
        restore(tmp_path, small_state())
    assert in_the_way.read_text() == "not ours"
    assert all_steps(tmp_path) == [1]
    in_the_way.rename(tmp_path / "notes")
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert_same((restored.step, restored.state), (2, small_state(2)))


def like(**changes: object) -> dict[str, object]:
    """Returns the form of ``small_state`` with other leaves."""
    return {"w": jnp.ones((4, 4)), "b": jnp.ones(8, jnp.bfloat16), "count": 0, **changes}


MISMATCHES = [
    (
        like(w=jax.ShapeDtypeStruct((4, 5), np.float32, sharding=sharding("x"))),
        "leaf 'w': expected float32[4, 5] sharded (x) over x=2, y=2, found float32[4, 4] sharded (x, y) over x=2, y=2",
    ),
    (like(w=jnp.ones((4, 4), jnp.int32)), "leaf 'w': expected int32[4, 4], found float32[4, 4] sharded (x, y)"),
    (like(b=jnp.ones(8, jnp.float16)), "leaf 'b': expected float16[8], found bfloat16[8] replicated over x=2, y=2"),
    (like(count=0.5), "leaf 'count': expected float64[], found int64[]"),
    (like(count="7"), "leaf 'count': expected a string, found int64[]"),
    (
        {"w": jnp.ones((4, 4)), "count": 0},
        "leaf 'b': expected nothing, found bfloat16[8] replicated over x=2, y=2",
    ),
    (like(w={"v": 1}), "leaf 'w.v': expected int64[], found nothing; leaf 'w': expected nothing, found float32[4, 4]"),
    (like(w=jnp.ones(4), count=0.5), "leaf 'count': expected float64[], found int64[]; leaf 'w': expected float32[4]"),
]


@pytest.mark.parametrize(("state", "message"), MISMATCHES, ids=[message for _, message in MISMATCHES])
def test_a_state_of_another_form_is_refused_with_path_expected_and_found(
    tmp_path: Path, state: object, message: str
) -> None:
    two_steps(tmp_path)
    with pytest.raises(CheckpointMismatch, match=re.escape(message)):
        restore(tmp_path, state)


def test_keys_of_another_kind_are_refused(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, {"key": jax.random.key(0)})
    with pytest.raises(CheckpointMismatch, match=r"expected key<rbg>\[\], found key<threefry2x32>\[\]"):
        restore(tmp_path, {"key": jax.random.key(0, impl="rbg")})
    with pytest.raises(CheckpointMismatch, match=r"expected uint32\[2\], found key<threefry2x32>\[\]"):
        restore(tmp_path, {"key": np.zeros(2, np.uint32)})


def test_read_failure_fails_all_processes_and_falls_back_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_steps(tmp_path)

    def forbidden(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(stored_arrays, "read_checked", forbidden)

    def run(gang: ProcessGroup) -> object:
        return restore(tmp_path, small_state(), gang=gang)

    in_gang(2, lambda gang: save(engine(tmp_path, gang), 3, small_state()))
    for outcome in outcomes_in_gang(2, run):
        assert isinstance(outcome, CheckpointError)
        assert not isinstance(outcome, CheckpointCorrupt)
        assert "step 3" in str(outcome)
        assert "Permission denied" in str(outcome)
