"""One process of a gang that sends a snapshot at each step, until it is killed or has done its steps.

    snapshot_kills_process.py ROOT ATTEMPT STEPS MIB

MIB is the size of the whole state, whatever the number of processes.
Its ``ServerPlacement`` is in the variable ``TEST_PLACEMENT``. Half of the state never changes. The rest is a generator
of pseudo-random numbers, of which any step can be computed at once: so each bit of a restored state is checked.
It prints ``restored STEP`` (-1: nothing), ``passed STEP`` when a step is trained, and ``ended`` with a checksum.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.memory_snapshots import MemorySettings
from gracepoint.checkpoint.saving.schedule import SaveSchedule
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checksum import crc32
from gracepoint.snapshots.snapshot_servers import ServerAt, ServerPlacement, SnapshotServers
from tests.multiprocess.launcher import here

PLACEMENT = "TEST_PLACEMENT"
_FACTOR, _SUM = 1664525, 1013904223
_TIMEOUT_S = 120.0


def values(step: int, start: int, stop: int) -> Any:
    """The changing values of a step, at some positions: ``x -> FACTOR * x + SUM`` for each step, modulo 2 ** 32."""
    factor, added = 1, 0
    for _ in range(step):
        factor, added = factor * _FACTOR & 0xFFFFFFFF, (added * _FACTOR + _SUM) & 0xFFFFFFFF
    return np.arange(start, stop, dtype=np.uint32) * np.uint32(factor) + np.uint32(added)


def state_at(step: int, size: int) -> Any:
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def place(at_step: int) -> jax.Array:
        def own(index: Any) -> Any:
            start, stop, _ = index[0].indices(size)
            return values(at_step, start, stop)

        return jax.make_array_from_callback((size,), NamedSharding(mesh, PartitionSpec("x")), own)

    return {"frozen": place(0), "w": place(step), "step": step}


def check(state: Any, step: int, size: int) -> int:
    """Fails unless all bits of this process are those of one step. Returns their checksum."""
    checksum = 0
    for name, at_step in (("frozen", 0), ("w", step)):
        for shard in state[name].addressable_shards:
            start, stop, _ = shard.index[0].indices(size)
            found = np.asarray(shard.data)
            assert np.array_equal(found, values(at_step, start, stop)), f"torn: {name} of step {step}"
            checksum = crc32(found.tobytes(), checksum)
    assert state["step"] == step
    return checksum


def main(root: str, attempt: str, steps: str, mib: str) -> None:
    place = here()
    place.initialize_jax(shutdown_timeout_s=5)
    size = (int(mib) << 20) // 8 // 12 * 12  # of two arrays of four bytes each, which 3 and 4 processes can divide
    fields = json.loads(os.environ[PLACEMENT])
    write, read = (tuple(ServerAt(*each) for each in fields.pop(name)) for name in ("write", "read"))
    servers = SnapshotServers(ServerPlacement(**fields, write=write, read=read))
    engine = StepCheckpointer(
        Layout(storage_path(root)),
        gang=place.gang(attempt),
        attempt=attempt,
        memory=MemorySettings(servers, SaveSchedule(every_steps=1)),
    )
    restored = engine.restore(
        state_at(0, size), timeout_s=_TIMEOUT_S, reshard={"at": lambda values, index, count: values[index]}
    )
    step = -1 if restored is None else restored.step
    if restored is not None:
        assert restored.from_memory
        check(restored.state, step, size)
    print(f"restored {step}", flush=True)
    memory = engine.memory
    assert memory is not None
    while step < int(steps):
        step += 1
        state = state_at(step, size)
        until_s = time.monotonic() + _TIMEOUT_S
        while memory.busy and time.monotonic() < until_s:  # as if a step took longer than a snapshot
            time.sleep(0.001)
        print(f"passed {step}", flush=True)
        if memory.interval.is_due(step) and memory.begins(step, sync_point=step):
            memory.begin(step, state, {"at": step})
        else:
            print(f"skipped {step}: {memory.skips.reason}", flush=True)
    print(f"ended {check(state, step, size):08x}", flush=True)
    engine.close(_TIMEOUT_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
