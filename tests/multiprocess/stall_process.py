"""A training loop with a collective in each step, which is watched for stalls. One process stops itself.

python stall_process.py <folder> <report|restart> <limit in seconds> <which process> <where>

``where`` is ``step``, ``periodic save``, ``restore``, ``emergency save`` (the process gets a SIGTERM then), ``worker``
(its worker process stops, and not itself), ``beside its worker`` (in a step, and its worker looks on), ``C code`` (in a
step, and it does not stop, but hangs with the interpreter lock), or ``attach``: before it meets the others. That last
run saves steps and ends.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import signal
import sys
import time
from typing import Any

from tests.multiprocess.launcher import here

FOLDER, ACTION, LIMIT_S, PROCESS, WHERE = sys.argv[1:]
ENDS = WHERE == "attach"
_GIVE_UP_S = 150
_SAVE_EVERY_STEPS = 5
#: In place of 10 s: there is no third process that could say that it makes no progress, either.
_OTHERS_S = 2.0
#: In place of 7 s.
_STORE_S = 4.0


def stop(where: str) -> None:
    """Stops this process if it is its turn; returns when it is continued. Once."""
    global WHERE
    if where == WHERE and here().process_index == int(PROCESS):
        WHERE = ""
        print(f"stops in {where}", flush=True)
        if where == "C code":
            ctypes.PyDLL(None).sleep(_GIVE_UP_S)
        else:
            os.kill(os.getpid(), signal.SIGSTOP)


def stop_the_worker_with_a_save() -> None:
    """Has the process stop its worker when it hands over its second save, which does not end before the worker goes on.

    The first save of a worker takes longer on a busy machine: it loads modules.
    """
    from gracepoint.checkpoint.saving.save_worker import SaveWorker

    hand_over, saves = SaveWorker.hand_over, itertools.count(1)

    def stop_and_hand_over(worker: SaveWorker, *arguments: Any, **options: Any) -> Any:
        global WHERE
        if next(saves) == 2 and here().process_index == int(PROCESS):
            (process,) = worker.process_ids
            os.kill(process, signal.SIGSTOP)
            print(f"stops in {WHERE} {process}", flush=True)
            WHERE = ""
        return hand_over(worker, *arguments, **options)

    changed: Any = SaveWorker
    changed.hand_over = stop_and_hand_over


def keep_what_the_worker_is_told() -> list[str]:
    """Has each beat of the heartbeat keep its stage. Returns where, the newest last."""
    from gracepoint.preemption.trainer_watch import SharedHeartbeat

    stages, beat = [""], SharedHeartbeat.beat

    def beat_and_keep(heartbeat: SharedHeartbeat, stage: str) -> None:
        beat(heartbeat, stage)
        stages.append(stage)

    changed: Any = SharedHeartbeat
    changed.beat = beat_and_keep
    return stages


def train() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint
    from gracepoint.checkpoint.restoring import restore_step
    from gracepoint.preemption import stall_watch

    watching: Any = stall_watch
    watching.StallWatch = functools.partial(stall_watch.StallWatch, others_s=_OTHERS_S)
    stall_watch._STORE_S = _STORE_S
    module: Any = restore_step
    read_into = module.read_into

    def read_or_stop(*arguments: Any, **options: Any) -> Any:
        stop("restore")
        return read_into(*arguments, **options)

    module.read_into = read_or_stop
    if WHERE == "worker":
        stop_the_worker_with_a_save()
    told = keep_what_the_worker_is_told()
    stop("attach")
    session = gracepoint.attach(
        FOLDER,
        stall_after_s=float(LIMIT_S),
        stall_action="restart" if ACTION == "restart" else "report",
        save_every_steps=_SAVE_EVERY_STEPS,
        writer="worker" if "worker" in WHERE else "thread",
    )
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
    state = {"w": jax.make_array_from_callback((12,), sharding, lambda i: np.arange(12.0)[i])}
    saving = ending = False

    def progress() -> int:
        # Each step asks for host state, too. The emergency save does so once the processes have been stopped together.
        if saving and (not ending or session._coordinator.in_epoch):
            stop("emergency save" if ending else "periodic save")
        return 0

    session.host_state("progress", progress, lambda value: None)
    state, begun = session.restore(like=state)
    step = jax.jit(lambda state: {"w": state["w"] + jnp.sum(state["w"]) * 1e-3})
    give_up_at_s = time.monotonic() + _GIVE_UP_S
    for number in itertools.count(begun + 1):
        saving = number > begun + _SAVE_EVERY_STEPS
        if saving:
            for where in ("step", "C code"):
                stop(where)
            if told[-1].startswith("training"):  # the worker knows no newer stage than that of the last beat
                stop("beside its worker")
        if WHERE == "emergency save" and number == begun + _SAVE_EVERY_STEPS + 2:
            ending = True
            if here().process_index == int(PROCESS):
                os.kill(os.getpid(), signal.SIGTERM)
        state = step(state)
        jax.block_until_ready(state)
        session.step(number, state)
        print(f"passed step {number}", flush=True)
        if ENDS and number == begun + 2 * _SAVE_EVERY_STEPS:
            return session.close()
        assert time.monotonic() < give_up_at_s, "the test never ended it"
        time.sleep(0.05)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    here().initialize_jax()
    train()
