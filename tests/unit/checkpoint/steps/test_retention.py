"""Old steps go, and never the only good one."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies

from gracepoint import checkpoint
from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.reading import stored_tree
from gracepoint.checkpoint.steps import listing, retention
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.storage.storage_path import Entry, StoragePath
from gracepoint.errors import SettingsError
from tests.unit.checkpoint.fakes.engine import chunk_files, engine, flip_bit, restore, save, small_state
from tests.unit.checkpoint.storage.fakes.flat import FlatPath, FlatStore


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
    ages_s = dict.fromkeys(there, 0.0)
    assert Retention(keep_last).to_delete(ages_s, newest_good=newest_good) == deleted


def test_multiples_and_young_steps_are_kept_next_to_the_newest() -> None:
    ages_s = {100: 900.0, 150: 800.0, 200: 700.0, 250: 99.0, 300: 50.0, 350: 0.0}
    assert Retention(1).to_delete(ages_s, newest_good=350) == [300, 250, 200, 150, 100]
    assert Retention(1, keep_every_steps=100).to_delete(ages_s, newest_good=350) == [250, 150]
    assert Retention(1, keep_every_steps=1).to_delete(ages_s, newest_good=350) == []
    assert Retention(1, keep_for_s=100).to_delete(ages_s, newest_good=350) == [200, 150, 100]
    assert Retention(1, keep_for_s=99).to_delete(ages_s, newest_good=350) == [250, 200, 150, 100]
    assert Retention(2, keep_every_steps=200, keep_for_s=60).to_delete(ages_s, newest_good=350) == [250, 150, 100]


def test_three_steps_are_kept_if_nothing_else_is_said() -> None:
    assert Retention() == Retention(keep_last=3, keep_every_steps=0, keep_for_s=0.0)


def test_steps_are_deleted_though_the_clock_is_behind_their_times() -> None:
    ages_s = dict.fromkeys([1, 2, 3, 4], -0.9)
    assert Retention(2).to_delete(ages_s, newest_good=4) == [2, 1]
    assert Retention(2, keep_every_steps=2).to_delete(ages_s, newest_good=4) == [1]
    assert Retention(2, keep_for_s=1).to_delete(ages_s, newest_good=4) == []


def test_damaged_step_does_not_count_as_kept_and_is_deleted_later() -> None:
    ages_s = dict.fromkeys([1, 3, 5, 6], 0.0)
    two = Retention(2, keep_every_steps=5)
    damaged = frozenset({5})
    assert two.to_delete(ages_s, newest_good=6, damaged=damaged) == [1]  # 6 and 3 are good, and 5 is between them
    ages_s[7] = 0.0
    assert two.to_delete(ages_s, newest_good=7, damaged=damaged) == [5, 3, 1]  # a multiple of 5, and worth nothing


@settings(derandomize=True, deadline=None)
@given(
    steps=strategies.dictionaries(strategies.integers(0, 50), strategies.floats(-2, 100), min_size=1),
    data=strategies.data(),
)
def test_newest_good_step_stays_with_as_many_as_requested(steps: dict[int, float], data: strategies.DataObject) -> None:
    newest_good = data.draw(strategies.sampled_from(sorted(steps)))
    damaged = frozenset(data.draw(strategies.sets(strategies.sampled_from(sorted(steps))))) - {newest_good}
    retention = Retention(
        data.draw(strategies.integers(1, 4)),
        data.draw(strategies.integers(0, 10)),
        data.draw(strategies.floats(0, 100)),
    )
    deleted = retention.to_delete(steps, newest_good=newest_good, damaged=damaged)
    good = {step for step in steps if step <= newest_good and step not in damaged}
    assert newest_good not in deleted
    assert len(good - set(deleted)) >= min(len(good), retention.keep_last)
    assert all(step < newest_good for step in deleted)


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_every_steps": -1},
        {"keep_for_s": -1.0},
        {"keep_for_s": float("nan")},
        {"keep_for_s": float("inf")},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        Retention(**wrong)


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


def test_a_damaged_step_counts_for_nothing_in_later_attempts_either(tmp_path: Path) -> None:
    for step in (1, 5):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    flip_bit(chunk_files(tmp_path, 5, "w")[0])
    assert restore(tmp_path, small_state(), attempt="job-6") is not None  # goes back to 1
    checkpointer = engine(tmp_path, attempt="job-7", keep_last=2)
    checkpointer.save_in_background(6, small_state(), {})
    checkpointer.wait_until_finished()
    assert steps(tmp_path) == ["1", "5", "6"]  # 5 would have driven 1 out
    checkpointer.save_in_background(7, small_state(), {})
    checkpointer.close(30)
    assert steps(tmp_path) == ["6", "7"]


def test_a_step_that_can_be_restored_after_all_counts_again(tmp_path: Path) -> None:
    for step in (1, 5):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    chunk = chunk_files(tmp_path, 5, "w")[0]
    flip_bit(chunk)
    assert restore(tmp_path, small_state(), attempt="job-6") is not None
    assert Layout(storage_path(tmp_path)).damage_mark(5).read_bytes().endswith(b"its contents do not fit its checksum")
    flip_bit(chunk)  # a disk that was away is back
    restored = restore(tmp_path, small_state(), attempt="job-7")
    assert restored is not None
    assert restored.step == 5
    assert not Layout(storage_path(tmp_path)).damage_mark(5).exists()


def test_a_step_that_somebody_reads_is_not_deleted_under_them(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, keep_last=1)
    checkpointer.save_in_background(1, small_state(), {})
    checkpointer.executor.wait_until_finished(30)
    with retention.reading(Layout(storage_path(tmp_path)), 1):
        checkpointer.save_in_background(2, small_state(), {})
        checkpointer.wait_until_finished()
        assert (tmp_path / "1").is_dir()
    checkpointer.save_in_background(3, small_state(), {})
    checkpointer.close(30)
    assert steps(tmp_path) == ["3"]


def flat() -> Layout:
    """A folder in a store that cannot rename, with a step in it."""
    return Layout(FlatPath(FlatStore(), "run"))


def test_mark_of_a_reader_is_gone_though_it_was_written_late() -> None:
    paths, deleted = flat(), threading.Event()
    store = paths.root.store
    assert isinstance(store, FlatStore)
    writers: list[threading.Thread] = []

    def before(operation: str, key: str) -> None:
        if operation == "put":
            writers.append(threading.current_thread())
            deleted.wait(0.2)  # as long as it takes who does not wait for this thread
        elif operation.startswith("delete"):
            deleted.set()

    store.before = before
    with retention.reading(paths, 1):
        pass
    for writer in writers:
        writer.join(30)
    assert [writer.daemon for writer in writers] == [True]
    assert store.objects == {}


@pytest.mark.parametrize("starts", [True, False], ids=["in a thread", "as no thread can be started"])
def test_step_in_a_store_without_renames_is_marked(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    def limited(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    paths = flat()
    store, marked = paths.root.store, threading.Event()
    assert isinstance(store, FlatStore)
    store.after = lambda operation, key: marked.set() if operation == "put" else None
    if not starts:
        monkeypatch.setattr(threading.Thread, "start", limited)
    with retention.reading(paths, 1):
        assert marked.wait(30)
    assert store.objects == {}


def marks_while_reading(root: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> list[list[StoragePath]]:
    """The marks on step 1 at each look of ``module`` into a checkpoint."""
    marks: list[list[StoragePath]] = []
    real = stored_tree.open_tree

    def looked_at(*arguments: Any, **keywords: Any) -> Any:
        marks.append(Layout(storage_path(root)).reading_marks(1))
        return real(*arguments, **keywords)

    monkeypatch.setattr(f"gracepoint.checkpoint.{module}.open_tree", looked_at)
    return marks


def test_a_restore_marks_what_it_reads_and_nothing_is_left_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(engine(tmp_path), 1, small_state())
    marks = marks_while_reading(tmp_path, monkeypatch, "restoring.restore_step")
    assert restore(tmp_path, small_state()) is not None
    assert [len(found) for found in marks] == [1]
    assert Layout(storage_path(tmp_path)).hidden() == []


@pytest.mark.parametrize("path", ["1", "1/default"])
def test_a_step_that_is_restored_by_its_path_is_marked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    save(engine(tmp_path), 1, small_state())
    marks = marks_while_reading(tmp_path, monkeypatch, "restoring.restore_tree")
    checkpoint.restore(tmp_path / path, small_state())
    assert [len(found) for found in marks] == [1]
    assert Layout(storage_path(tmp_path)).hidden() == []


def test_step_deleted_during_listing_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    real = records.manifest_fields

    def gone(folder: StoragePath) -> Any:
        if folder.name == "1" and folder.exists():
            shutil.rmtree(folder)
        return real(folder)

    monkeypatch.setattr(records, "manifest_fields", gone)
    assert checkpoint.all_steps(tmp_path) == [2]


def test_step_deleted_during_restore_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(engine(tmp_path), 1, small_state())
    monkeypatch.setattr(records, "manifest_fields", lambda folder: shutil.rmtree(folder))
    assert restore(tmp_path, small_state()) is None  # nothing is there, and nothing is damaged


def test_a_mark_of_a_reader_that_died_is_not_obeyed_for_ever(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, keep_last=1)
    checkpointer.save_in_background(1, small_state(), {})
    checkpointer.executor.wait_until_finished(30)
    mark = Path(Layout(storage_path(tmp_path)).reading_mark(1))
    mark.touch()
    old_s = mark.stat().st_mtime - retention.READING_S - 1
    os.utime(mark, (old_s, old_s))
    checkpointer.save_in_background(2, small_state(), {})
    checkpointer.close(30)
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(("age_s", "left"), [(-0.25, [2, 1]), (0.0, [2])], ids=["before", "at its end"])
def test_a_mark_of_a_reader_counts_for_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, left: list[int]
) -> None:
    for step in (1, 2):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    paths = Layout(storage_path(tmp_path))
    mark = Path(paths.reading_mark(1))
    mark.touch()
    os.utime(mark, (1000, 1000))
    monkeypatch.setattr(PosixPath, "now_s", lambda path: 1000 + retention.READING_S + age_s)
    retention.apply(paths, Retention(1), newest_good=2, attempt="job-9-a", ordinal=9)
    assert paths.steps() == left


def test_steps_are_kept_by_number_and_age_on_the_disk_too(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, keep_last=1, keep_every_steps=2, keep_for_s=1000)
    for step in range(1, 5):
        checkpointer.save_in_background(step, small_state(), {})
        checkpointer.wait_until_finished()
    assert steps(tmp_path) == ["1", "2", "3", "4"]
    for step in (1, 2):
        mark = tmp_path / str(step) / layout.COMMIT_SUCCESS
        old_s = mark.stat().st_mtime - 1001
        os.utime(mark, (old_s, old_s))
    checkpointer.close(30)
    later = engine(tmp_path, attempt="job-1", keep_last=1, keep_every_steps=2, keep_for_s=1000)
    later.save_in_background(5, small_state(), {})
    later.close(30)
    assert steps(tmp_path) == ["2", "3", "4", "5"]


def test_older_steps_that_are_kept_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    real = listing.ours

    def ours(folder: StoragePath, step: int) -> str | None:
        looked.append(step)
        return real(folder, step)

    checkpointer = engine(tmp_path, keep_last=2, keep_every_steps=1)
    for step in range(40):
        save(checkpointer, step, small_state())
    monkeypatch.setattr(listing, "ours", ours)
    for step in (40, 41):
        looked.clear()
        checkpointer.save_in_background(step, small_state(), {})
        checkpointer.wait_until_finished()
    assert sorted(looked) == [39, 40, 41]  # those that count as the newest
    checkpointer.close(30)
    assert len(steps(tmp_path)) == 42


@pytest.mark.parametrize("there", ["another checkpoint", "a stranger's folder", "nothing"])
def test_an_older_step_that_was_replaced_meanwhile_is_looked_at_before_deletion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    paths, known = Layout(storage_path(tmp_path)), dict[int, retention.StepLook]()

    def apply(now_s: float) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(PosixPath, "now_s", lambda path: now_s)
            rule = Retention(1, keep_for_s=1000)
            retention.apply(paths, rule, newest_good=2, attempt="job-9-a", ordinal=9, looks_before=known)

    for step in (1, 2):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    committed_s = (tmp_path / "1" / layout.COMMIT_SUCCESS).stat().st_mtime
    apply(committed_s)
    assert list(known) == [1]
    shutil.rmtree(tmp_path / "1")
    if there == "another checkpoint":
        save(engine(tmp_path, attempt="job-3"), 1, small_state())
    elif there == "a stranger's folder":
        (tmp_path / "1").mkdir()
    left = ["2"] if there == "nothing" else ["1", "2"]
    for _ in range(2):
        apply(committed_s + 1001 if there != "another checkpoint" else committed_s)
        assert steps(tmp_path) == left
    assert (1 in known) == (there == "another checkpoint")


def test_what_became_trash_while_trash_was_deleted_is_gone_after_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, blocked, real = threading.Event(), threading.Event(), RenameCommit.empty_trash

    def delete_late(commit: RenameCommit) -> None:
        trash = Layout(storage_path(tmp_path)).trashed()  # looks now, and is done only when more has become trash
        looked.set()
        assert blocked.wait(30)
        for folder in trash:
            shutil.rmtree(folder)

    monkeypatch.setattr(RenameCommit, "empty_trash", delete_late)
    checkpointer = engine(tmp_path, keep_last=1)
    checkpointer.save_in_background(0, small_state(), {})
    checkpointer.wait_until_finished()
    assert looked.wait(30)
    for step in range(1, 4):
        checkpointer.save_in_background(step, small_state(), {})
    checkpointer.wait_until_finished()  # steps become trash meanwhile
    assert Layout(storage_path(tmp_path)).steps() == [3]
    monkeypatch.setattr(RenameCommit, "empty_trash", real)
    blocked.set()
    checkpointer.close(30)
    assert [p.name for p in tmp_path.iterdir()] == ["3"]


def test_save_succeeds_when_no_thread_can_delete_trash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if "deletion" in thread.name:
            raise RuntimeError("can't create new thread at interpreter shutdown")
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    checkpointer = engine(tmp_path, keep_last=1)
    for step in (1, 2):
        checkpointer.save_in_background(step, small_state(), {})
    checkpointer.close(30)
    assert (Layout(storage_path(tmp_path)).steps(), len(Layout(storage_path(tmp_path)).trashed())) == ([2], 1)
    monkeypatch.undo()
    restore(tmp_path, small_state())
    assert steps(tmp_path) == ["2"]


def test_step_deleted_by_another_process_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = engine(tmp_path)
    for step in (1, 2, 3):
        save(checkpointer, step, small_state())
    real = PosixPath.entry

    def entry(path: PosixPath) -> Entry | None:  # between the list of steps and their ages
        shutil.rmtree(tmp_path / "2", ignore_errors=True)
        return real(path)

    monkeypatch.setattr(PosixPath, "entry", entry)
    retention.apply(Layout(storage_path(tmp_path)), Retention(2), newest_good=3, attempt="job-0-a", ordinal=9)
    assert steps(tmp_path) == ["1", "3"]


def test_step_that_vanishes_after_its_look_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state())
    real = listing.ours

    def ours(folder: StoragePath, step: int) -> str | None:
        found = real(folder, step)
        if step == 2:
            shutil.rmtree(tmp_path / "2")  # between this look and the next
        return found

    monkeypatch.setattr(listing, "ours", ours)
    retention.apply(Layout(storage_path(tmp_path)), Retention(2), newest_good=3, attempt="job-9-a", ordinal=9)
    assert steps(tmp_path) == ["1", "3"]
