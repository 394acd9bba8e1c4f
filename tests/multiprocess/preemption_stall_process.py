"""Trains until a preemption. One process stops itself between the notice and the commit.

python preemption_stall_process.py <folder> <which process> <where> <how>

``where`` is ``freeze``: when the process hears that it begins, so that the processes cannot agree; or a stage of the
preemption (``progress.STAGES``): when the process has reached it. ``how`` is ``stops``: by a signal; or ``hangs``: in C
code that holds the interpreter lock, so that only threads without Python go on, as those of the coordination service.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import signal
import sys
import time

from tests.multiprocess.launcher import here

FOLDER, PROCESS, WHERE, HOW = sys.argv[1:]
_GIVE_UP_S = 120


def stop(where: str) -> None:
    """Stops this process for good if it is its turn."""
    if where == WHERE and here().process_index == int(PROCESS):
        print(f"{HOW} in {where}", flush=True)
        if HOW == "hangs":
            ctypes.PyDLL(None).sleep(_GIVE_UP_S)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint
    from gracepoint.multihost.ledger import Event, Opened
    from gracepoint.preemption.observer import PreemptionObserver
    from gracepoint.preemption.reporter import Stages

    mark = Stages.mark

    def mark_and_stop(stages: Stages, stage: str) -> None:
        mark(stages, stage)
        stop(stage)

    heard = PreemptionObserver.heard

    def stop_and_hear(observer: PreemptionObserver, event: Event) -> None:
        if isinstance(event, Opened):
            stop("freeze")
        heard(observer, event)

    PreemptionObserver.heard = stop_and_hear  # type: ignore[method-assign,assignment]
    Stages.mark = mark_and_stop  # type: ignore[method-assign,assignment]
    session = gracepoint.attach(FOLDER, grace_period_s=30.0)
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
    state = {"w": jax.make_array_from_callback((12,), sharding, lambda i: np.arange(12.0)[i])}
    state, begun = session.restore(like=state)
    step = jax.jit(lambda state: {"w": state["w"] + jnp.sum(state["w"]) * 1e-3})
    give_up_at_s = time.monotonic() + _GIVE_UP_S
    for number in itertools.count(begun + 1):
        state = step(state)
        jax.block_until_ready(state)
        session.step(number, state)
        if number == begun + 8:  # so that it is known how long a step takes
            print("trains", flush=True)
        assert time.monotonic() < give_up_at_s, "the test never ended it"
        time.sleep(0.02)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    here().initialize_jax()
    main()
