"""A job that comes back with fewer and with more processes: arrays, host states and data follow it."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.elastic_training import GLOBAL_BATCH, PARTS, floats_at, order
from tests.multiprocess.launcher import Processes, Result, said

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).with_name("elastic_process.py")
STAGES = (4, 2, 3, 4)
SAVED = 77
#: More than the job gets to before it is stopped for the last time.
ENDLESS = 150


def warnings(result: Result) -> list[str]:
    return [line for line in result.output.splitlines() if "continues in another form" in line]


def test_each_record_is_used_once_whatever_the_number_of_processes(tmp_path: Path) -> None:
    chance = random.Random(17)
    used: Counter[int] = Counter()
    saved, last = 0, len(STAGES) - 1
    for stage, count in enumerate(STAGES):
        stop_at = saved + chance.randint(3, 9)
        steps = stop_at if stage == last else ENDLESS
        with Processes.start(SCRIPT, count, arguments=[str(tmp_path), str(steps)], devices=1) as processes:
            if stage < last:
                victim = processes[chance.randrange(count)]
                victim.wait_for_line(f"took [{stop_at},")
                victim.signal(signal.SIGTERM)
            results = processes.wait(timeout_s=90)
        assert [result.code for result in results] == [0 if stage == last else SAVED] * count, processes.output()

        restored = [said(result, "restored")[0] for result in results]
        assert {step for step, _ in restored} == {saved}
        # Every part of the data is in one process, and has been read in every step so far.
        held = [name for _, parts in restored for name in parts]
        assert sorted(held) == [f"part-{number}" for number in range(PARTS)]
        assert all(part["read"] == saved for _, parts in restored for part in parts.values())

        told = [warnings(result) for result in results]
        assert [len(lines) for lines in told] == [int(stage > 0), *[0] * (count - 1)]
        if stage > 0:
            before = STAGES[stage - 1]
            for change in (
                f"step={saved} ",
                f"processes: {before} -> {count}",
                f"devices: {before} -> {count}",
                f"mesh: data={before} -> data={count}",
                f"global batch: {GLOBAL_BATCH} (kept)",
                f"batch of a process: {GLOBAL_BATCH // before} -> {GLOBAL_BATCH // count}",
            ):
                assert change in told[0][0]

        taken = [dict(said(result, "took")) for result in results]
        assert len({tuple(steps) for steps in taken}) == 1, "the processes did not take the same steps"
        used.update(record for steps in taken for records in steps.values() for record in records)
        saved = max(taken[0])

    assert used == Counter(order()[: saved * GLOBAL_BATCH].tolist())
    for result in results:
        floats, counts = said(result, "bits")[0]
        assert np.array_equal(np.asarray(floats, np.uint32), floats_at(saved).view(np.uint32))
        assert Counter({record: number for record, number in enumerate(counts) if number}) == used
