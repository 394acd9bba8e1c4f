"""A save at the limit of the memory that a process may have."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import limits
from tests.multiprocess.launcher import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

#: More than the writer's buffers, which are reserved before, and much less than the state.
GROUP_BYTES = 64 << 20
SCRIPT = Path(__file__).with_name("memory_process.py")


def test_an_emergency_needs_no_memory_for_a_copy_of_the_state(tmp_path: Path) -> None:
    with Processes.start(SCRIPT, 1, arguments=[str(tmp_path / "checkpoints")]) as processes:
        (result,) = processes.wait(timeout_s=200)
    assert result.code == 0, result.output
    lines = result.output.splitlines()
    assert "there is no memory for a copy" in lines
    assert f"saved {192 << 20}" in lines


def test_an_emergency_fits_into_what_its_container_has_left(tmp_path: Path) -> None:
    """A real control group, whose processes the kernel kills when they take more."""
    if reason := limits.cannot_limit_memory():
        pytest.skip(f"no limit of memory here: {reason}")
    with limits.memory_group(GROUP_BYTES) as procs:
        arguments = [str(tmp_path / "checkpoints"), str(procs)]
        with Processes.start(SCRIPT, 1, arguments=arguments) as processes:
            (result,) = processes.wait(timeout_s=200)
    for way in ("direct", "page cache", "TensorStore"):
        assert f"saved {way} {192 << 20}" in result.output.splitlines(), result.output
    assert "a copy is the end" in result.output
    assert result.code == -signal.SIGKILL, f"it was no limit: {result}"
