"""What only file systems have: the lock that comparing and replacing takes."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import pytest

from gracepoint.checkpoint.storage import posix
from gracepoint.checkpoint.storage.locations import storage_path
from tests.forked import forked
from tests.waiting import PassingTime


def test_a_process_that_is_stopped_while_it_replaces_keeps_nobody_else_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing = PassingTime()
    monkeypatch.setattr(posix, "time", passing)
    value = storage_path(tmp_path / "v")
    made = value.create(b"first")
    stopped = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    value.replace(b"second", made)
    os.close(stopped)
    assert value.read_bytes() == b"second"
    assert passing.now_s == pytest.approx(5.0, abs=0.2)


def test_a_process_that_is_forked_during_a_replacement_does_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = storage_path(tmp_path / "v")
    made = value.create(b"first")
    flock, kept = fcntl.flock, []

    def forked(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if operation & fcntl.LOCK_EX:
            kept.append(os.dup(descriptor))  # as the forked process has it

    monkeypatch.setattr(fcntl, "flock", forked)
    value.replace(b"second", made)
    monkeypatch.setattr(fcntl, "flock", flock)
    other = os.open(tmp_path, os.O_RDONLY)
    flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if it is locked
    for descriptor in (other, *kept):
        os.close(descriptor)


@pytest.mark.integration
def test_a_parent_that_is_killed_during_a_replacement_does_not_leave_its_lock_to_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = storage_path(tmp_path / "v")
    made = value.create(b"first")
    flock, free = fcntl.flock, list[bool]()
    other = os.open(tmp_path, os.O_RDONLY)

    def locked(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if operation & fcntl.LOCK_EX:

            def killed() -> None:
                null = os.open("/dev/null", os.O_RDONLY)
                os.dup2(null, descriptor)  # as the kernel closes the descriptors of the dead
                os.close(null)
                with contextlib.suppress(BlockingIOError):
                    flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    free.append(True)

            forked(lambda: "lives on", meanwhile=killed)

    monkeypatch.setattr(fcntl, "flock", locked)
    value.replace(b"second", made)
    os.close(other)
    assert free == [True]
