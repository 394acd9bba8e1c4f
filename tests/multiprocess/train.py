"""A small training script, as a user would write it, run by the tests of this folder in real processes.

Arguments: the checkpoint directory and a JSON object of options. Prints a line for each thing that a test waits
for or checks. The state is sharded over all processes' devices, donated at each step, and computed
asynchronously; its value tells which steps it has seen.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time

from tests.multiprocess.launcher import here

OPTIONS = {
    "steps": 100_000,  # trained in all
    "pace_s": 0.01,  # the host's time for one step
    "save_every_steps": 0,
    "grace_period_s": 20.0,
    "finally": "",  # what user code does when it is left: "sleep", "raise", "shutdown"
    "stall": None,  # [process, step, seconds]: the host is stuck there
    "kill_self_in_freeze": None,  # a process that dies when it is held for the first time
    "fail": None,  # [process, step]: user code raises there
    "fail_host_state": None,  # process whose host state cannot be had from its fifth step on
    "fail_state": None,  # process whose state cannot be saved from its fifth step on
    "step_offset": None,  # process that counts its steps wrongly
    "with": False,  # as a context manager
    "sync_every": 1,  # sync points at every k-th step
    "evaluate_every": 0,  # steps between evaluations, which poll
    "failed_s": None,  # how long a process may take to end that fails by itself
    **json.loads(sys.argv[2]),
}


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    place = here()
    if "GRACEPOINT_PROCESS_COUNT" not in os.environ:
        place.initialize_jax()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint
    from gracepoint.preemption import exit

    if OPTIONS["failed_s"] is not None:
        exit.FAILED_S = OPTIONS["failed_s"]
    directory = sys.argv[1]
    session = gracepoint.attach(
        directory,
        save_every_steps=OPTIONS["save_every_steps"],
        grace_period_s=OPTIONS["grace_period_s"],
    )
    print("session", session.nonce, flush=True)
    me = jax.process_index()
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharded = NamedSharding(mesh, PartitionSpec("x"))
    replicated = NamedSharding(mesh, PartitionSpec())
    state = {
        "w": jax.make_array_from_callback((48, 16), sharded, lambda i: np.zeros((48, 16), np.float32)[i]),
        "count": jax.make_array_from_callback((), replicated, lambda i: np.zeros((), np.int32)),
    }

    @jax.jit
    def total(state):  # type: ignore[no-untyped-def]
        return jnp.sum(state["w"])

    def update(state):  # type: ignore[no-untyped-def]
        mean = jnp.mean(state["w"])  # a collective: processes that part would hang here
        return {"w": state["w"] * 0.5 + mean + 1.0, "count": state["count"] + 1}

    train_step = jax.jit(update, donate_argnums=0)
    data = {"position": 0}

    def get_data() -> dict[str, int]:
        if OPTIONS["fail_host_state"] == me and data["position"] > 4:
            raise RuntimeError("the iterator cannot tell where it is")
        return dict(data, process=me)

    session.host_state("data", get_data, lambda value: data.update(value))
    state, step = session.restore(like=state)
    print("restored", step, data, flush=True)
    if step:
        print("value", int(state["count"]), float(total(state)), flush=True)

    def evaluate() -> None:
        for _ in range(5):
            total(state)
            session.poll(state)

    def run() -> None:
        nonlocal state, step
        while step < OPTIONS["steps"]:
            state = train_step(state)
            data["position"] += 1
            step += 1
            misbehave(me, step)
            time.sleep(OPTIONS["pace_s"])
            if step % OPTIONS["sync_every"] == 0:
                broken = {"bad": object()} if OPTIONS["fail_state"] == me and step > 4 else {}
                session.step(step + (1 if OPTIONS["step_offset"] == me else 0), state | broken)
            if OPTIONS["evaluate_every"] and step % OPTIONS["evaluate_every"] == 0:
                evaluate()
            if step % 10 == 0 or OPTIONS["pace_s"] > 0.3:
                print("training", step, flush=True)

    try:
        if OPTIONS["with"]:
            with session:
                run()
        else:
            run()
            session.close()
    except gracepoint.Preempted as preempted:
        print("preempted", preempted.saved, preempted.step, preempted.reason, flush=True)
        if preempted.saved:
            print("value", int(state["count"]), float(total(state)), flush=True)
        raise
    finally:
        print("finally", step, flush=True)
        if OPTIONS["finally"] == "sleep":
            time.sleep(60)
        elif OPTIONS["finally"] == "raise":
            raise ValueError("the user's clean-up is broken")
        elif OPTIONS["finally"] == "shutdown":
            jax.distributed.shutdown()
    print("done", step, flush=True)


def misbehave(me: int, step: int) -> None:
    if OPTIONS["stall"] is not None:
        process, at, seconds = OPTIONS["stall"]
        if (process, at) == (me, step):
            print("stalled", step, flush=True)
            time.sleep(seconds)
    if OPTIONS["fail"] == [me, step]:
        raise RuntimeError("the user's own error")
    if OPTIONS["kill_self_in_freeze"] == me:
        from gracepoint.preemption.observer import PreemptionObserver

        def die(*_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        PreemptionObserver._opened = die  # type: ignore[assignment,method-assign]


main()
