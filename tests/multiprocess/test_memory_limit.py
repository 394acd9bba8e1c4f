"""A save at the limit of the memory that a process may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.launcher import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).with_name("memory_process.py")


def test_an_emergency_needs_no_memory_for_a_copy_of_the_state(tmp_path: Path) -> None:
    with Processes.start(SCRIPT, 1, arguments=[str(tmp_path / "checkpoints")]) as processes:
        (result,) = processes.wait(timeout_s=200)
    assert result.code == 0, result.output
    lines = result.output.splitlines()
    assert "there is no memory for a copy" in lines
    assert f"saved {192 << 20}" in lines
