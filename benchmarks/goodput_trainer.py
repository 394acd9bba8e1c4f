"""A process of ``goodput_account``: it tells the operator of its time as the library does, and passes it by sleeping.

    python -m benchmarks.goodput_trainer ORDERS

``ORDERS`` is JSON; see ``Orders``. Process 0 trains: it loads no JAX, but sends the library's own messages over the
library's own channel. Process 1 waits for its end. Threads: those of the channel, which end with the process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from gracepoint import machine
from gracepoint.preemption.forecast import Figures
from gracepoint.preemption.reporter import Progress, Reporter
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.receivers.operator import Operator
from gracepoint.settings import Settings
from gracepoint.wire.messages import Phase

EXIT_CODE = 77
_EVERY_STEPS = 40
_FIGURES = Figures(state_bytes=1, step_s=0.05, wait_s=0.05, drain_s=0.05, save_s=0.3)


@dataclasses.dataclass(frozen=True)
class Orders:
    """What a process does. Durations are in seconds.

    Attributes:
        parent: Identifier of the program's process. If it is gone, this process ends.
        folder: Where the processes of the run write what they do.
        settings: Of the library, by the name of the field.
        index: The process.
        life: Counts the starts of the gang.
        restored: The step of the checkpoint. 0: there is none.
        note: The note of that checkpoint.
        join_s: Until all have joined.
        restore_s: Until the state is restored.
        compile_s: Until the first step is done.
        pace_s: Of a step.
        save_s: Of a save.
        exit_s: From the last report until the process ends.
    """

    parent: int
    folder: str
    settings: dict[str, Any]
    index: int
    life: int
    restored: int
    note: str | None
    join_s: float
    restore_s: float
    compile_s: float
    pace_s: float
    save_s: float
    exit_s: float


@dataclasses.dataclass(frozen=True)
class _Gang:
    process_index: int
    process_count: int


def main() -> None:
    """Trains until a notice comes."""
    began_s, age_s = time.monotonic(), machine.process_age_s()
    orders = Orders(**json.loads(sys.argv[1]))
    if orders.index == 0:
        _train(orders, began_s, age_s)
    else:
        left = Path(orders.folder, f"left.{orders.life}")
        while not left.exists() and os.getppid() == orders.parent:
            time.sleep(0.02)
    time.sleep(orders.exit_s)
    os._exit(EXIT_CODE)


def _train(orders: Orders, began_s: float, age_s: float | None) -> None:
    folder, settings, clock = Path(orders.folder), Settings(**orders.settings), time.monotonic
    words = (folder / f"words.{settings.pod_name}.jsonl").open("a", buffering=1)
    losses = (folder / "steps.jsonl").open("a", buffering=1)

    def say(message: str) -> None:
        words.write(json.dumps({"unix_s": time.time(), "message": message}) + "\n")

    def did(step: int) -> None:
        losses.write(json.dumps({"step": step, "unix_s": time.time()}) + "\n")

    time.sleep(orders.join_s)
    gang, session = cast(ProcessGroup, _Gang(0, 2)), f"s-{orders.life}"
    mailbox, operator = Mailbox(clock), Operator(settings, clock)
    say("attached process=0")
    time_spent = TimeSpent(clock, began_s, age_s)
    reporter = Reporter(operator.sender, settings, session, gang, mailbox, time_spent)
    operator.subscribe(session, gang, mailbox, "0", spent=time_spent.spent)
    time.sleep(orders.restore_s)
    step = orders.restored
    reporter.resumption(step or None, training=False, note=orders.note)
    say(f"resumed restored_step={step or None} training=False")
    time.sleep(orders.compile_s)
    step += 1
    did(step)
    reporter.resumption(orders.restored or None, training=True)
    while (notice := mailbox.current) is None:
        if os.getppid() != orders.parent:
            return  # the program was killed
        time.sleep(orders.pace_s)
        step += 1
        did(step)
        if step % _EVERY_STEPS == 0:
            time_spent.stops(step)
            time.sleep(orders.save_s)
            _commit(folder, step, None)
            time_spent.goes_on(periodic=True)
            reporter.forecast(_FIGURES, 1.25, step, step)
    say("noticed")
    time.sleep(0.3)  # the agreement
    _save(orders, folder, reporter, step, notice)
    say("preempted saved=True")
    (folder / f"left.{orders.life}").touch()
    reporter.flush(3.0)


def _save(orders: Orders, folder: Path, reporter: Reporter, step: int, notice: Disruption) -> None:
    reporter.time_spent.stops(step)
    reporter.report(Phase.DRAINED, Progress(ordinal=step, step=step), notice)
    note = reporter.note(notice, leaves=True)
    time.sleep(orders.save_s)
    _commit(folder, step, note)
    reporter.time_spent.left()
    reporter.report(Phase.COMMITTED, Progress(ordinal=step, step=step, steps_lost=0, seconds_to_spare=1.0), notice)


def _commit(folder: Path, step: int, note: str | None) -> None:
    partial = folder / "checkpoint.partial"
    partial.write_text(json.dumps({"step": step, "note": note}))
    os.replace(partial, folder / "checkpoint")


if __name__ == "__main__":
    main()
