"""What the keeper reads ahead while the container of the trainer starts: what its pod's process saved last."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import gracepoint
from gracepoint import machine
from gracepoint.session import ahead_in_keeper
from gracepoint.wire.names import Env

LIMIT_BYTES = 64 << 10


def environment(directory: Path | str, process: int = 0) -> dict[str, str]:
    """Returns what the webhook and the Job controller set in the pod of a process."""
    return {
        Env.DIRECTORY: str(directory),
        Env.PROCESS_COUNT: "2",
        Env.PODS_PER_JOB: "2",
        "JOB_COMPLETION_INDEX": str(process),
    }


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    """A directory with a step of process 0."""
    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        session.step(1, {"large": jnp.arange(32768.0), "small": jnp.float32(1)})
    return tmp_path


@pytest.mark.integration
def test_the_keeper_reads_without_jax_what_its_process_saved_last(steps: Path) -> None:
    code = (
        "import os, runpy, sys; runpy.run_module('gracepoint.session.ahead_in_keeper', run_name='__main__');"
        "assert not {'jax', 'tensorstore'} & set(sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment(steps)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(ended.stderr.rpartition("bytes=")[2]) > 32768 * 4


def test_no_more_is_read_than_the_memory_limit_leaves(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "left_by_pool", lambda: {"machine": 1 << 40, "container": LIMIT_BYTES})
    assert 0 < ahead_in_keeper.main(environment(steps)) < LIMIT_BYTES
    monkeypatch.setattr(machine, "left_by_pool", dict)
    assert ahead_in_keeper.main(environment(steps)) == 0


@pytest.mark.parametrize(
    ("directory", "process", "change"),
    [
        pytest.param("{steps}", 1, {}, id="nothing of this process"),
        pytest.param("{steps}/none", 0, {}, id="no steps"),
        pytest.param("gs://bucket/run", 0, {}, id="an object store"),
        pytest.param("{steps}", 0, {Env.PROCESS_COUNT: ""}, id="no place"),
        pytest.param("", 0, {}, id="no directory"),
    ],
)
def test_with_nothing_to_read_the_keeper_says_nothing(
    steps: Path, directory: str, process: int, change: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert ahead_in_keeper.main(environment(directory.format(steps=steps), process) | change) == 0
    assert not caplog.records


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"GRACEPOINT_UNHEARD_OF": "1"}, "does not know this setting", id="a setting of another version"),
        pytest.param({Env.DIRECTORY: "/dev/null/run/1"}, "", id="a directory that cannot be"),
    ],
)
def test_what_cannot_be_read_is_left_to_the_trainer(
    steps: Path, change: dict[str, str], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert ahead_in_keeper.main(environment(steps) | change) == 0
    assert words in caplog.text
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
