"""Single parts of the library in real JAX processes; the first argument says which."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import sys
import time

import numpy as np
import pytest

from tests.multiprocess.launcher import here


def store() -> None:
    """JAX's own store keeps the contract, in every process."""
    from jax._src import distributed

    from gracepoint.multihost import JaxStore
    from tests.unit.multihost.fakes.store_contract import check

    check(JaxStore(distributed.global_state.client, "contract"), f"process-{here().process_index}")


def barrier() -> None:
    """Barriers, gather and broadcast on JAX's own store; the last one lacks process 2."""
    from gracepoint.errors import BarrierFailed, BarrierTimeout
    from gracepoint.multihost import meet
    from gracepoint.settings import Settings

    meeting = meet(Settings())
    gang, me = meeting.gang, meeting.gang.process_index
    assert [m.process_index for m in meeting.members] == [0, 1, 2]
    assert meeting.me.service_id == here().process_index
    assert len(set(gang.gather("attempts", meeting.attempt, timeout_s=30))) == 1
    assert gang.gather("g", f"v{me}", timeout_s=30) == ["v0", "v1", "v2"]
    assert gang.broadcast("b", "word" if me == 0 else None, timeout_s=30) == "word"
    began = time.monotonic()
    for number in range(20):
        gang.barrier(f"quick/{number}", timeout_s=30)
    print(f"barrier_ms {(time.monotonic() - began) / 20 * 1e3:.2f}")
    if me == 2:
        gang.fail("failing", ValueError("disk full"))
    else:
        with pytest.raises(BarrierFailed, match="process 2 reported ValueError: disk full"):
            gang.barrier("failing", timeout_s=30)
        with pytest.raises(BarrierTimeout) as caught:
            gang.barrier("lacking", timeout_s=1.0)
        assert caught.value.missing == (2,)
    gang.barrier("end", timeout_s=30)


def meet_twice() -> None:
    """Sessions one after the other in the same processes do not hear each other."""
    import gracepoint

    for _ in range(2):
        with gracepoint.attach(sys.argv[2]) as session:
            for step in range(1, 4):
                session.step(step, {"w": np.zeros(4)})


def no_close() -> None:
    """The script ends without close()."""
    import gracepoint

    session = gracepoint.attach(sys.argv[2])
    session.step(1, {"w": np.zeros(4)})


def jax_notice() -> None:
    """Training code that asks JAX itself hears of a SIGTERM though our handler has displaced JAX's."""
    from jax.experimental import multihost_utils

    import gracepoint

    session = gracepoint.attach(sys.argv[2])
    if here().process_index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    step = 0
    deadline = time.monotonic() + 30
    while not multihost_utils.reached_preemption_sync_point(step):
        step += 1
        time.sleep(0.01)
        assert time.monotonic() < deadline, "JAX never said so"
    print("jax said so", step)
    sys.stdout.flush()
    for number in itertools.count(1):  # ours may come a little later than JAX's
        session.step(number, {"w": np.zeros(4)})
        time.sleep(0.01)
        assert time.monotonic() < deadline, "we never said so"


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    gc.unfreeze()  # the interpreter's end, which these test, also looks through what was there at the fork
    here().initialize_jax()
    globals()[sys.argv[1]]()
    print("done")
