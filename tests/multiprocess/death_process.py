"""A training process that dies as it is told to; run by test_death.py.

    death_process.py DIRECTORY OPTIONS

OPTIONS is a JSON object, see below. The state is sharded over all processes, and each step is a collective: who lives
on cannot train alone.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tests.multiprocess.launcher import here

OPTIONS = {
    "who": None,  # the process that dies
    "how": "kill",  # or "stop", "exit", "raise"
    "when": "training",  # or one of the points below
    "steps": 100_000,
    "grace_period_s": 20.0,
    "heartbeat_s": 100,
    "recoverable": False,
    "failed_s": None,  # how long a process may take to end that fails by itself
    **json.loads(sys.argv[2]),
}
#: Periodic saves; half-way to the next one is the last one committed.
SAVE_EVERY = 10
#: The step after which ``who`` dies where ``when`` is "training": nobody gets further than the next one.
DIES_AFTER = 15
#: All have passed the step before, and so know which step was committed last.
NOTICED_AFTER = 26
_COMMITTED_WITHIN_S = 60.0


def die() -> None:
    print("dies", flush=True)
    match OPTIONS["how"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(1)
        case "raise":
            raise RuntimeError("the user's own error")


def wait_until_durable_everywhere() -> None:
    """Nobody can commit before this process has met the others, and the step is whole all the same."""
    deadline = time.monotonic() + OPTIONS["grace_period_s"]
    while len(list(Path(sys.argv[1]).glob("*gracepoint-tmp*/done.process_*.json"))) < here().process_count:
        if time.monotonic() > deadline:
            raise TimeoutError("the other processes wrote no done-records")
        time.sleep(0.01)


def die_at(point: str) -> None:
    """Puts the death where it belongs; "training" is the loop's."""
    from gracepoint.checkpoint.engine import StepCheckpointer
    from gracepoint.multihost.protocol import Member
    from gracepoint.preemption.emergency_save import EmergencySave

    save: Any = StepCheckpointer.save

    def save_until(
        self: StepCheckpointer, step: int, *args: Any, on_stage: Callable[[str], None], **options: Any
    ) -> Any:
        print("saves_step", step, flush=True)

        def reached(stage: str) -> None:
            on_stage(stage)
            if stage == point:
                if stage == "durable":
                    wait_until_durable_everywhere()
                die()

        return save(self, step, *args, on_stage=reached, **options)

    def publish(*_: object) -> Iterator[None]:
        die()
        yield

    match point:
        case "frozen":  # training is held here, and the others do not know where
            Member._publish = publish  # type: ignore[assignment,method-assign]
        case "agreed":  # all have come to the agreed point, and nothing is written yet

            def drain(*_: object) -> NoReturn:
                die()
                raise AssertionError("it lives on")

            EmergencySave._drain = drain  # type: ignore[assignment,method-assign]
        case "written" | "durable" | "committed":  # in the save; after the done-record; after the commit
            StepCheckpointer.save = save_until  # type: ignore[method-assign]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    place = here()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint
    from gracepoint import multihost
    from gracepoint.preemption import exit

    multihost.initialize(
        place.coordinator,
        place.process_count,
        place.process_index,
        heartbeat_timeout_seconds=OPTIONS["heartbeat_s"],
        recoverable=OPTIONS["recoverable"],
    )
    if OPTIONS["failed_s"] is not None:
        exit.FAILED_S = OPTIONS["failed_s"]
    dying = OPTIONS["who"] == place.process_index
    if dying:
        die_at(OPTIONS["when"])
    session = gracepoint.attach(sys.argv[1], save_every_steps=SAVE_EVERY, grace_period_s=OPTIONS["grace_period_s"])
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
    zeros = np.zeros((12,), np.float32)
    state = {"w": jax.make_array_from_callback(zeros.shape, sharding, lambda index: zeros[index])}
    train_step = jax.jit(lambda state: {"w": state["w"] + 1.0 + 0.0 * jnp.sum(state["w"])}, donate_argnums=0)
    step = 0

    session.host_state("position", lambda: step, lambda _: None, lambda _values, _index, _count: 0)
    state, step = session.restore(like=state)
    print("restored", step, "value", float(state["w"].addressable_data(0)[0]), flush=True)
    with session:
        while step < OPTIONS["steps"]:
            state = train_step(state)
            step += 1
            time.sleep(0.01)
            session.step(step, state)
            if step % SAVE_EVERY == SAVE_EVERY // 2:
                session._checkpointer.executor.wait_until_finished(_COMMITTED_WITHIN_S)
            if OPTIONS["when"] == "training":
                if dying and step == DIES_AFTER:
                    die()
            elif step == NOTICED_AFTER and place.process_index == 0:
                jax.block_until_ready(state)  # the others have begun this step
                os.kill(os.getpid(), signal.SIGTERM)
    print("done", step, flush=True)


if __name__ == "__main__":
    main()
