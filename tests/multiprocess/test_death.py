"""Which process survives which death: each row of the table in docs/guarantees.md, on real JAX processes.

The gangs of one test run side by side, as they wait more than they work. Of each is held: with which codes the
survivors end, that they do so within a bound (far above what the table says, as the machine may be busy; one that
hangs dumps its stacks), what they say, and which step the next start restores.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from gracepoint.checkpoint.steps.commit import RenameCommit
from tests.multiprocess.launcher import Process, Processes
from tests.unit.checkpoint.fakes.engine import engine

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).with_name("death_process.py")
KILLED, ABORTED, UNCAUGHT, SAVED, UNSAVED, LOST = -signal.SIGKILL, -signal.SIGABRT, 1, 77, 78, 79
#: The step that is committed when it happens in training, and after the notice; see death_process.py.
BEFORE, BEFORE_NOTICE = 10, 20
DIES_WITHIN_S = 120.0
#: Beyond what a survivor may take by the table.
BUSY_S = 45.0
#: Near enough for the tests to end at the deadline; far enough for the point of death to be reached before it.
GRACE_S = 12.0
HEARTBEAT_S = 10
#: In place of leaving.FAILED_S.
FAILED_S = 2.0


@dataclasses.dataclass(frozen=True)
class Death:
    """One row: ``who`` of ``count`` dies; ``ends`` are the survivors' codes, within ``within_s`` of it.

    ``restores`` is the step that the next start finds; None: the one that was agreed. ``told`` is what a survivor says.
    """

    count: int
    who: int
    when: str
    ends: set[int]
    restores: int | None
    within_s: float = 1.0
    how: str = "kill"
    told: str = ""
    noticed_later: bool = False  # a survivor gets a SIGTERM when it hangs without the dead
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


GLOO = "Gloo all-reduce failed"
ABORT = "Terminating process because the JAX distributed service detected fatal errors"
HAS_DIED = "has died"
WATCHDOG = "ended by the watchdog code=78"
#: JAX aborts them within a second. They leave before if Python comes to it.
BY_JAX_OR_BEFORE = {LOST, ABORTED}
BEATING = {"heartbeat_s": HEARTBEAT_S}
RECOVERABLE = {"recoverable": True}

IN_TRAINING = [
    Death(3, 1, "training", {LOST}, BEFORE, 2 * FAILED_S, told=GLOO),
    Death(2, 1, "training", {LOST}, BEFORE, 2 * FAILED_S, how="exit", told=GLOO),
    Death(3, 0, "training", BY_JAX_OR_BEFORE, BEFORE, told=HAS_DIED),
    Death(2, 1, "training", {ABORTED}, BEFORE, HEARTBEAT_S, how="stop", told=ABORT, options=BEATING),
    Death(2, 0, "training", {ABORTED}, BEFORE, HEARTBEAT_S, how="stop", told=ABORT, options=BEATING),
    Death(2, 1, "training", {LOST}, BEFORE, 2 * FAILED_S, how="raise", told=GLOO),
    Death(2, 0, "training", BY_JAX_OR_BEFORE, BEFORE, 2 * FAILED_S, how="raise", told=HAS_DIED),
    Death(3, 1, "training", {LOST}, BEFORE, 2 * FAILED_S, told=GLOO, options=RECOVERABLE),
    Death(2, 0, "training", BY_JAX_OR_BEFORE, BEFORE, told=HAS_DIED, options=RECOVERABLE),
    # Nothing but a notice ends these survivors.
    Death(
        2,
        1,
        "training",
        {UNSAVED},
        BEFORE,
        GRACE_S,
        how="stop",
        told=WATCHDOG,
        noticed_later=True,
        options=RECOVERABLE | BEATING,
    ),
]
OF_PROCESS_0 = [
    Death(3, 0, "frozen", BY_JAX_OR_BEFORE, BEFORE_NOTICE, told=HAS_DIED),
    Death(2, 0, "agreed", BY_JAX_OR_BEFORE, BEFORE_NOTICE, told=HAS_DIED),
    Death(3, 0, "written", BY_JAX_OR_BEFORE, BEFORE_NOTICE, told=HAS_DIED),
    Death(2, 0, "durable", BY_JAX_OR_BEFORE, None, told=HAS_DIED),
    Death(3, 0, "committed", BY_JAX_OR_BEFORE, None, told=HAS_DIED),
    Death(2, 0, "written", {UNSAVED}, BEFORE_NOTICE, GRACE_S, how="stop", told=WATCHDOG),
]
OF_ANOTHER = [
    Death(3, 1, "frozen", {UNSAVED}, BEFORE_NOTICE, GRACE_S, told="preempted saved=False"),
    Death(4, 2, "agreed", {UNSAVED}, BEFORE_NOTICE, GRACE_S, how="exit", told="preempted saved=False"),
    Death(3, 1, "written", {UNSAVED}, BEFORE_NOTICE, GRACE_S, told="without process 1 of 3"),
    Death(2, 1, "written", {UNSAVED}, BEFORE_NOTICE, GRACE_S, how="stop", told="without process 1 of 2"),
    # The deadline is further off than JAX waits.
    Death(
        2, 1, "agreed", {ABORTED}, BEFORE_NOTICE, HEARTBEAT_S, told=ABORT, options=BEATING | {"grace_period_s": 60.0}
    ),
    Death(3, 1, "durable", {SAVED}, None, GRACE_S, told="is committed, though the processes did not meet"),
    Death(2, 1, "committed", {SAVED}, None, GRACE_S, told="preempted saved=True"),
]


def test_death_in_training_ends_all_and_periodic_save_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(IN_TRAINING, tmp_path, monkeypatch)


def test_death_of_process_0_in_a_preemption_keeps_what_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold(OF_PROCESS_0, tmp_path, monkeypatch)


def test_next_start_salvages_what_process_0_left_when_it_died(tmp_path: Path) -> None:
    row = Death(2, 0, "durable", BY_JAX_OR_BEFORE, None)
    with start(row, tmp_path) as gang:
        survived(gang, row, died(gang[0], row))
    step = int(gang[0].wait_for_line("saves_step").split()[1])
    with Processes.start(SCRIPT, 2, arguments=[str(tmp_path), json.dumps({"steps": step})], devices=1) as again:
        for result in again.wait(90):
            assert result.code == 0, again.output()
            assert f"restored {step} value {step}.0" in result.output


def test_death_of_a_peer_in_a_preemption_keeps_what_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold(OF_ANOTHER, tmp_path, monkeypatch)


def hold(rows: Sequence[Death], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has all rows die at once, and looks at what each leaves."""
    with contextlib.ExitStack() as stack:
        gangs = [stack.enter_context(start(row, tmp_path / str(number))) for number, row in enumerate(rows)]
        died_at = [died(gang[row.who], row) for gang, row in zip(gangs, rows, strict=True)]
        for gang, row in zip(gangs, rows, strict=True):
            if row.noticed_later:
                gang[1 - row.who].signal(signal.SIGTERM)
        for gang, row, at in zip(gangs, rows, died_at, strict=True):
            try:
                survived(gang, row, at)
            except AssertionError as error:
                raise AssertionError(f"{row}\n{gang.output()}") from error
    monkeypatch.setattr(RenameCommit, "quiet_s", 0.0)  # whoever died is dead, we know
    for number, (gang, row) in enumerate(zip(gangs, rows, strict=True)):
        expected = row.restores
        if expected is None:
            expected = int(gang[row.who].wait_for_line("saves_step").split()[1])
        assert restored(tmp_path / str(number)) == expected, row


def start(row: Death, directory: Path) -> Processes:
    options = {
        "who": row.who,
        "how": row.how,
        "when": row.when,
        "grace_period_s": GRACE_S,
        "failed_s": FAILED_S,
        **row.options,
    }
    return Processes.start(SCRIPT, row.count, arguments=[str(directory), json.dumps(options)], devices=1)


def died(process: Process, row: Death) -> float:
    """When it did, or a little later."""
    process.wait_for_line("dies", timeout_s=DIES_WITHIN_S)
    return time.monotonic()


def survived(gang: Processes, row: Death, died_at: float) -> None:
    """Waits for the survivors, and then for the one that died, which may be stopped."""
    survivors = [gang[index] for index in range(row.count) if index != row.who]
    while any(process.running for process in survivors):
        if time.monotonic() > died_at + row.within_s + BUSY_S:
            for process in survivors:
                process.dump_stacks()
            gang[row.who].kill_group()
            gang.wait(30)
            raise AssertionError(f"a survivor still ran {row.within_s + BUSY_S:g} s after the death")
        time.sleep(0.01)
    if row.how == "stop":
        gang[row.who].signal(signal.SIGKILL)
    results = gang.wait(30)
    dead = results.pop(row.who)
    assert dead.code == (UNCAUGHT if row.how in ("exit", "raise") else KILLED)
    assert {result.code for result in results} <= row.ends
    assert any(row.told in result.output for result in results)


def restored(directory: Path) -> int:
    """The step that the next start restores; each one adds 1 to the state."""
    reshard = {"position": lambda _values, _index, _count: 0}
    found = engine(directory, attempt="job-1-b").restore({"w": jnp.zeros(12)}, timeout_s=30, reshard=reshard)
    assert found is not None
    np.testing.assert_array_equal(found.state["w"], np.full(12, found.step, np.float32))
    return found.step
