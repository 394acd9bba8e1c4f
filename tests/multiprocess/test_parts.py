"""Single parts of the library on JAX's real coordination service."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.multiprocess.launcher import Processes, Result

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(120)]

SCRIPT = Path(__file__).with_name("parts.py")


def run(count: int, part: str, *arguments: str) -> list[Result]:
    with Processes.start(SCRIPT, count, arguments=[part, *arguments]) as processes:
        return processes.wait(timeout_s=90)


@pytest.mark.parametrize(("part", "count"), [("store", 2), ("barrier", 3)])
def test_the_part_behaves_on_jaxs_own_store(part: str, count: int) -> None:
    results = run(count, part)
    assert [r.code for r in results] == [0] * count, results
    assert all("done" in r.output for r in results)


@pytest.mark.parametrize("part", ["meet_twice", "no_close"])
def test_a_session_leaves_the_interpreter_to_end_well(part: str, tmp_path: Path) -> None:
    began = time.monotonic()
    results = run(2, part, str(tmp_path))
    assert [r.code for r in results] == [0, 0], results
    assert all("did not end" not in r.output and "Fatal" not in r.output for r in results), results
    assert time.monotonic() - began < 60


def test_a_sigterm_raises_jaxs_own_notice_too(tmp_path: Path) -> None:
    results = run(2, "jax_notice", str(tmp_path))
    assert [r.code for r in results] == [77, 77], results
    assert all("jax said so" in r.output for r in results)


def test_the_launcher_shows_the_stacks_of_what_hangs_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text("import time\n\ndef stuck_here():\n    time.sleep(1000)\n\nprint('up')\nstuck_here()\n")
    with Processes.start(script, 1) as processes:
        processes[0].wait_for_line("up")
        with pytest.raises(AssertionError, match=r"(?s)processes \[0\] still ran.*stuck_here"):
            processes.wait(timeout_s=0.1)
    assert processes[0].result().code == -signal.SIGABRT
