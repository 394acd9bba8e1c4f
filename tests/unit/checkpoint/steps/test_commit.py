"""Durable saves become visible whoever is left, incomplete ones never do."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import latest_step
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.format.layout import Layout, Temporary
from gracepoint.checkpoint.format.records import DoneRecord, done_records
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.steps import listing as catalog
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.storage import storage_path as read_many
from gracepoint.checkpoint.storage.checks import check_size
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointExists, CheckpointTooNew, SaveFailed
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import (
    assert_same,
    engine,
    in_gang,
    outcomes_in_gang,
    restore,
    save,
    small_state,
)
from tests.unit.checkpoint.fakes.failures import DyingGang, leave_uncommitted
from tests.unit.checkpoint.fakes.moved_clock import MovedClock


@contextlib.contextmanager
def engine_closed(checkpointer: StepCheckpointer) -> Iterator[StepCheckpointer]:
    try:
        yield checkpointer
    finally:
        checkpointer.close(30)


def set_age(folder: Path, age_s: float) -> None:
    """Makes all of ``folder`` look unchanged for ``age_s``."""
    now_s = storage_path(folder.parent).now_s()
    for directory, _, names in os.walk(folder):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            os.utime(path, (now_s - age_s, now_s - age_s))


def in_two(root: Path) -> Any:
    return in_gang(2, lambda gang: restore(root, small_state(), gang=gang))


def test_save_whose_processes_died_before_commit_is_recovered(tmp_path: Path) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    restored = in_two(tmp_path)
    assert [(r.step, r.host_state) for r in restored] == [(4, {"data": 0}), (4, {"data": 1})]
    assert_same(restored[0].state, small_state(4))
    assert not folder.exists()


@pytest.mark.parametrize("finished", [(0,), (1,)])
def test_a_save_that_one_process_did_not_finish_stays_invisible(tmp_path: Path, finished: tuple[int, ...]) -> None:
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 1, small_state(1), {"data": 5}))
    folder = leave_uncommitted(tmp_path, 4, finished)
    set_age(folder, RenameCommit.quiet_s + 1)
    assert [r.step for r in in_two(tmp_path)] == [1, 1]
    assert folder.exists()
    assert not (tmp_path / "4").exists()


def test_an_incomplete_first_save_is_no_checkpoint_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0,))
    set_age(folder, RenameCommit.quiet_s + 1)
    assert restore(tmp_path, small_state()) is None
    assert f"{folder} is incomplete" in caplog.text


def test_a_durable_save_with_a_file_that_was_cut_is_not_salvaged(tmp_path: Path) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    (folder / "default/w/0.0").write_bytes(b"")
    remarks = commit.salvage(Layout(storage_path(tmp_path)))
    assert "w/0.0 has 0 bytes, expected 16" in remarks[0]
    assert not (tmp_path / "4").exists()


@pytest.mark.parametrize("way", ["salvage", "finish"])
def test_a_save_that_another_process_commits_meanwhile_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1))
    paths = Layout(storage_path(tmp_path))
    (left,) = paths.temporaries()
    real = check_size

    def after_the_other(path: StoragePath, size_bytes: int) -> None:
        monkeypatch.setattr(commit, "check_size", real)
        assert commit.finish(paths, left)
        real(path, size_bytes)

    monkeypatch.setattr(commit, "check_size", after_the_other)
    if way == "salvage":
        assert commit.salvage(paths) == []
    else:
        assert commit.finish(paths, left)
    assert latest_step(tmp_path) == 4


def test_a_damaged_done_record_is_as_none(tmp_path: Path) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    (folder / "done.process_1.json").write_text("{}")
    assert "done.process_1.json cannot be read" in commit.salvage(Layout(storage_path(tmp_path)))[0]
    assert not (tmp_path / "4").exists()


def test_salvage_that_may_only_read_leaves_the_save_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))

    def read_only(*_: object, **__: object) -> bool:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(RenameCommit, "finalize", read_only)
    assert commit.salvage(Layout(storage_path(tmp_path))) == [
        f"{folder} is not salvaged: [Errno {errno.EROFS}] Read-only file system"
    ]


def test_any_number_of_salvagers_may_race(tmp_path: Path) -> None:
    for step in range(10):
        leave_uncommitted(tmp_path, step, (0, 1))
    start, errors = threading.Barrier(4), []

    def run() -> None:
        start.wait(60)
        try:
            commit.salvage(Layout(storage_path(tmp_path)))
        except BaseException as error:  # noqa: BLE001 - shown by the assertion
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(str(step) for step in range(10))
    assert [r.step for r in in_two(tmp_path)] == [9, 9]


def test_salvage_never_replaces_a_step_that_was_committed_since_the_save(tmp_path: Path) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    in_gang(2, lambda gang: save(engine(tmp_path, gang, attempt="other"), 4, small_state(1)))
    remarks = commit.salvage(Layout(storage_path(tmp_path)))
    assert f"{folder} is left" in remarks[0]
    assert folder.exists()
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(1))


def test_durable_save_replaces_the_step_that_it_found(tmp_path: Path) -> None:
    in_gang(2, lambda gang: save(engine(tmp_path, gang, attempt="old"), 4, small_state(1)))
    leave_uncommitted(tmp_path, 4, (0, 1))
    restored = in_two(tmp_path)
    assert_same(restored[0].state, small_state(4))
    assert [path.name for path in tmp_path.iterdir()] == ["4"]


def fail_to_commit(path: Path, value: float) -> Path:
    """Saves to ``path`` with ``force``; the commit fails when all is durable. Returns the folder that is left."""

    def fails(*arguments: Any, **options: Any) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RenameCommit, "finalize", fails)
        with pytest.raises(SaveFailed, match="is durable and not committed"):
            checkpoint.save(path, small_state(value), force=True)
    return max(path.parent.glob(f"{path.name}.gracepoint-tmp.*"), key=lambda left: left.stat().st_mtime_ns)


def test_a_forced_save_whose_commit_failed_is_what_the_next_restore_gives(tmp_path: Path) -> None:
    path = tmp_path / "best"
    checkpoint.save(path, small_state(1))
    fail_to_commit(path, 2)
    assert_same(checkpoint.restore(path, small_state()), small_state(2))
    assert not list(tmp_path.glob("*.gracepoint-tmp.*"))


def test_failed_forced_save_never_replaces_a_later_one(tmp_path: Path) -> None:
    path = tmp_path / "best"
    checkpoint.save(path, small_state(1))
    left = fail_to_commit(path, 2)
    checkpoint.save(path, small_state(3), force=True)
    assert_same(checkpoint.restore(path, small_state()), small_state(3))
    assert left.is_dir()


def test_of_two_forced_saves_whose_commits_failed_the_last_one_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "best"
    checkpoint.save(path, small_state(1))
    lefts = []
    for value in (2, 3):
        with pytest.MonkeyPatch.context() as patch:
            # Of another start each; the first one's name comes last.
            patch.setattr(
                "gracepoint.checkpoint.groups.secrets.token_hex",
                lambda _, value=value: f"{9 - value}" * 8,
            )
            lefts.append(fail_to_commit(path, value))
    assert_same(checkpoint.restore(path, small_state()), small_state(3))
    assert [left.is_dir() for left in lefts] == [True, False]


def test_foreign_files_give_way_to_a_forced_save_and_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "best"
    checkpoint.save(path, small_state(1))
    (path / layout.MANIFEST).unlink()  # as Orbax's are
    fail_to_commit(path, 2)
    assert_same(checkpoint.restore(path, small_state()), small_state(2))
    (aside,) = tmp_path.glob("best.gracepoint-aside.*")
    assert (aside / "_METADATA").is_file()


def test_a_done_record_that_does_not_say_what_it_replaces_replaces_nothing(tmp_path: Path) -> None:
    path = tmp_path / "best"
    checkpoint.save(path, small_state(1))
    record = fail_to_commit(path, 2) / layout.done_record(0)
    assert done_records(storage_path(record.parent))
    body = re.sub(rb', "replaces": "[^"]+"', b"", record.read_bytes()).rpartition(b', "checksum": ')[0]
    record.write_bytes(body + b', "checksum": %d}' % zlib.crc32(body))
    found = done_records(storage_path(record.parent))
    assert found is not None
    assert found[0].replaces is None
    assert_same(checkpoint.restore(path, small_state()), small_state(1))


def is_marked(step: Path) -> None:
    (step / layout.DAMAGE_MARK).write_text("a restore went back from it")


def has_a_cut_manifest(step: Path) -> None:
    manifest = step / layout.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [is_marked, has_a_cut_manifest])
def test_durable_save_replaces_a_damaged_step(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1), attempt="job-1-b")  # when nothing was there that it could replace
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 4, small_state(9), {"data": 5}))
    damage(tmp_path / "4")
    restored = in_two(tmp_path)
    assert [(r.step, r.host_state) for r in restored] == [(4, {"data": 0}), (4, {"data": 1})]
    assert_same(restored[0].state, small_state(4))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["4"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_disk_failure_during_recovery_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1))

    def fails(*arguments: Any, **options: Any) -> bool:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(RenameCommit, "finalize", fails)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        commit.salvage(Layout(storage_path(tmp_path)))


def test_step_committed_while_a_damaged_one_moves_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = leave_uncommitted(tmp_path, 4, (0, 1), attempt="job-1-b")
    save(engine(tmp_path), 4, small_state(2))
    is_marked(tmp_path / "4")
    real = RenameCommit.discard

    def discard(way: RenameCommit, folder: StoragePath, trash: StoragePath) -> None:
        monkeypatch.setattr(RenameCommit, "discard", real)
        real(way, folder, trash)
        commit.of(Layout(storage_path(tmp_path))).empty_trash()  # as every start does
        save(engine(tmp_path, attempt="other"), 4, small_state(9))

    monkeypatch.setattr(RenameCommit, "discard", discard)
    (remark,) = commit.salvage(Layout(storage_path(tmp_path)))
    assert f"{left} is left" in remark
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(9))


def test_a_step_that_gets_its_name_back_has_it_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(engine(tmp_path), 4, small_state())
    (tmp_path / "4").rename(tmp_path / "4.gracepoint-aside.job-0-a.1")
    synced: list[tuple[StoragePath, bool]] = []
    monkeypatch.setattr(PosixPath, "sync", lambda path: synced.append((path, (tmp_path / "4").is_dir())))
    assert commit.salvage(Layout(storage_path(tmp_path))) == []
    assert synced == [(storage_path(tmp_path), True)]


@pytest.mark.parametrize("what", ["another process does so too", "another step has it by now", "the disk fails"])
def test_a_step_that_cannot_be_given_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    save(engine(tmp_path), 4, small_state())
    (tmp_path / "4").rename(tmp_path / "4.gracepoint-aside.job-0-a.1")
    real = records.is_damaged

    def fails(old: Path, new: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def meanwhile(folder: StoragePath) -> bool:
        found = real(folder)
        if what == "the disk fails":
            monkeypatch.setattr(os, "rename", fails)
        elif what == "another process does so too":
            Path(folder).rename(tmp_path / "4")
        else:
            save(engine(tmp_path, attempt="other"), 4, small_state())
        return found

    monkeypatch.setattr(records, "is_damaged", meanwhile)
    if what == "the disk fails":
        with pytest.raises(OSError, match="Input/output error"):
            commit.salvage(Layout(storage_path(tmp_path)))
    else:
        assert commit.salvage(Layout(storage_path(tmp_path))) == []
        assert (tmp_path / "4" / layout.MANIFEST).is_file()
        assert "again" not in caplog.text, "this process has done nothing"


def make_newer(path: Path) -> bytes:
    """Makes a manifest or done-record one of a format that comes after this version's; returns its contents."""
    body = re.sub(rb"(gracepoint\.\w+)/1", rb"\1/99", path.read_bytes(), count=1).rpartition(b', "checksum": ')[0]
    path.write_bytes(body + b', "checksum": %d}' % zlib.crc32(body))
    return path.read_bytes()


def test_step_of_a_newer_version_is_named_and_left_alone(tmp_path: Path) -> None:
    save(engine(tmp_path), 3, small_state(3))
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 4, small_state(9)))
    left = leave_uncommitted(tmp_path, 4, (0, 1), attempt="job-1-b")
    manifest = tmp_path / "4" / layout.MANIFEST
    contents = make_newer(manifest)
    for outcome in outcomes_in_gang(2, lambda gang: restore(tmp_path, small_state(), gang=gang, attempt="job-2-c")):
        assert isinstance(outcome, CheckpointTooNew)
        assert f"{manifest} was written by a newer Gracepoint: found format 'gracepoint.checkpoint/99'" in str(outcome)
    with pytest.raises(SaveFailed, match="already exists .* was written by a newer Gracepoint"):
        save(engine(tmp_path, attempt="job-2-c"), 4, small_state(4))
    assert manifest.read_bytes() == contents
    assert not (tmp_path / "4" / layout.DAMAGE_MARK).exists()
    assert left.is_dir()
    assert latest_step(tmp_path) == 4  # so that a session that does not restore is warned


def test_step_of_a_newer_version_is_never_deleted(tmp_path: Path) -> None:
    checkpointer = engine(tmp_path, keep_last=1)
    for step in (1, 2):
        save(checkpointer, step, small_state(step))
    make_newer(tmp_path / "1" / layout.MANIFEST)
    restored = engine(tmp_path, attempt="job-1-b", keep_last=1).restore(small_state(), timeout_s=30)
    assert restored is not None
    assert restored.step == 2
    make_newer(tmp_path / "2" / layout.MANIFEST)
    with engine_closed(engine(tmp_path, attempt="job-2-c", keep_last=1)) as again:
        save(again, 3, small_state(3))
        found = again.restore(small_state(), timeout_s=30, step=3)
        assert found is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


def test_force_does_not_replace_a_checkpoint_of_a_newer_version(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "best", small_state(1))
    contents = make_newer(tmp_path / "best" / layout.MANIFEST)
    with pytest.raises(CheckpointTooNew, match="was written by a newer Gracepoint"):
        checkpoint.restore(tmp_path / "best")
    with pytest.raises(CheckpointExists, match="was written by a newer Gracepoint"):
        checkpoint.save(tmp_path / "best", small_state(2), force=True)
    assert (tmp_path / "best" / layout.MANIFEST).read_bytes() == contents


def test_durable_save_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    for process in range(2):
        make_newer(folder / layout.done_record(process))
    set_age(folder, 3700)
    (remark,) = commit.salvage(Layout(storage_path(tmp_path)))
    assert "is not salvaged" in remark
    assert "newer Gracepoint" in remark
    assert restore(tmp_path, small_state(), attempt="job-1-b") is None
    assert folder.is_dir()


def test_what_another_salvager_committed_meanwhile_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1), attempt="job-1-b")
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 4, small_state(9), {"data": 5}))
    looks = iter([True, False])  # damaged at first, and by then the other's
    monkeypatch.setattr(records, "is_damaged", lambda folder: next(looks, False))
    remarks = commit.salvage(Layout(storage_path(tmp_path)))
    assert "there is a folder for step 4 already" in remarks[0]
    assert (tmp_path / "4" / layout.MANIFEST).is_file(), "at once, and not at the next start"
    assert_same(in_two(tmp_path)[0].state, small_state(9))


@pytest.mark.parametrize("died", ["before it looked again", "and another commits meanwhile"])
def test_good_step_moved_by_a_dead_process_gets_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, died: str
) -> None:
    """It was good already when it was moved: another salvager had been there first."""
    leave_uncommitted(tmp_path, 4, (0, 1), attempt="job-1-b")
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 4, small_state(9), {"data": 5}))
    real, looks = records.is_damaged, iter([True])

    def dying(folder: Path) -> bool:
        if next(looks, False):
            return True
        if died == "before it looked again":
            raise SystemExit("killed")
        (tmp_path / "4").mkdir(exist_ok=True)
        (tmp_path / "4" / "theirs").touch()
        return False

    monkeypatch.setattr(records, "is_damaged", dying)
    if died == "before it looked again":
        with pytest.raises(SystemExit):
            commit.salvage(Layout(storage_path(tmp_path)))
        assert not (tmp_path / "4").exists()
    else:
        (remark,) = commit.salvage(Layout(storage_path(tmp_path)))
        assert "there is a folder for step 4 already" in remark
        shutil.rmtree(tmp_path / "4")
    monkeypatch.setattr(records, "is_damaged", real)
    assert_same(in_two(tmp_path)[0].state, small_state(9))


def test_a_foreign_folder_that_was_moved_aside_stays_there(tmp_path: Path) -> None:
    aside = tmp_path / "4.gracepoint-aside.job-0-a.1"
    aside.mkdir()
    (aside / "theirs").touch()
    assert commit.salvage(Layout(storage_path(tmp_path))) == []
    assert (aside / "theirs").exists()


def temporary_of(root: Path) -> layout.Temporary:
    """The one save that is not committed."""
    (found,) = Layout(storage_path(root)).temporaries()
    return found


def test_save_is_committed_only_when_all_have_finished(tmp_path: Path) -> None:
    leave_uncommitted(tmp_path, 4, (0,))
    paths, temporary = Layout(storage_path(tmp_path)), temporary_of(tmp_path)
    assert not commit.of(paths).finalize(temporary, replace=False)
    leave_uncommitted(tmp_path, 4, (1,))
    assert commit.of(paths).finalize(temporary, replace=False)
    assert commit.of(paths).finalize(temporary, replace=False), "another did"
    assert commit.is_durable(paths, temporary)


def test_a_committed_step_has_its_name_durably(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1))
    synced: list[tuple[StoragePath, bool]] = []
    monkeypatch.setattr(PosixPath, "sync", lambda path: synced.append((path, (tmp_path / "4").is_dir())))
    assert commit.of(Layout(storage_path(tmp_path))).finalize(temporary_of(tmp_path), replace=False)
    assert synced == [(storage_path(tmp_path), True)]


@pytest.mark.parametrize(("ours", "becomes"), [(True, "trash"), (False, "aside")], ids=["ours", "foreign"])
def test_what_a_save_replaces_becomes_trash_if_it_is_ours(tmp_path: Path, ours: bool, becomes: str) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1))
    temporary = temporary_of(tmp_path)
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / (layout.MANIFEST if ours else "theirs")).touch()
    assert commit.of(Layout(storage_path(tmp_path))).finalize(temporary, replace=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", f"4.gracepoint-{becomes}.job-0-a.1"]


def test_what_becomes_trash_does_so_durably_whoever_did_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, trash = tmp_path / "4", tmp_path / "4.gracepoint-trash.job-0-a.1"
    folder.mkdir()
    synced: list[tuple[StoragePath, bool]] = []
    monkeypatch.setattr(PosixPath, "sync", lambda path: synced.append((path, trash.is_dir())))
    for _ in range(2):
        commit.of(Layout(storage_path(tmp_path))).discard(storage_path(folder), storage_path(trash))
    assert synced == [(storage_path(tmp_path), True)] * 2


def test_step_names_a_handler_per_item_and_a_path_only_one(tmp_path: Path) -> None:
    save(engine(tmp_path), 4, small_state())
    checkpoint.save(tmp_path / "best", small_state())
    step, alone = (json.loads((tmp_path / name / layout.STEP_METADATA).read_text()) for name in ("4", "best"))
    assert {item: handler.rpartition(".")[2] for item, handler in step["item_handlers"].items()} == {
        "default": "StandardCheckpointHandler",
        "host_state": "JsonCheckpointHandler",
    }
    assert alone["item_handlers"] == step["item_handlers"]["default"]
    assert all((tmp_path / name / layout.COMMIT_SUCCESS).is_file() for name in ("4", "best"))


def test_replacing_save_needs_nothing_to_replace_and_not_itself(tmp_path: Path) -> None:
    left = leave_uncommitted(tmp_path, 4, (0, 1))
    paths, temporary = Layout(storage_path(tmp_path)), temporary_of(tmp_path)
    assert commit.of(paths).finalize(temporary, replace=True)
    committed = (tmp_path / "4").stat().st_ino
    shutil.copytree(tmp_path / "4", left)  # as if it had been committed while this process was at it
    assert commit.of(paths).finalize(temporary, replace=True)
    assert (tmp_path / "4").stat().st_ino == committed
    assert paths.trashed() == []


def test_contents_of_a_step_are_distinguished_from_nothing_and_foreign_files(tmp_path: Path) -> None:
    standing = commit.of(Layout(storage_path(tmp_path))).standing
    assert standing(storage_path(tmp_path / "4")) is None
    (tmp_path / "4").mkdir()
    assert standing(storage_path(tmp_path / "4")) == ""
    save(engine(tmp_path), 5, small_state())
    assert standing(storage_path(tmp_path / "5")) == "job-0-a.1"
    has_a_cut_manifest(tmp_path / "5")
    assert standing(storage_path(tmp_path / "5")) == ""
    save(engine(tmp_path), 6, small_state())
    make_newer(tmp_path / "6" / layout.MANIFEST)
    assert standing(storage_path(tmp_path / "6")) is None


@pytest.mark.parametrize("by", ["one who commits it", "one who gives it up"])
def test_a_rename_by_another_process_at_the_last_moment_decides_how_a_save_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    leave_uncommitted(tmp_path, 4, (0, 1))
    paths, temporary = Layout(storage_path(tmp_path)), temporary_of(tmp_path)
    put = PosixPath.put

    def meanwhile(path: PosixPath, data: bytes) -> None:
        put(path, data)
        if path.name == layout.COMMIT_SUCCESS:
            Path(path.parent).rename(tmp_path / ("4" if by == "one who commits it" else "4.gracepoint-trash.job-0-a.1"))

    monkeypatch.setattr(PosixPath, "put", meanwhile)
    if by == "one who commits it":
        assert commit.of(paths).finalize(temporary, replace=False)
    else:
        with pytest.raises(FileNotFoundError):
            commit.of(paths).finalize(temporary, replace=False)


def test_trash_that_another_process_deletes_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "trashed", lambda paths: [storage_path(tmp_path / "4.gracepoint-trash.job-0-a.1")])
    commit.of(Layout(storage_path(tmp_path))).empty_trash()


def give_up_when_durable(root: Path, gang: ProcessGroup, died: threading.Event) -> Any:
    """Saves step 4. When this process's part is durable and the peer has died, the deadline has passed."""
    clock = MovedClock()

    def on_stage(stage: str) -> None:
        if stage == "durable":
            assert died.wait(30)
            clock.ahead_s = 1000.0

    deadline = Deadline.after(30.0, clock)
    return save(engine(root, gang, clock=clock), 4, small_state(4), deadline=deadline, on_stage=on_stage)


def test_the_survivor_commits_when_its_peer_died_after_its_done_record(tmp_path: Path) -> None:
    died = threading.Event()

    def run(gang: ProcessGroup) -> Any:
        if gang.process_index == 1:
            try:
                return save(engine(tmp_path, DyingGang(1)), 4, small_state(4))
            finally:
                died.set()
        return give_up_when_durable(tmp_path, gang, died)

    survivor, dead = outcomes_in_gang(2, run)
    assert isinstance(dead, SystemExit)
    assert not isinstance(survivor, BaseException), survivor
    assert restore(tmp_path, small_state()) is not None


def test_survivor_fails_when_its_peer_died_before_its_done_record(tmp_path: Path) -> None:
    died = threading.Event()
    died.set()

    def run(gang: ProcessGroup) -> Any:
        return give_up_when_durable(tmp_path, gang, died) if gang.process_index == 0 else None

    survivor, _ = outcomes_in_gang(2, run)
    assert isinstance(survivor, SaveFailed)
    assert "process 1" in str(survivor)
    assert not (tmp_path / "4").exists()


def test_records_that_miss_a_chunk_are_refused(tmp_path: Path) -> None:
    from gracepoint.checkpoint.format.records import merge

    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    records = done_records(storage_path(folder))
    assert records is not None
    merge(records)
    for record in records:
        record.files.pop("default/w/0.0", None)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointCorrupt, match=r"1 files are missing, for example default/w/0\.0"):
        merge(records)


class Clock:
    """Time that passes only in sleep; another writer may work meanwhile."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.while_sleeping: list[Any] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.while_sleeping:
            self.while_sleeping.pop(0)()


def list_steps(root: Path, clock: Clock, timeout_s: float = 60.0) -> catalog.Listing:
    return catalog.list_steps(
        Layout(storage_path(root)), attempt="job-1-b", deadline=Deadline.after(timeout_s, clock), sleep=clock.sleep
    )


def test_newer_save_of_an_earlier_attempt_is_waited_for(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state())
    leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z")
    clock = Clock()
    clock.while_sleeping = [lambda: None, lambda: leave_uncommitted(tmp_path, 4, (1,), attempt="job-0-z")]
    assert list_steps(tmp_path, clock).steps == (4, 1)
    assert 100 < clock.now_s < 101


def test_save_finished_during_listing_is_not_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(engine(tmp_path), 1, small_state())
    leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z")
    clock, last_change_s = Clock(), RenameCommit.last_change_s

    def finished_meanwhile(way: RenameCommit, temporary: Temporary) -> float:
        leave_uncommitted(tmp_path, 4, (1,), attempt="job-0-z")
        return last_change_s(way, temporary)

    monkeypatch.setattr(RenameCommit, "last_change_s", finished_meanwhile)
    assert list_steps(tmp_path, clock).steps == (4, 1)
    assert clock.now_s == 100, "the writer is looked at before what is durable is committed, so it is not waited for"


def test_a_save_that_keeps_changing_is_waited_for_until_the_deadline_only(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state())
    folder = leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z")
    clock = Clock()
    listing = list_steps(tmp_path, clock, timeout_s=3.0)
    assert listing.steps == (1,)
    assert clock.now_s == pytest.approx(103)
    assert any(str(folder) in remark and "still being written" in remark for remark in listing.remarks)


def test_a_save_in_which_nothing_changes_is_not_waited_for(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state())
    set_age(leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z"), RenameCommit.quiet_s + 1)
    clock = Clock()
    assert list_steps(tmp_path, clock).steps == (1,)
    assert clock.now_s == 100


def test_a_save_of_the_future_is_waited_for_as_others_are_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(engine(tmp_path), 1, small_state())
    folder = leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z")
    set_age(folder, -3600)
    clock = Clock()
    assert list_steps(tmp_path, clock).steps == (1,)
    assert clock.now_s == pytest.approx(100 + RenameCommit.quiet_s, abs=0.2)
    (said,) = [message for message in caplog.messages if str(folder) in message and "waiting until" in message]
    assert "dated 36" in said
    assert "ahead of the storage's clock" in said


def test_a_save_of_the_future_that_changes_is_alive(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state())
    folder = leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z")
    clock = Clock()

    def change() -> None:
        set_age(folder, -3600 - clock.now_s)
        clock.while_sleeping.append(change)

    clock.while_sleeping = [change]
    listing = list_steps(tmp_path, clock, timeout_s=30.0)
    assert clock.now_s == pytest.approx(130, abs=0.2)
    assert any("still being written" in remark for remark in listing.remarks)


def test_an_incomplete_save_older_than_what_is_complete_is_not_waited_for(tmp_path: Path) -> None:
    leave_uncommitted(tmp_path, 1, (0,), attempt="job-0-z")
    save(engine(tmp_path), 4, small_state())
    clock = Clock()
    assert list_steps(tmp_path, clock).steps == (4,)
    assert clock.now_s == 100


def test_a_start_deletes_incomplete_saves_of_other_attempts_once_they_are_old(tmp_path: Path) -> None:
    old = leave_uncommitted(tmp_path, 2, (0,), attempt="job-0-y")
    young = leave_uncommitted(tmp_path, 3, (0,), attempt="job-0-z")
    own = leave_uncommitted(tmp_path, 4, (0,), attempt="job-1-b")
    set_age(old, 3700)
    set_age(young, 3500)
    set_age(own, 3700)
    assert restore(tmp_path, small_state(), attempt="job-1-b") is None
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([young.name, own.name])


@pytest.mark.parametrize(("age_s", "goes"), [(3599, False), (3600, False), (3601, True)])
@pytest.mark.parametrize("kind", ["file", "folder", "save"])
def test_what_a_crash_left_goes_once_it_is_older_than_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, age_s: int, goes: bool
) -> None:
    left = tmp_path / ".gracepoint-now.elsewhere.1.ab"
    if kind == "file":
        left.touch()
    elif kind == "folder":
        left.mkdir()
        (left / "probe").touch()
    else:
        left = leave_uncommitted(tmp_path, 4, (0,))
    now_s = 2_000_000_000  # by the file system's clock
    for path in (left, *left.rglob("*")):
        os.utime(path, (now_s - age_s, now_s - age_s))
    monkeypatch.setattr(PosixPath, "now_s", lambda path: float(now_s))
    commit.give_up_old(Layout(storage_path(tmp_path)), attempt="job-1-b", older_than_s=3600)
    assert left.exists() is not goes


@pytest.mark.parametrize(
    ("step", "newest_good", "goes"),
    [(4, 5, True), (4, 4, False), (4, 3, False), (4, None, False)],
    ids=["newer step restored", "same step restored", "older step restored", "none restored"],
)
def test_an_unfinished_save_that_was_overtaken_goes_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, newest_good: int | None, goes: bool
) -> None:
    paths, left = Layout(storage_path(tmp_path)), leave_uncommitted(tmp_path, step, (0,))
    now_s = 2_000_000_000

    def given_up_at_age(age_s: int) -> bool:
        for path in (left, *left.rglob("*")):
            os.utime(path, (now_s - age_s, now_s - age_s))
        commit.give_up_old(paths, attempt="b", older_than_s=3600, newest_good=newest_good, overtaken_for_s=600)
        return not left.exists()

    monkeypatch.setattr(PosixPath, "now_s", lambda path: float(now_s))
    assert not given_up_at_age(600)
    assert given_up_at_age(601) is goes


@pytest.mark.parametrize("young", ["", "default", "default/w", "default/w/0.0"], ids=lambda part: part or "itself")
def test_a_save_changed_last_when_anything_in_it_did(tmp_path: Path, young: str) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1000, 1000))
    os.utime(folder / young, (2000, 2000))
    assert storage_path(folder).last_change_s() == 2000
    assert storage_path(tmp_path / "gone").last_change_s() == 0


def test_where_a_crash_left_nothing_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_uncommitted(tmp_path, 4, (0,), attempt="job-1-b")

    def asked(path: StoragePath) -> float:
        raise AssertionError("the clock is asked by writing a file")

    monkeypatch.setattr(PosixPath, "now_s", asked)
    commit.give_up_old(Layout(storage_path(tmp_path)), attempt="job-1-b", older_than_s=3600)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_another_process_deletes_at_the_same_time_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    left = tmp_path / ".gracepoint-now.elsewhere.1.ab"
    real = shutil.rmtree

    def rmtree(folder: Path, **noting: Any) -> None:
        real(folder)
        real(folder, **noting)

    if kind == "folder":
        left.mkdir()
        set_age(left, 3700)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    monkeypatch.setattr(Layout, "hidden", lambda paths: [storage_path(left)])
    commit.give_up_old(Layout(storage_path(tmp_path)), attempt="job-1-b", older_than_s=3600)
    assert not left.exists()


def test_what_a_crash_left_half_deleted_is_deleted_and_never_restored(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state())
    save(engine(tmp_path, attempt="job-0-z"), 2, small_state())
    (tmp_path / "2").rename(tmp_path / "2.gracepoint-trash.job-0-z.1")
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert restored.step == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]


def leave_done_records(folder: Path, count: int) -> None:
    """Leaves the done-records of a save of ``count`` processes."""
    for process in range(count):
        record = DoneRecord(
            step=1,
            item="default",
            attempt="job-0-a",
            ordinal=1,
            process_index=process,
            process_count=count,
            digest="",
            arrays=() if process == 0 else None,
            files={},
            values={},
            copies={},
            host_state=(),
            begun_ns=0,
        )
        (folder / layout.done_record(process)).write_bytes(record.to_bytes())


def test_done_records_are_read_several_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 1 + 2 * read_many.CONCURRENT_READS
    leave_done_records(tmp_path, count)
    together = threading.Barrier(read_many.CONCURRENT_READS)
    real = StoragePath.read_bytes

    def read_bytes(path: StoragePath) -> bytes:
        if path.name != layout.done_record(0):
            together.wait(30)  # breaks if they come one after the other
        return real(path)

    monkeypatch.setattr(StoragePath, "read_bytes", read_bytes)
    records = done_records(storage_path(tmp_path))
    assert records is not None
    assert [record.process_index for record in records] == list(range(count))


@pytest.mark.parametrize("missing", [0, 1, 40, 99])
def test_done_records_are_none_while_one_is_missing(tmp_path: Path, missing: int) -> None:
    leave_done_records(tmp_path, 100)
    (tmp_path / layout.done_record(missing)).unlink()
    assert done_records(storage_path(tmp_path)) is None


def test_no_more_done_records_are_read_when_one_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_done_records(tmp_path, 1000)
    (tmp_path / layout.done_record(1)).unlink()
    read: list[StoragePath] = []
    real = StoragePath.read_bytes
    rest = threading.Event()

    def read_bytes(path: StoragePath) -> bytes:
        read.append(path)
        if path.name not in (layout.done_record(0), layout.done_record(1)):
            rest.wait(0.01)
        return real(path)

    monkeypatch.setattr(StoragePath, "read_bytes", read_bytes)
    assert done_records(storage_path(tmp_path)) is None
    assert len(read) < 500


def test_done_records_are_read_where_the_system_gives_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_done_records(tmp_path, 40)

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    records = done_records(storage_path(tmp_path))
    assert records is not None
    assert len(records) == 40


def test_a_done_record_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    leave_done_records(tmp_path, 40)
    (tmp_path / layout.done_record(7)).unlink()
    (tmp_path / layout.done_record(7)).mkdir()
    with pytest.raises(IsADirectoryError):
        done_records(storage_path(tmp_path))


@pytest.mark.parametrize("durable", [True, False])
def test_a_save_that_failed_is_deleted_unless_it_is_durable(durable: bool, tmp_path: Path) -> None:
    left = leave_uncommitted(tmp_path, 4, (0, 1) if durable else (0,))
    paths = Layout(storage_path(tmp_path))
    (temporary,) = paths.temporaries()
    commit.give_up_failed(paths, temporary)
    commit.give_up_failed(paths, temporary)  # as another process does
    assert left.exists() is durable
    assert not paths.trashed()
