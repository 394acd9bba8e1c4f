"""Old steps go, and never the only good one."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from gracepoint.checkpoint import commit
from gracepoint.checkpoint.layout import Layout
from gracepoint.checkpoint.retention import to_delete
from tests.unit.checkpoint.support import chunk_files, engine, flip_bit, restore, save, small_state


def steps(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


@pytest.mark.parametrize(
    ("there", "newest_good", "keep_last", "deleted"),
    [
        pytest.param([1, 2, 3, 4], 4, 3, [1], id="more than kept"),
        pytest.param([1, 2], 2, 3, [], id="fewer than kept"),
        pytest.param([5, 1, 3], 5, 1, [3, 1], id="only the newest"),
        pytest.param([1, 2, 9], 2, 1, [1], id="a newer one, found damaged, is neither counted nor deleted"),
        pytest.param([9], 2, 1, [], id="nothing up to the good one"),
    ],
)
def test_the_newest_up_to_the_good_one_are_kept(
    there: list[int], newest_good: int, keep_last: int, deleted: list[int]
) -> None:
    assert to_delete(there, newest_good=newest_good, keep_last=keep_last) == deleted


def test_background_saves_keep_the_last_ones(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, keep_last=2)
    for step in range(5):
        checkpointer.save_in_background(step, small_state(), {})
    checkpointer.close(30)
    assert steps(tmp_path) == ["3", "4"]


def test_emergencies_delete_nothing_and_the_next_start_does(tmp_path: Path) -> None:
    for attempt in range(4):
        save(engine(tmp_path, attempt=f"job-{attempt}"), attempt, small_state())
    assert steps(tmp_path) == ["0", "1", "2", "3"]
    checkpointer = engine(tmp_path, attempt="job-9", keep_last=2)
    checkpointer.restore(small_state(), timeout_s=30)
    checkpointer.close(30)
    assert steps(tmp_path) == ["2", "3"]


def test_folders_that_are_not_ours_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "notes.txt").write_text("not ours")
    checkpointer = engine(tmp_path, keep_last=1)
    for step in (1, 2):
        checkpointer.save_in_background(step, small_state(), {})
    checkpointer.close(30)
    assert steps(tmp_path) == ["0", "2"]


def test_the_step_that_a_damaged_one_was_given_up_for_is_kept(tmp_path: Path) -> None:
    for step in (1, 5):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    flip_bit(chunk_files(tmp_path, 5, "w")[0])
    checkpointer = engine(tmp_path, attempt="job-9", keep_last=1)
    assert checkpointer.restore(small_state(), timeout_s=30) is not None
    checkpointer.save_in_background(2, small_state(), {})
    checkpointer.close(30)
    assert steps(tmp_path) == ["2", "5"]
    restored = restore(tmp_path, small_state(), attempt="job-10")
    assert restored is not None
    assert restored.step == 2


def test_what_became_trash_while_trash_was_deleted_is_gone_after_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked, real = threading.Event(), commit.empty_trash

    def delete_late(paths: Layout) -> None:
        trash = paths.trashed()  # looks now, and is done only when more has become trash
        assert blocked.wait(30)
        for folder in trash:
            shutil.rmtree(folder)

    monkeypatch.setattr(commit, "empty_trash", delete_late)
    checkpointer = engine(tmp_path, keep_last=1)
    for step in range(4):
        checkpointer.save_in_background(step, small_state(), {})
    checkpointer.wait_until_finished(30)
    monkeypatch.setattr(commit, "empty_trash", real)
    blocked.set()
    checkpointer.close(30)
    assert [p.name for p in tmp_path.iterdir()] == ["3"]
