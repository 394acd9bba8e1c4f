"""Where notices come from, in real JAX processes, and who else hears of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.metadata.servers import GceServer
from tests.multiprocess.launcher import Processes, Result

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("notices_process.py")


def test_orbaxs_manager_saves_in_all_processes_after_a_sigterm_to_one(tmp_path: Path) -> None:
    with Processes.start(SCRIPT, 2, arguments=["orbax", str(tmp_path)]) as processes:
        all_saved_where_jax_said_so(processes.wait(timeout_s=150))


def test_orbaxs_manager_saves_for_a_notice_that_was_no_signal_too(tmp_path: Path) -> None:
    with GceServer() as spared, GceServer() as doomed:
        arguments = ["orbax", str(tmp_path), spared.url, doomed.url]
        with Processes.start(SCRIPT, 2, arguments=arguments) as processes:
            for index in (0, 1):
                processes[index].wait_for_line("training")
            doomed.wait_until_held("instance/preempted")
            doomed.set("instance/preempted", "TRUE")
            all_saved_where_jax_said_so(processes.wait(timeout_s=150))


def all_saved_where_jax_said_so(results: list[Result]) -> None:
    assert [r.code for r in results] == [0, 0], results
    told = {re.search(r"^orbax saved=True step=(\d+) steps=\[1, (\d+)\]$", r.output, re.MULTILINE) for r in results}
    assert None not in told, results
    steps = {group for match in told if match for group in match.groups()}
    assert len(steps) == 1, "both saved, at the step where JAX said so, and at the same one"
    assert int(steps.pop()) > 3


def test_what_one_machines_cloud_announces_stops_all_processes_without_an_operator(tmp_path: Path) -> None:
    with GceServer() as spared, GceServer() as doomed:
        arguments = ["metadata", str(tmp_path), spared.url, doomed.url]
        with Processes.start(SCRIPT, 2, arguments=arguments) as processes:
            for index in (0, 1):
                processes[index].wait_for_line("training")
            for server in (spared, doomed):
                server.wait_until_held("instance/preempted")
            doomed.set("instance/preempted", "TRUE")
            results = processes.wait(timeout_s=60)
    assert [r.code for r in results] == [77, 77], results
    assert "the cloud announces signal=gce instance/preempted" not in results[0].output
    assert "the cloud announces signal=gce instance/preempted" in results[1].output
