"""The agreement on JAX's own coordination service, through many epochs with random schedules."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.multiprocess.launcher import Processes

SCRIPT = Path(__file__).with_name("agreement_process.py")
#: In the long form 10 times as many epochs, 500 in all.
TIMES = 10 if os.environ.get("LONG_TESTS") == "1" else 1

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180 * TIMES)]


@pytest.mark.parametrize(("count", "epochs"), [(2, 20), (3, 15), (4, 15)])
def test_random_epochs_stop_all_processes_at_the_same_points_and_none_hangs(count: int, epochs: int) -> None:
    with Processes.start(SCRIPT, count, arguments=[str(count), str(epochs * TIMES)], devices=1) as processes:
        results = processes.wait(timeout_s=120 * TIMES)
    assert [r.code for r in results] == [0] * count, processes.output()
    stopped = [json.loads(found[1]) for r in results if (found := re.search(r"^stopped (.*)$", r.output, re.M))]
    assert stopped == [stopped[0]] * count
    assert stopped[0] == sorted(set(stopped[0]))
    ends = {found[0] for r in results if (found := re.search(r"^epochs .*$", r.output, re.M))}
    assert len(ends) == 1  # all heard the same
    opened, retracted = (int(n) for n in re.findall(r"\d+", ends.pop()))
    assert opened == len(stopped[0])
    assert opened + retracted >= epochs * TIMES
    # Of each kind of schedule there were so many: one kind can only open an epoch, and one only be taken back.
    assert min(opened, retracted) >= epochs * TIMES // 6
