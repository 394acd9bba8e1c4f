"""Durable saves become visible whoever is left, incomplete ones never do."""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gracepoint.checkpoint import catalog, commit, layout
from gracepoint.checkpoint.deadline import Deadline
from gracepoint.checkpoint.layout import Layout
from gracepoint.errors import CheckpointCorrupt, SaveFailed
from gracepoint.gang import Gang, SingleProcess
from tests.unit.checkpoint.support import (
    assert_same,
    engine,
    in_gang,
    outcomes_in_gang,
    restore,
    save,
    small_state,
)


class DyingGang(SingleProcess):
    """One process of two, whose peer never comes: what it leaves is what a crash before the commit leaves."""

    def __init__(self, process_index: int, process_count: int = 2) -> None:
        self.process_index = process_index
        self.process_count = process_count

    def barrier(self, key: str, *, timeout_s: float, on_last: Any = None, **_: Any) -> None:
        raise SystemExit("killed")


def leave_uncommitted(root: Path, step: int, processes: tuple[int, ...], *, attempt: str = "job-0-a") -> Path:
    """Leaves a save of two processes in which ``processes`` finished writing; returns its folder."""
    for process in processes:
        with pytest.raises(SystemExit):
            save(engine(root, DyingGang(process), attempt=attempt), step, small_state(step), {"data": process})
    return root / f"{step}.gracepoint-tmp.{attempt}.1"


def set_age(folder: Path, age_s: float) -> None:
    """Makes all of ``folder`` look unchanged for ``age_s``."""
    now_s = commit.file_system_now_s(Layout(folder.parent))
    for directory, _, names in os.walk(folder):
        for path in (directory, *(os.path.join(directory, name) for name in names)):
            os.utime(path, (now_s - age_s, now_s - age_s))


def in_two(root: Path) -> Any:
    return in_gang(2, lambda gang: restore(root, small_state(), gang=gang))


def test_a_save_whose_processes_all_died_before_the_commit_is_salvaged_by_the_next_start(tmp_path: Path) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    restored = in_two(tmp_path)
    assert [(r.step, r.host_state) for r in restored] == [(4, {"data": 0}), (4, {"data": 1})]
    assert_same(restored[0].state, small_state(4))
    assert not folder.exists()


@pytest.mark.parametrize("finished", [(0,), (1,)])
def test_a_save_that_one_process_did_not_finish_stays_invisible(tmp_path: Path, finished: tuple[int, ...]) -> None:
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 1, small_state(1), {"data": 5}))
    folder = leave_uncommitted(tmp_path, 4, finished)
    set_age(folder, catalog.QUIET_S + 1)
    assert [r.step for r in in_two(tmp_path)] == [1, 1]
    assert folder.exists()
    assert not (tmp_path / "4").exists()


def test_an_incomplete_first_save_is_no_checkpoint_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0,))
    set_age(folder, catalog.QUIET_S + 1)
    assert restore(tmp_path, small_state()) is None
    assert f"{folder} is incomplete" in caplog.text


def test_a_durable_save_with_a_file_that_was_cut_is_not_salvaged(tmp_path: Path) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    (folder / "default/w/0.0").write_bytes(b"")
    remarks = commit.salvage(Layout(tmp_path))
    assert "w/0.0 has 0 bytes, expected 16" in remarks[0]
    assert not (tmp_path / "4").exists()


def test_a_damaged_done_record_is_as_none(tmp_path: Path) -> None:
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    (folder / "done.process_1.json").write_text("{}")
    assert "done.process_1.json cannot be read" in commit.salvage(Layout(tmp_path))[0]
    assert not (tmp_path / "4").exists()


def test_any_number_of_salvagers_may_race(tmp_path: Path) -> None:
    for step in range(10):
        leave_uncommitted(tmp_path, step, (0, 1))
    start, errors = threading.Barrier(4), []

    def run() -> None:
        start.wait(10)
        try:
            commit.salvage(Layout(tmp_path))
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


def test_salvage_never_replaces_a_committed_step(tmp_path: Path) -> None:
    in_gang(2, lambda gang: save(engine(tmp_path, gang, attempt="old"), 4, small_state(1)))
    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    remarks = commit.salvage(Layout(tmp_path))
    assert f"{folder} is left" in remarks[0]
    assert folder.exists()
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert_same(restored.state, small_state(1))


def is_marked(step: Path) -> None:
    (step / layout.DAMAGE_MARK).write_text("a restore went back from it")


def has_a_cut_manifest(step: Path) -> None:
    manifest = step / layout.MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [is_marked, has_a_cut_manifest])
def test_a_durable_save_takes_the_place_of_a_damaged_one_of_its_step(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 4, small_state(9), {"data": 5}))
    damage(tmp_path / "4")
    leave_uncommitted(tmp_path, 4, (0, 1), attempt="job-1-b")
    restored = in_two(tmp_path)
    assert [(r.step, r.host_state) for r in restored] == [(4, {"data": 0}), (4, {"data": 1})]
    assert_same(restored[0].state, small_state(4))
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["4"]


def test_a_step_that_another_version_wrote_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    save(engine(tmp_path), 4, small_state(9))
    left = leave_uncommitted(tmp_path, 4, (0, 1), attempt="job-1-b")
    manifest = tmp_path / "4" / layout.MANIFEST
    body = manifest.read_bytes().replace(b"checkpoint/1", b"checkpoint/2", 1).rpartition(b', "checksum": ')[0]
    manifest.write_bytes(body + b', "checksum": %d}' % zlib.crc32(body))
    with pytest.raises(CheckpointCorrupt, match=r"expected 'gracepoint.checkpoint/1'; written by another version\?"):
        restore(tmp_path, small_state(), attempt="job-2-c")
    assert manifest.read_bytes().startswith(body)
    assert left.is_dir()


def test_what_another_salvager_committed_meanwhile_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_gang(2, lambda gang: save(engine(tmp_path, gang), 4, small_state(9), {"data": 5}))
    leave_uncommitted(tmp_path, 4, (0, 1), attempt="job-1-b")
    looks = iter([True, False])  # damaged at first, and by then the other's
    monkeypatch.setattr(commit, "is_damaged", lambda folder: next(looks, False))
    remarks = commit.salvage(Layout(tmp_path))
    assert "there is a folder for step 4 already" in remarks[0]
    assert_same(in_two(tmp_path)[0].state, small_state(9))


def test_the_survivor_commits_when_its_peer_died_after_its_done_record(tmp_path: Path) -> None:
    def run(gang: Gang) -> Any:
        if gang.process_index == 1:
            return save(engine(tmp_path, DyingGang(1)), 4, small_state(4))
        # Long enough for process 1 to write; the barrier cannot be met.
        return save(engine(tmp_path, gang), 4, small_state(4), timeout_s=3.0)

    survivor, dead = outcomes_in_gang(2, run)
    assert isinstance(dead, SystemExit)
    assert not isinstance(survivor, BaseException), survivor
    assert restore(tmp_path, small_state()) is not None


def test_the_survivor_of_a_peer_that_died_before_its_done_record_fails_and_commits_nothing(tmp_path: Path) -> None:
    def run(gang: Gang) -> Any:
        return save(engine(tmp_path, gang), 4, small_state(4), timeout_s=1.0) if gang.process_index == 0 else None

    survivor, _ = outcomes_in_gang(2, run)
    assert isinstance(survivor, SaveFailed)
    assert "process 1" in str(survivor)
    assert not (tmp_path / "4").exists()


def test_records_that_miss_a_chunk_are_refused(tmp_path: Path) -> None:
    from gracepoint.checkpoint.records import merge

    folder = leave_uncommitted(tmp_path, 4, (0, 1))
    records = commit.done_records(folder)
    assert records is not None
    merge(records)
    for record in records:
        record.files.pop("default/w/0.0", None)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointCorrupt, match=r"nobody wrote 1 of its files, as default/w/0\.0"):
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
        Layout(root), attempt="job-1-b", deadline=Deadline.after(timeout_s, clock), sleep=clock.sleep
    )


def test_a_newer_save_that_an_earlier_attempt_is_still_writing_is_waited_for(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state())
    leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z")
    clock = Clock()
    clock.while_sleeping = [lambda: None, lambda: leave_uncommitted(tmp_path, 4, (1,), attempt="job-0-z")]
    assert list_steps(tmp_path, clock).steps == (4, 1)
    assert 100 < clock.now_s < 101


def test_a_save_that_is_finished_just_while_it_is_looked_at_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(engine(tmp_path), 1, small_state())
    leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z")
    real = catalog._is_live

    def finished_meanwhile(*arguments: Any) -> bool:
        leave_uncommitted(tmp_path, 4, (1,), attempt="job-0-z")
        return real(*arguments)

    monkeypatch.setattr(catalog, "_is_live", finished_meanwhile)
    assert list_steps(tmp_path, Clock()).steps == (4, 1)


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
    set_age(leave_uncommitted(tmp_path, 4, (0,), attempt="job-0-z"), catalog.QUIET_S + 1)
    clock = Clock()
    assert list_steps(tmp_path, clock).steps == (1,)
    assert clock.now_s == 100


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


def test_what_a_crash_left_half_deleted_is_deleted_and_never_restored(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, small_state())
    save(engine(tmp_path, attempt="job-0-z"), 2, small_state())
    (tmp_path / "2").rename(tmp_path / "2.gracepoint-trash.job-0-z.1")
    restored = restore(tmp_path, small_state())
    assert restored is not None
    assert restored.step == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1"]
