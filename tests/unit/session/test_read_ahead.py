"""What is read ahead before a restore: what this process wrote of the newest step, as far as there is memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

import gracepoint
from gracepoint import machine
from gracepoint.checkpoint.storage.objects.http import connections_to
from gracepoint.session.ahead_in_keeper import read_ahead
from tests.object_stores.servers import Bucket


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that the system is asked to read."""
    found: list[Path] = []
    advise = os.posix_fadvise

    def record(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        if offset == 0:
            found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        advise(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "posix_fadvise", record)
    return found


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A directory of two steps."""
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        for step in (1, 2):
            session.step(step, {"large": jnp.arange(4096.0) + step, "small": jnp.float32(step)})
    return tmp_path


def test_the_files_of_the_newest_step_are_read(steps: Path, asked: list[Path]) -> None:
    begun_bytes = read_ahead(steps, 0)
    names = {path.relative_to(steps / "2").parts[:2] for path in asked}
    assert {("default", "large"), ("default", "small")} <= names
    assert begun_bytes == sum(path.stat().st_size for path in asked) > 4096 * 4


def test_no_more_is_read_than_there_is_memory_for(
    steps: Path, asked: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "left_by_pool", lambda: {"machine": 1 << 40, "container": 16384 * 4})
    assert read_ahead(steps, 0) <= 16384
    assert not [path for path in asked if path.parent.name == "large" and path.stat().st_size > 16384]


@pytest.mark.parametrize(
    "directory",
    [
        pytest.param(lambda steps: steps / "missing", id="no directory"),
        pytest.param(lambda steps: steps / "1", id="no steps"),
        pytest.param(lambda steps: "memory://read-ahead", id="no file system"),
    ],
)
def test_without_steps_on_a_file_system_nothing_is_read(
    steps: Path, asked: list[Path], directory: Callable[[Path], Path | str]
) -> None:
    assert read_ahead(directory(steps), 0) == 0
    assert asked == []


def test_of_an_object_store_a_connection_is_made_ready(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    connections = connections_to(bucket.url)
    connections.close()  # those of other tests
    assert read_ahead(f"{bucket.uri}/top", 0) == 0
    connection, was_used = connections.take()
    assert was_used
    connections.give_back(connection)


def test_a_process_that_did_not_save_reads_nothing(steps: Path, asked: list[Path]) -> None:
    assert read_ahead(steps, 7) == 0
    assert asked == []
