"""What the options promise where real processes share the work."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multiprocess.launcher import Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]


def test_processes_write_and_read_with_every_option_and_so_does_orbax(tmp_path: Path) -> None:
    script = Path(__file__).with_name("options_process.py")
    with Processes.start(script, 2, arguments=[str(tmp_path)]) as processes:
        results = processes.wait(timeout_s=150)
    assert [result.code for result in results] == [0, 0], results
    assert all("done" in result.output for result in results)
