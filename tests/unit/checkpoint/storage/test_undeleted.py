"""What cannot be deleted: said once with path, owner and error, reported until it is gone, and never in the way."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.storage import undeleted
from gracepoint.checkpoint.storage.locations import storage_path
from tests import limits
from tests.unit.checkpoint.fakes.engine import engine, small_state


@pytest.fixture
def told() -> Iterator[list[list[str]]]:
    """What is reported."""
    reports: list[list[str]] = []
    undeleted.end()
    undeleted.listen(reports.append)
    yield reports
    undeleted.end()


def test_a_deletion_that_fails_is_said_once_with_path_owner_and_error(
    tmp_path: Path, told: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step"
    path.mkdir(mode=0o750)
    for _ in range(3):
        with undeleted.deleting(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    assert caplog.text.count("cannot be deleted") == len(told) == 1
    assert f"{path} cannot be deleted: [Errno 13] Permission denied" in caplog.text
    assert f"it belongs to user {os.geteuid()}" in caplog.text
    assert "mode 0750" in caplog.text
    assert f"this process is user {os.geteuid()}" in caplog.text
    with undeleted.deleting(path):
        path.rmdir()
    assert told[1:] == [[]]


def test_what_somebody_else_deletes_is_forgotten(told: list[list[str]]) -> None:
    for name in ("a", "b"):
        undeleted.failed(f"s3://bucket/{name}", OSError("locked"))
    undeleted.recheck(lambda path: path.endswith("b"))
    assert [len(stays) for stays in told] == [1, 2, 1]
    assert "s3://bucket/b cannot be deleted: locked" in told[-1][0]


def test_another_start_says_it_again(caplog: pytest.LogCaptureFixture, told: list[list[str]]) -> None:
    for _ in range(2):
        undeleted.failed("/nowhere/3", OSError("no"))
        undeleted.end()
    assert caplog.text.count("/nowhere/3 cannot be deleted") == 2


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody can delete anything in ``folder``, root included."""
    if reason := limits.cannot_mount():
        pytest.skip(f"nothing can be mounted here: {reason}")
    with limits.read_only(folder):
        yield


def saved(checkpointer: StepCheckpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save_in_background(step, small_state(step), {})
        checkpointer.wait_until_finished()


@pytest.mark.integration
def test_a_step_that_cannot_be_deleted_keeps_no_other_one(tmp_path: Path, told: list[list[str]]) -> None:
    checkpointer = engine(tmp_path, keep_last=1)
    saved(checkpointer, 1)
    with held(tmp_path / "1"):
        saved(checkpointer, 2, 3, 4)
        checkpointer.close(30)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "4"]
        assert f"{tmp_path / '1'} cannot be deleted" in told[-1][0]
    saved(again := engine(tmp_path, attempt="job-1-b", keep_last=1), 5)
    again.close(30)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5"]
    assert told[-1] == []


@pytest.mark.integration
def test_trash_that_stays_in_part_is_said_with_the_path_within(tmp_path: Path, told: list[list[str]]) -> None:
    top, trash = storage_path(tmp_path), tmp_path / "trash"
    (trash / "inner").mkdir(parents=True)
    for name in ("other", "inner/file"):
        (trash / name).write_bytes(b"x")
    with held(trash / "inner"):
        undeleted.delete_folder(top / "trash")
        assert [path.name for path in trash.iterdir()] == ["inner"]
        ((said,),) = told
        assert "Read-only file system: 'file'" in said or "Read-only file system" in said
    undeleted.delete_folder(top / "trash")
    assert not trash.exists()
    assert told[-1] == []
