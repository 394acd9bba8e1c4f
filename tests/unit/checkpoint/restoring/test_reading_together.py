"""What all processes learn of a read that failed in some: enough to act on, and not more in a large gang."""

from __future__ import annotations

import time

from gracepoint.checkpoint.restoring.restore_step import read_together
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointCorrupt, CheckpointMismatch
from gracepoint.process_group import ProcessGroup
from tests.unit.checkpoint.fakes.engine import in_gang, outcomes_in_gang

PROCESSES = 12


def read(gang: ProcessGroup, failing: dict[int, Exception]) -> tuple[int | None, str]:
    def here() -> int:
        if gang.process_index in failing:
            raise failing[gang.process_index]
        return gang.process_index

    return read_together("step 7", here, gang=gang, key="k", deadline=Deadline.after(60.0, time.monotonic))


def test_damage_that_all_processes_find_is_reported_for_a_few_of_them() -> None:
    failing: dict[int, Exception] = {at: CheckpointCorrupt(f"file {at} is missing") for at in range(PROCESSES)}
    (told,) = set(in_gang(PROCESSES, lambda gang: read(gang, failing)))
    assert told[0] is None
    assert told[1].startswith("process 0: file 0 is missing; process 1: ")
    assert told[1].endswith("process 7: file 7 is missing; and 4 more processes")


def test_what_no_older_step_helps_against_is_raised_in_all() -> None:
    failing: dict[int, Exception] = {
        3: CheckpointCorrupt("damaged"),
        9: CheckpointMismatch("step 7: leaf 'w' has another shape"),
    }
    for outcome in outcomes_in_gang(PROCESSES, lambda gang: read(gang, failing)):
        assert isinstance(outcome, CheckpointMismatch)
        assert str(outcome) == "step 7 cannot be restored: process 9: leaf 'w' has another shape"


def test_results_stay_in_their_processes() -> None:
    assert in_gang(3, lambda gang: read(gang, {})) == [(process, "") for process in range(3)]
