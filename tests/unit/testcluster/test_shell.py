"""Running commands and waiting: every limit says what it was for."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.testcluster.api import ClusterError
from tests.testcluster.shell import log_tail, run, wait_until

pytestmark = pytest.mark.integration


def test_a_program_gets_input_and_variables_and_its_output_is_returned() -> None:
    result = run(["sh", "-c", 'cat; echo "$WORD" >&2'], stdin="in", env={"WORD": "err"})
    assert (result.stdout, result.stderr, result.returncode) == ("in", "err\n", 0)


def test_a_failure_says_the_command_and_what_it_said() -> None:
    with pytest.raises(ClusterError, match=r"(?s)exit status 3: sh -c .*the reason"):
        run(["sh", "-c", "echo the reason >&2; exit 3"])
    assert run(["sh", "-c", "exit 3"], check=False).returncode == 3


def test_what_does_not_exist_is_an_error_of_ours() -> None:
    with pytest.raises(ClusterError, match="cannot run no-such-program"):
        run(["no-such-program"])


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    begin = time.monotonic()
    with pytest.raises(ClusterError, match=r"not done after 0\.5 s: sh -c"):
        run(["sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], timeout_s=0.5)
    assert time.monotonic() - begin < 10
    child = int(pid_file.read_text())
    wait_until("the child to end", lambda: not _runs(child), timeout_s=5)


def test_a_wait_in_vain_says_for_what_and_the_last_answer() -> None:
    def fails() -> bool:
        raise ClusterError("not yet")

    with pytest.raises(ClusterError, match=r"(?s)waited 0\.1 s for the thing, in vain.*last answer: not yet.*end"):
        wait_until("the thing", fails, timeout_s=0.1, every_s=0.02, hint=lambda: "the end")


def test_the_end_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert "no log" in log_tail(path)
    path.write_text("\n".join(str(number) for number in range(100)))
    assert log_tail(path, 2).endswith("98\n99")


def _runs(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_processes_of_run_do_not_share_our_process_group() -> None:
    group = run(["sh", "-c", "ps -o pgid= -p $$ 2>/dev/null || cut -d' ' -f5 /proc/$$/stat"]).stdout
    assert int(group) != os.getpgrp()
