"""Single parts of the library on JAX's real coordination service."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from tests.multiprocess import nursery
from tests.multiprocess.launcher import ROOT, Processes, Result, new_nursery, started

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


def test_processes_that_cannot_be_started_leave_nothing_to_the_collector() -> None:
    closed = new_nursery()
    closed.close()
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="Bad file descriptor"):
            Processes.start(SCRIPT, 1, off=closed)
        started.clear()
        gc.collect()
    assert [str(each.message) for each in caught if each.category is ResourceWarning] == []


def run_pytest(test: Path, *options: str) -> tuple[list[str], list[str]]:
    """The lines that a pytest of its own prints of a module that fails, to its output and to its errors."""
    argv: list[str | Path] = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.multiprocess.outputs",
        *options,
        "--rootdir",
        test.parent,
    ]
    # In the folder of all tests, it would delete those of earlier runs: of many files, and for minutes.
    argv += ["--basetemp", test.parent / "temporary", test]
    ran = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert ran.returncode == 1
    return ran.stdout.splitlines(), ran.stderr.splitlines()


FAILING = """
import sys
from pathlib import Path
from tests.multiprocess.launcher import Processes

def test_it(tmp_path):
    script = tmp_path / "talk.py"
    script.write_text('''
from tests.multiprocess.launcher import here
for number in range(2000):
    print(f"process {here().process_index} says {number} {'x' * 50}")
raise SystemExit(here().process_index)
''')
    with Processes.start(script, 2) as processes:
        assert [result.code for result in processes.wait(timeout_s=60)] == [0, 0]
"""


@pytest.mark.parametrize("workers", [pytest.param([], id="one pytest"), pytest.param(["-n", "1"], id="xdist")])
def test_a_failed_test_shows_the_whole_output_of_each_process(tmp_path: Path, workers: list[str]) -> None:
    test = tmp_path / "test_failing.py"
    test.write_text(FAILING)
    shown, _ = run_pytest(test, *workers)
    for process, end in enumerate(["ended with 0", "ended with 1"]):
        assert any(f"process {process}, {end}" in line and line.startswith("---") for line in shown)
        said = [line for line in shown if line.startswith(f"process {process} says ")]
        assert said == [f"process {process} says {number} {'x' * 50}" for number in range(2000)]


HANGING = """
import time
from pathlib import Path
import pytest
from tests.multiprocess.launcher import Processes

@pytest.fixture
def processes(tmp_path):
    script = tmp_path / "talk.py"
    script.write_text('''
import time
from tests.multiprocess.launcher import here
def stuck_here():
    time.sleep(1000)
print(f"process {here().process_index} is up {'x' * 5000}")
if here().process_index:
    stuck_here()
''')
    with Processes.start(script, 2) as started:
        started[0].wait_for_line("is up")
        started[1].wait_for_line("is up")
        while started[0].running:
            time.sleep(0.01)
        yield started

@pytest.mark.timeout(0.1, method="thread", func_only=True)
def test_it(processes, capsys):
    time.sleep(1000)
"""


@pytest.mark.parametrize("workers", [pytest.param([], id="one pytest"), pytest.param(["-n", "1"], id="xdist")])
def test_hung_test_shows_output_and_stacks_of_each_process(tmp_path: Path, workers: list[str]) -> None:
    test = tmp_path / "test_hanging.py"
    test.write_text(HANGING)
    printed, errors = run_pytest(test, "-p", "tests.hangs", *workers, "--max-worker-restart=0")
    shown = printed + errors
    for process, end in enumerate(["ended with 0", "ended by SIGABRT"]):
        assert any(f"process {process}, {end}" in line for line in shown)
        assert f"process {process} is up {'x' * 5000}" in shown
    assert any("in stuck_here" in line for line in shown), "the stack of the process that hangs"
    assert any("in test_it" in line for line in shown), "the stack of the test"


def test_a_nursery_that_is_still_starting_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery, "_END_S", 0.05)  # its imports take longer
    new_nursery().close()
