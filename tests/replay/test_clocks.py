"""A trainer is told a wrong time of day at once. What goes by another clock, and the replay's records, stay right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gracepoint.wire.names import ENV_JOB_COMPLETION_INDEX
from tests.replay import clocks

#: Answers a line with what its clocks say, each in seconds by which it is ahead of the kernel's.
_PROGRAM = """
import datetime, json, sys, threading, time
from tests.replay import trainer

def ahead():
    right_s = time.clock_gettime(time.CLOCK_TAI) - float(sys.argv[1])
    began_s = time.monotonic()
    threading.Event().wait(0.01)
    return {
        "time": time.time() - right_s,
        "nanoseconds": time.time_ns() / 1e9 - right_s,
        "date": datetime.datetime.now().timestamp() - right_s,
        "record": trainer.unix_s() - right_s,
        "monotonic": time.monotonic() - began_s,
    }

for line in sys.stdin:
    print(json.dumps(ahead()), flush=True)
"""


class Told:
    """A Python process that goes by the clock of a process of a job."""

    def __init__(self, folder: Path, process: int) -> None:
        variables = clocks.prepare(folder, str(folder))
        environment = {**os.environ, **variables, ENV_JOB_COMPLETION_INDEX: str(process)}
        environment["PYTHONPATH"] = str(Path(clocks.__file__).parents[2])
        tai_ahead_s = variables["REPLAY_TAI_AHEAD_S"]
        command = [sys.executable, "-c", _PROGRAM, tai_ahead_s]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.ahead()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ahead(self) -> dict[str, Any]:
        """By how many seconds its clocks are ahead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate(timeout=10)


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    if reason := clocks.why_not():
        pytest.skip(reason)
    process = Told(tmp_path, 1)
    yield process
    process.close()


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0, 0.75, -0.75])
def test_the_clock_of_a_process_jumps_while_it_runs(told: Told, tmp_path: Path, ahead_s: float) -> None:
    assert clocks.is_followed(told.pid, 1)
    for expected_s in (ahead_s, 0.0):
        clocks.set_ahead(tmp_path, 1, expected_s)
        found = told.ahead()
        for clock in ("time", "nanoseconds", "date"):
            assert abs(found[clock] - expected_s) < 0.5, (clock, found)
        assert abs(found["record"]) < 0.5, "what the replay records has the right time"
        assert 0 < found["monotonic"] < 0.5, "a duration is not wrong, and a wait ends"


def test_the_clocks_of_other_processes_stay_right(told: Told, tmp_path: Path) -> None:
    clocks.set_ahead(tmp_path, 0, 3600.0)
    assert abs(told.ahead()["time"]) < 0.5
    assert not clocks.is_followed(os.getpid(), 1)


def test_a_clock_is_right_again_for_the_next_job_and_stays_the_one_that_processes_have(
    told: Told, tmp_path: Path
) -> None:
    clocks.set_ahead(tmp_path, 1, 3600.0)
    clocks.prepare(tmp_path, str(tmp_path))
    assert abs(told.ahead()["time"]) < 0.5
    clocks.set_ahead(tmp_path, 1, 3600.0)
    assert abs(told.ahead()["time"] - 3600.0) < 0.5


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The only folder with programs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    clocks.why_not.cache_clear()
    yield folder
    clocks.why_not.cache_clear()


def test_where_nothing_can_be_compiled_it_is_said_why_and_trainers_are_left_alone(
    programs: Path, tmp_path: Path
) -> None:
    assert clocks.why_not() == "no C compiler was found (gcc or cc)"
    (programs / "cc").write_text("#!/bin/sh\necho stdio.h: no such file >&2\nexit 1\n")
    (programs / "cc").chmod(0o755)
    clocks.why_not.cache_clear()
    assert "stdio.h: no such file" in str(clocks.why_not())
    assert clocks.prepare(tmp_path, "/shared/replay") == {}
    assert [path.name for path in tmp_path.iterdir()] == ["programs"]
