"""Saves to a disk that is really full: real file systems, small ones, and the kernel's own word."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gracepoint.checkpoint import WriteOptions, verify
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps import lease, retention
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.errors import CheckpointError, SaveFailed
from gracepoint.process_group import ProcessGroup
from tests import limits
from tests.unit.checkpoint.fakes.engine import assert_same, engine, in_gang, outcomes_in_gang, restore, save

DISK_BYTES = 24 << 20
STATE_BYTES = 4 << 20


@pytest.fixture(params=["ext4", "tmpfs"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The first has direct I/O, the second has not."""
    if reason := limits.cannot_mount():
        pytest.skip(f"no small file systems here: {reason}")
    with limits.small_disk(tmp_path / "disk", DISK_BYTES, request.param):
        yield tmp_path / "disk"


def state(value: int) -> dict[str, Any]:
    return {"w": np.full((4, STATE_BYTES // 4), value, np.uint8), "count": value}


WRITERS = {
    "express": WriteOptions(target_chunk_bytes=1 << 20),
    "TensorStore": WriteOptions(target_chunk_bytes=1 << 20, express=False),
    "OCDBT": WriteOptions(use_ocdbt=True),
}


@pytest.mark.integration
@pytest.mark.parametrize("in_background", [True, False], ids=["periodic", "emergency"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_is_named_and_the_step_before_stays_whole(
    disk: Path, monkeypatch: pytest.MonkeyPatch, writer: str, in_background: bool
) -> None:
    def first(gang: ProcessGroup) -> None:
        save(engine(disk, gang, options=WRITERS[writer]), 1, state(1))

    def second(gang: ProcessGroup) -> None:
        checkpointer = engine(disk, gang, attempt="job-1-b", options=WRITERS[writer])
        if in_background:
            checkpointer.save_in_background(2, state(2), {})
            checkpointer.executor.wait_until_finished(30)
        else:
            save(checkpointer, 2, state(2))

    in_gang(2, first)
    filler = limits.fill(disk, but_bytes=STATE_BYTES // 4)
    outcomes = outcomes_in_gang(2, second)
    assert all(isinstance(outcome, SaveFailed) for outcome in outcomes), outcomes
    for outcome in outcomes:
        assert "No space left on device" in str(outcome)
        assert str(disk) in str(outcome)
    assert any(" bytes are needed for the whole save" in str(outcome) for outcome in outcomes)
    assert any(" bytes are free there" in str(outcome) for outcome in outcomes)
    left = sorted(path.name for path in disk.iterdir() if path.name.startswith("2"))
    assert left in ([], ["2.gracepoint-trash.job-1-b.1"])[: 1 if in_background else 2]
    assert not (disk / "2").exists()
    assert verify(disk / "1").ok
    filler.unlink()
    monkeypatch.setattr(RenameCommit, "quiet_s", 0.0)  # nobody waits for what is left of it
    restored = restore(disk, state(0), attempt="job-2-c")
    assert restored is not None
    assert restored.step == 1
    assert_same(restored.state, state(1))
    save(engine(disk, attempt="job-3-d", options=WRITERS[writer]), 2, state(2))
    assert verify(disk / "2").ok


@pytest.mark.integration
def test_a_restore_from_a_disk_that_is_full_needs_no_space(disk: Path) -> None:
    save(engine(disk), 1, state(1))
    limits.fill(disk)
    with pytest.raises(OSError, match="No space left") as raised:
        (disk / "more").write_bytes(bytes(1 << 16))
    assert raised.value.errno == errno.ENOSPC
    restored = restore(disk, state(0))
    assert restored is not None
    assert_same(restored.state, state(1))


@pytest.mark.integration
def test_failed_saves_leave_the_room_for_the_next_one(disk: Path) -> None:
    def run(gang: ProcessGroup) -> list[str]:
        checkpointer, seen = engine(disk, gang, keep_last=1), list[str]()
        for step in range(1, 9):
            if gang.process_index == 0 and step == 2:
                fillers.append(limits.fill(disk, but_bytes=STATE_BYTES // 2))
            if gang.process_index == 0 and step == 8:
                fillers.pop().unlink()
            gang.barrier(f"step {step}", timeout_s=30)
            try:
                checkpointer.save_in_background(step, state(step), {})
                checkpointer.wait_until_finished()
            except SaveFailed as error:
                seen.append(str(error))
            gang.barrier(f"end of {step}", timeout_s=30)
            assert not (found := list(disk.glob(f"{step}.gracepoint-tmp*/**/*"))), found
        checkpointer.close(30)
        return seen

    fillers: list[Path] = []
    for seen in in_gang(2, run):
        assert len(seen) == 6
    assert verify(disk / "8").ok
    assert [path.name for path in disk.glob("[0-9]*")] == ["8"]


@pytest.mark.integration
def test_saves_of_workers_that_failed_leave_nothing_once_a_later_one_is_committed(disk: Path) -> None:
    def run(gang: ProcessGroup) -> None:
        checkpointer = engine(disk, gang, keep_last=1, options=WriteOptions(writer="worker"))
        for step in (1, 2, 3, 4):
            if gang.process_index == 0 and step == 2:
                fillers.append(limits.fill(disk, but_bytes=STATE_BYTES // 4))
            if gang.process_index == 0 and step == 4:
                fillers.pop().unlink()
            gang.barrier(f"step {step}", timeout_s=60)
            with contextlib.suppress(SaveFailed):
                checkpointer.save_in_background(step, state(step), {})
                checkpointer.wait_until_finished()
        checkpointer.close(60)

    fillers: list[Path] = []
    in_gang(2, run)
    assert verify(disk / "4").ok
    assert [path.name for path in disk.glob("[0-9]*")] == ["4"]


@pytest.mark.integration
def test_a_stopped_save_makes_room_for_the_emergency(disk: Path) -> None:
    checkpointer = engine(disk)
    save(checkpointer, 1, state(1))
    checkpointer.save_in_background(2, state(2), {})
    checkpointer.executor.stop("a preemption")
    trash = disk / "2.gracepoint-trash.job-0-a.2"
    trash.mkdir(exist_ok=True)  # if the save had not begun to write, or was committed
    limits.fill(trash, but_bytes=STATE_BYTES // 2)
    assert save(checkpointer, 3, state(3)).step == 3


@pytest.mark.integration
@pytest.mark.parametrize("left", ["2.gracepoint-tmp.job-1-b.1", "2.gracepoint-trash.job-1-b.1"])
def test_a_start_on_a_full_disk_makes_room_among_what_earlier_saves_left(
    disk: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setattr(retention, "DEAD_S", -1.0)
    save(engine(disk, keep_last=1), 1, state(1))
    (disk / left / "default").mkdir(parents=True)
    limits.fill(disk / left / "default", but_bytes=0)
    with pytest.raises(OSError, match="No space left"):
        (disk / "more").write_bytes(bytes(1 << 16))
    (disk / "more").unlink()
    checkpointer = engine(disk, attempt="job-2-c", keep_last=1)
    checkpointer.access.claim("job", timeout_s=30)
    checkpointer.prepare(state(2))
    save(checkpointer, 2, state(2))
    checkpointer.close(30)
    assert not (disk / left).exists()
    assert verify(disk / "2").ok


@pytest.mark.integration
def test_a_save_makes_room_among_what_earlier_starts_left(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "DEAD_S", -1.0)
    save(engine(disk), 1, state(1))
    left = disk / "2.gracepoint-tmp.job-1-b.1" / "default"
    left.mkdir(parents=True)
    limits.fill(left, but_bytes=STATE_BYTES // 2)
    save(engine(disk, attempt="job-2-c"), 2, state(2))
    assert verify(disk / "2").ok


@pytest.mark.integration
def test_a_start_on_a_disk_that_others_fill_says_path_and_free_bytes(disk: Path) -> None:
    limits.fill(disk)
    (disk / "small").write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"{disk}.*No space left.*bytes are free there"):
        engine(disk).access.claim("job", timeout_s=30)


@pytest.mark.integration
@pytest.mark.parametrize("left", ["2.gracepoint-tmp.job-1-b.1", "2.gracepoint-trash.job-1-b.1"])
def test_a_start_on_a_full_disk_ends_if_what_was_left_cannot_be_deleted(
    disk: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    def refused(*arguments: object) -> None:
        raise PermissionError(errno.EACCES, "it belongs to somebody else")

    monkeypatch.setattr(retention, "DEAD_S", -1.0)
    monkeypatch.setattr(lease, "PATIENCE_S", 2.0)
    monkeypatch.setattr(PosixPath, "delete_folder", refused)
    monkeypatch.setattr(PosixPath, "publish", refused)
    (disk / left).mkdir()
    limits.fill(disk)
    (disk / "small").write_bytes(b"")
    sleeps = itertools.count()

    def sleep(seconds: float) -> None:
        assert next(sleeps) < 10, "it would wait for ever"
        time.sleep(seconds)

    monkeypatch.setattr(lease, "time", SimpleNamespace(sleep=sleep))
    with pytest.raises(CheckpointError, match=r"No space left.*bytes are free there"):
        engine(disk).access.claim("job", timeout_s=30)


@pytest.mark.integration
def test_a_start_on_a_full_disk_leaves_the_saves_of_another_job(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "DEAD_S", -1.0)
    monkeypatch.setattr(lease, "PATIENCE_S", 0.5)
    holder = {**dataclasses.asdict(lease.Holder.here("other", "job-0-a")), "host": "another"}
    Layout(storage_path(disk)).lease().put(json.dumps(holder).encode())
    (under_way := disk / "2.gracepoint-tmp.job-0-a.1").mkdir()
    limits.fill(disk)
    (disk / "small").write_bytes(b"")
    with pytest.raises(CheckpointError, match="another job uses it: other"):
        engine(disk, attempt="job-2-c").access.claim("job", timeout_s=30)
    assert under_way.exists()
