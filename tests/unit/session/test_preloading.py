"""What is loaded while a process waits for the others to join."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax.numpy as jnp
import pytest

import gracepoint
from gracepoint.session import attach
from gracepoint.settings import Settings
from gracepoint.wire.names import DEFAULT_NOT_JOINED_EXIT_CODE, Env
from tests.ports import held_ports

WAIT_S = 60.0

#: Waits a second for another process, and then leaves. Meanwhile C++ code of TensorStore's import calls a Python
#: function, which lasts longer.
IMPORTS_SLOWLY = """
import builtins, sys, time
import gracepoint, jax
real = builtins.__import__
def slowly(*arguments, **options):
    loader = sys._getframe(2).f_locals.get("self")
    if arguments[0] == "numpy" and getattr(loader, "name", None) == "tensorstore._tensorstore":
        print("imports", flush=True)
        until_s = time.monotonic() + 3.0
        while time.monotonic() < until_s:
            time.sleep(0.001)
    return real(*arguments, **options)
builtins.__import__ = slowly
gracepoint.attach(sys.argv[1])
"""


def settings(directory: Path | str | None, process_count: int | None = 2, process: int = 0) -> Settings:
    place = {"process_count": process_count, "pods_per_job": 2, "completion_index": process}
    return Settings(directory=None if directory is None else str(directory), **place)  # type: ignore[arg-type]


def preload(given: Settings) -> None:
    assert attach.Preloading(given).wait(WAIT_S)


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
    assert attach.Preloading(settings(tmp_path, process_count)).wait(0.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "gracepoint-preload"]


@pytest.mark.integration
def test_a_process_that_leaves_while_tensorstore_is_imported_has_its_exit_code(tmp_path: Path) -> None:
    place = {
        Env.PROCESS_COUNT: "2",
        Env.PODS_PER_JOB: "2",
        Env.COORDINATOR_JOB: "w",
        Env.SUBDOMAIN: "gpt",
        Env.JOBSET_NAME: "gpt",
        Env.JOIN_TIMEOUT_S: "1",
        "JOB_COMPLETION_INDEX": "0",
    }
    with held_ports(1) as (port,):
        left = subprocess.run(
            [sys.executable, "-c", IMPORTS_SLOWLY, str(tmp_path)],
            env={**os.environ, **place, Env.COORDINATOR_PORT: str(port)},
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
    assert left.stdout == "imports\n"
    assert "waited 1 s for process 1" in left.stderr
    assert left.returncode == DEFAULT_NOT_JOINED_EXIT_CODE, left.stderr
