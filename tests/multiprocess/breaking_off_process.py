"""A training process whose loop breaks off, or leaves early; run by test_breaking_off.py.

    breaking_off_process.py DIRECTORY OPTIONS

OPTIONS is a JSON object, see below. Batches come from a process in the same process group, which a signal to the group
ends, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.multiprocess.launcher import here

OPTIONS = {
    "with": True,  # a context manager; False: not; "exits": not, and errors are exits with code 0
    "together": False,  # whether a step needs all processes, and donates its state
    "waits_after": 0,  # the step after which process 0 waits until it knows of a notice, for which process 1 waits
    "group": [],  # processes that get SIGTERM with their whole group after step 8
    "leaves": None,  # [process, how]: after step 20, or "before restore"
    "silent": False,  # whether the batches just end when the process that makes them is gone
    "shielded": False,  # whether the process that makes the batches leaves the group
    "handler": "",  # what a SIGTERM handler from before attach does
    **json.loads(sys.argv[2]),
}
SIGNALLED_AFTER, LEAVES_AFTER = 8, 20

#: Makes a batch when it is asked for one.
FEEDER = "import sys\nfor line in sys.stdin: print('batch', flush=True)"
WAIT_S = 60.0


class Loader:
    """Reads batches from its process."""

    def __init__(self) -> None:
        shield = "import gracepoint; gracepoint.leave_process_group()\n" if OPTIONS["shielded"] else ""
        command = [sys.executable, "-c", shield + FEEDER]
        self._feeder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)

    def next(self) -> bool:
        """Gets a batch. False if there is none any more."""
        assert self._feeder.stdin is not None
        assert self._feeder.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._feeder.stdin.write(b"next\n")
        if self._feeder.stdout.readline():
            return True
        if OPTIONS["silent"]:
            return False
        raise RuntimeError("the loader's worker is gone")

    def close(self) -> None:
        self._feeder.kill()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("what this process waits for did not come")
        time.sleep(0.005)


def leave(how: str, session: Any) -> None:
    print("leaves", flush=True)
    match how:
        case "close":
            session.close()
            sys.exit(0)
        case "exit" | "before restore":
            sys.exit(0)
        case "error":
            raise ValueError("the user's own error")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    place = here()
    place.initialize_jax(shutdown_timeout_s=10)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint
    from gracepoint.session import sync_points

    sync_points._LINGER_S = sync_points._MOST_S = WAIT_S  # however slow the machine is
    me = place.process_index
    match OPTIONS["handler"]:
        case "exit":
            signal.signal(signal.SIGTERM, lambda *_: (print("theirs", flush=True), sys.exit(0)))
        case "hard exit":
            signal.signal(signal.SIGTERM, lambda *_: (print("theirs", flush=True), os._exit(0)))
    session = gracepoint.attach(sys.argv[1], grace_period_s=20)
    leaves = OPTIONS["leaves"][1] if OPTIONS["leaves"] is not None and OPTIONS["leaves"][0] == me else ""
    if leaves == "before restore":
        leave(leaves, session)
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), PartitionSpec("x"))
    zeros = np.zeros((12,), np.float32)
    state = {"w": jax.make_array_from_callback(zeros.shape, sharding, lambda index: zeros[index])}
    alone = jax.jit(lambda state: {"w": state["w"] + 1.0})
    together = jax.jit(lambda state: {"w": state["w"] + 1.0 + 0.0 * jnp.sum(state["w"])}, donate_argnums=0)
    train_step = together if OPTIONS["together"] else alone
    state, step = session.restore(like=state)
    loader = Loader()
    waits = Path(f"{sys.argv[1]}.waits")

    def train() -> None:
        nonlocal state, step
        while loader.next():
            state = train_step(state)
            jax.block_until_ready(state)
            step += 1
            session.step(step, state)
            if me == 0 and step == OPTIONS["waits_after"]:
                waits.touch()
                wait_until(lambda: session.notice is not None)
            if step == SIGNALLED_AFTER and me in OPTIONS["group"]:
                if OPTIONS["waits_after"]:
                    wait_until(waits.exists)
                print("at step", step, flush=True)
                os.kill(0, signal.SIGTERM)
            if step == LEAVES_AFTER and leaves:
                leave(leaves, session)

    # As a real loop: what it holds lives in the frame of a function, which an exit without an error leaves.
    try:
        if OPTIONS["with"] is True:
            with session:
                train()
        else:
            train()
    except RuntimeError as error:
        if OPTIONS["with"] != "exits":
            raise
        print("ends by itself", error, flush=True)
        sys.exit(0)
    finally:
        loader.close()


if __name__ == "__main__":
    main()
