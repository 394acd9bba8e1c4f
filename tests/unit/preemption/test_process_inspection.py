"""What another process does: real processes that are stopped, or hang in C code."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gracepoint.preemption.stall_detector import ProcessAt, look
from tests.testcluster.shell import wait_until

pytestmark = pytest.mark.integration

#: The regular expression takes hours, and holds the interpreter lock.
HANGS = (
    "import re\ndef hang_in_c():\n    print('runs', flush=True)\n    re.match('(a+)+$', 'a' * 60 + 'b')\nhang_in_c()\n"
)
SLEEPS = "import time\ndef sleep():\n    print('runs', flush=True)\n    time.sleep(600)\nsleep()\n"


@contextlib.contextmanager
def running(program: str) -> Iterator[ProcessAt]:
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "runs\n"
            yield ProcessAt(process.pid, ProcessAt.here(0).namespace, process.pid)
        finally:
            process.kill()


def stop(at: ProcessAt) -> None:
    os.kill(at.process_id, signal.SIGSTOP)
    wait_until("the process to stop", lambda: "(state T)" in look(at).does, timeout_s=60)


def test_a_stopped_process_is_reported_with_its_stack() -> None:
    with running(SLEEPS) as at:
        stop(at)
        seen = look(at)
        assert (seen.does, seen.why_not) == ("is stopped by a signal (state T)", "")
        assert seen.stack.splitlines()[-1].endswith("in sleep")


def test_a_process_that_hangs_in_c_code_is_reported_with_its_stack() -> None:
    with running(HANGS) as at:
        seen = look(at)
        assert (seen.does, seen.why_not) == ("computes, and does not let its other threads run (state R)", "")
        assert "in hang_in_c" in seen.stack


def test_a_process_that_sleeps_or_has_ended_is_reported() -> None:
    with running(SLEEPS) as at:
        assert look(at).does.startswith("waits in the kernel (state S")
    assert look(at).does == "has ended, or its training thread has"


def test_what_is_missing_for_the_stack_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(SLEEPS) as at:
        stop(at)
        monkeypatch.setattr(shutil, "which", lambda program, path=None: None)
        seen = look(at)
        assert seen.does == "is stopped by a signal (state T)"
        assert seen.why_not == "py-spy is not installed in this image"


def test_a_py_spy_that_cannot_be_killed_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy, its_id = tmp_path / "py-spy", tmp_path / "id"
    spy.write_text(f"#!/bin/sh\necho $$ > {its_id}\nexec sleep 600\n")
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda process: None)  # it hangs in the kernel
    seen = look(ProcessAt.here(threading.get_native_id()), py_spy_s=2.0)
    assert seen.why_not == "py-spy did not end within 2 s"
    wait_until("the script to say its ID", lambda: its_id.exists() and its_id.read_text() != "", timeout_s=60)
    os.kill(int(its_id.read_text()), signal.SIGKILL)
    for thread in threading.enumerate():
        if thread.name == "gracepoint-py-spy":
            thread.join(60)


def test_a_process_of_another_container_cannot_be_seen() -> None:
    seen = look(ProcessAt(1, ProcessAt.here(0).namespace + 1, 1))
    assert seen.does == ""
    assert "shareProcessNamespace" in seen.why_not
