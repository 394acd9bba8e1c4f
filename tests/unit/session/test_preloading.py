"""What is loaded while a process waits for the others to join."""

from __future__ import annotations

import logging
from pathlib import Path

import jax.numpy as jnp
import pytest

import gracepoint
from gracepoint.session import attach
from gracepoint.settings import Settings

WAIT_S = 60.0


def settings(directory: Path | str | None, process_count: int | None = 2, process: int = 0) -> Settings:
    place = {"process_count": process_count, "pods_per_job": 2, "completion_index": process}
    return Settings(directory=None if directory is None else str(directory), **place)  # type: ignore[arg-type]


def preload(given: Settings) -> None:
    thread = attach.begin(given)
    assert thread is not None
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_the_newest_checkpoint_is_read_ahead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.step(1, {"w": jnp.arange(1024.0)})
    caplog.set_level(logging.INFO, "gracepoint.session.attach")
    preload(settings(tmp_path))
    (line,) = [r.getMessage() for r in caplog.records if "reading ahead" in r.getMessage()]
    assert int(line.rpartition("=")[2]) > 4096


@pytest.mark.parametrize("directory", ["/dev/null/run", "ftp://server/run", None], ids=str)
def test_what_cannot_be_loaded_is_left_to_attach(directory: str | None, caplog: pytest.LogCaptureFixture) -> None:
    preload(settings(directory))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("process_count", [None, 1])
def test_a_process_alone_waits_for_nobody(tmp_path: Path, process_count: int | None) -> None:
    assert attach.begin(settings(tmp_path, process_count)) is None
