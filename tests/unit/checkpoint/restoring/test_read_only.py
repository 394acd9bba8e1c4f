"""Restores from a file system that this job may only read: real mounts, and the kernel's own word."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from gracepoint import checkpoint
from gracepoint.checkpoint import CheckpointManager
from gracepoint.checkpoint.format import layout, records
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.errors import CheckpointNotFound
from tests import limits
from tests.unit.checkpoint.fakes.engine import assert_same, engine, save, small_state

pytestmark = pytest.mark.integration


def make_durable(step: Path) -> None:
    """Makes a committed checkpoint one that nobody has committed."""
    for mark in (layout.MANIFEST, layout.STEP_METADATA, layout.COMMIT_SUCCESS):
        (step / mark).unlink()
    record = records.done_records(storage_path(step))
    assert record is not None
    step.rename(step.with_name(f"{step.name}.gracepoint-tmp.{record[0].attempt}.{record[0].ordinal}"))


def make_torn(step: Path) -> None:
    """Makes it one that is still being written, or was left so just now."""
    (step / layout.done_record(0)).unlink()
    step.rename(step.with_name(f"{step.name}.gracepoint-tmp.job-2.1"))


def move_aside(step: Path) -> None:
    """Makes it one that a salvager had moved away when it died."""
    step.rename(step.with_name(f"{step.name}.gracepoint-aside.job-2.1"))


@pytest.fixture(autouse=True)
def mounts() -> None:
    if reason := limits.cannot_mount():
        pytest.skip(f"nothing can be mounted here: {reason}")


@pytest.mark.parametrize("leave", [make_durable, make_torn, move_aside])
def test_a_complete_step_is_restored_whatever_is_left_of_newer_ones(
    tmp_path: Path, leave: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    for step in (1, 2):
        save(engine(tmp_path, attempt=f"job-{step}"), step, small_state(step))
    leave(tmp_path / "2")
    with limits.read_only(tmp_path):
        with pytest.raises(OSError, match="Read-only file system") as raised:
            (tmp_path / "more").touch()
        assert raised.value.errno == errno.EROFS
        with CheckpointManager(tmp_path) as manager:
            restored = manager.restore(like=small_state())
        assert restored.step == 1
        assert_same(restored.state, small_state(1))
        assert_same(checkpoint.restore(tmp_path / "1", small_state()), small_state(1))
    assert str(next(tmp_path.glob("2.gracepoint-*"))) in caplog.text
    assert "were not marked" not in caplog.text  # there was nothing to mark


def test_uncommittable_durable_save_is_named_when_nothing_else_exists(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "best", small_state(1))
    make_durable(tmp_path / "best")
    said = r"best\.gracepoint-tmp.* is not salvaged: .*Read-only"
    with limits.read_only(tmp_path), pytest.raises(CheckpointNotFound, match=said):
        checkpoint.restore(tmp_path / "best", small_state())
    assert_same(checkpoint.restore(tmp_path / "best", small_state()), small_state(1))
