"""What the options promise where real processes share the work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.multiprocess.launcher import Process, Processes

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("options_process.py")


def test_processes_write_and_read_with_every_option_and_so_does_orbax(tmp_path: Path) -> None:
    with Processes.start(SCRIPT, 2, arguments=["all", str(tmp_path)]) as processes:
        results = processes.wait(timeout_s=150)
    assert [result.code for result in results] == [0, 0], results
    assert all("done" in result.output for result in results)


@pytest.mark.parametrize("form", ["files", "zarr3", "tree"])
def test_process_that_cannot_write_fails_its_peer_with_its_reason(tmp_path: Path, form: str) -> None:
    with Processes.start(SCRIPT, 2, arguments=["fail", str(tmp_path / "stored"), form]) as processes:
        failed_s, told_s = (at(processes[1], "ends at"), at(processes[0], "ends at"))
        own_s = at(processes[0], "written or not at")
        results = processes.wait(timeout_s=60)
    assert [result.code for result in results] == [1, 1]
    assert "File too large" in results[1].output
    assert re.search(r"BarrierFailed: barrier 'written': process 1 reported .*File too large", results[0].output)
    assert told_s - max(failed_s, own_s) < 1.0


def at(process: Process, what: str) -> float:
    """Returns the time that follows ``what`` in the process's output."""
    return float(process.wait_for_line(what).rpartition(" ")[2])
