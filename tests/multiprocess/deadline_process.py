"""Trains through one scenario of the deadline plan after the other, each in a drill, and says where it is.

Arguments: the checkpoint directory, and a JSON list of scenarios. Each begins with a periodic save, of which the
scenario says how the storage takes it; then ``ready <number> <step>`` is printed, and training goes on until the test
has sent a notice and the drill has ended. What saves have been like is learnt from the file beside the checkpoints.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests import limits
from tests.multiprocess.launcher import here
from tests.slow_storage import SlowStorage

SIDE = 512
STATE_BYTES = SIDE * SIDE * 4 + 4
#: So much slower than a memory, and so fast that a test need not wait for it.
SLOWLY_BYTES_PER_S = 4e6
PATIENCE_S = 60.0
# Less than a chunk of the state, more than the log of the process.
_FILE_BYTES = 49 * 4096


def main(directory: str, scenarios: list[dict[str, Any]]) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s", stream=sys.stdout)
    here().initialize_jax()
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    import gracepoint
    from gracepoint.checkpoint.storage.locations import storage_path
    from gracepoint.deadline import SnapshotState
    from gracepoint.preemption.reporter import EpochProgress

    epochs: list[EpochProgress] = []
    make_epoch = EpochProgress.__init__

    def note_epoch(epoch: EpochProgress, *arguments: Any) -> None:
        make_epoch(epoch, *arguments)
        epochs.append(epoch)

    EpochProgress.__init__ = note_epoch  # type: ignore[method-assign,assignment]
    storage = SlowStorage(setattr)
    # All steps are kept: what is deleted beside training would make room on the full disk.
    session = gracepoint.attach(directory, grace_period_s=30.0, keep_last=100)
    engine = session._checkpointer
    me = jax.process_index()
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    sharded, replicated = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    shape = (SIDE, SIDE)
    state = {
        "w": jax.make_array_from_callback(shape, sharded, lambda i: np.zeros(shape, np.float32)[i]),
        "count": jax.make_array_from_callback((), replicated, lambda i: np.zeros((), np.int32)),
    }
    update = jax.jit(lambda s: {"w": s["w"] * 0.5 + jnp.mean(s["w"]) + 1.0, "count": s["count"] + 1}, donate_argnums=0)
    state, step = session.restore(like=state)
    print("restored", step, int(state["count"]), flush=True)
    due: set[int] = set()
    full: list[Path] = []  # the file that takes all space
    engine.save_interval.is_due = lambda step: step in due  # type: ignore[method-assign]

    def train() -> None:
        nonlocal state, step
        state = update(state)
        step += 1
        session.step(step, state)
        time.sleep(0.002)

    def wait_until(condition: Any, what: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s, f"{what}: {engine.executor.newest_snapshot}"
            time.sleep(0.002)

    chose = EpochProgress.chose
    after: dict[str, Any] = {}

    def chose_and_go_on(progress: EpochProgress, plan: Any) -> None:
        chose(progress, plan)
        if "storage" in after:
            take(after["storage"])

    EpochProgress.chose = chose_and_go_on  # type: ignore[method-assign,assignment]

    def take(how: str) -> None:
        """Makes this process's storage so."""
        storage.errno = errno.ENOSPC if how == "fails" else None
        storage.bytes_per_s = {"stuck": 0.0, "slow": SLOWLY_BYTES_PER_S}.get(how, math.inf)
        if how == "stuck in process 1" and me == 1:
            storage.bytes_per_s = 0.0
        if how == "full" and me == 1:
            full.append(limits.fill(Path(directory)))
        elif full:
            full.pop().unlink()
        may_not_grow = how == "may not grow in process 1" and me == 1
        limit_bytes = _FILE_BYTES if may_not_grow else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

    def state_of_snapshot() -> SnapshotState | None:
        newest = engine.executor.newest_snapshot
        return None if newest is None else newest.state

    def learn(streamed_s: float, snapshot_s: float) -> None:
        """As if saves had taken so long before."""
        rates = {"streamed": [STATE_BYTES / streamed_s], "snapshot": [STATE_BYTES / snapshot_s]}
        file = Path(directory) / f".gracepoint-throughput.{me}"
        file.write_text(json.dumps({"version": 1, "bytes_per_s": rates}))
        engine.throughput.file = storage_path(file)  # each its own, as both write at any time here
        engine.throughput.read()

    for _ in range(10):
        train()
    for number, scenario in enumerate(scenarios):
        wanted = SnapshotState(scenario["snapshot"])
        storage.only = f"/{step + 1}.gracepoint-tmp" if scenario.get("only_snapshot") else ""
        take(scenario["storage"])
        due.add(step + 1)
        train()
        wait_until(lambda wanted=wanted: state_of_snapshot() is wanted, f"the snapshot to be {wanted}")
        learn(*scenario["learnt_s"])
        after.clear()
        if "then" in scenario:
            after["storage"] = scenario["then"]
        loaded = threading.Event()
        for _ in range(2 if scenario.get("load") else 0):
            threading.Thread(target=burn, args=(loaded,), daemon=True).start()
        before = epochs[-1].number
        for _ in range(scenario.get("steps_more", 0)):
            train()
        print("ready", number, step, flush=True)
        if "steps_more" in scenario:  # and the next one never ends
            wait_until(lambda before=before: epochs[-1].number != before, "the freeze")
            take(scenario["then"])
            time.sleep(PATIENCE_S)
        while epochs[-1].number == before or not epochs[-1].ended:
            train()
        loaded.set()
        print("over", number, step, flush=True)
    session.close()


def burn(until: threading.Event) -> None:
    """Training that needs the processor, beside what saves."""
    import numpy as np

    values = np.random.default_rng(0).standard_normal(1 << 16)
    while not until.is_set():
        np.sort(values)


main(sys.argv[1], json.loads(sys.argv[2]))
