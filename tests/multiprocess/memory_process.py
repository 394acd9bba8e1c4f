"""Saves as in an emergency where hardly any memory is left, and restores; the argument is the directory."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from gracepoint.checkpoint import Checkpointer
from gracepoint.gang import SingleProcess
from tests.multiprocess.launcher import here

MIB = 1 << 20
STATE_BYTES = 192 * MIB
#: Of address space that is written to: the stacks of the writer's threads, and nothing as large as the state.
LEFT_BYTES = 112 * MIB


def data_bytes() -> int:
    """What counts against the limit: private memory that can be written to."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024


def main(directory: str) -> None:
    here().initialize_jax()
    sharding = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), jax.sharding.PartitionSpec("x"))
    shape = (STATE_BYTES // 4 // 1024, 1024)
    state = {"w": jax.device_put(jnp.full(shape, 7.0), sharding)}
    engine = Checkpointer(directory, gang=SingleProcess(), attempt="job-0-a")
    engine.prepare(state, in_background=False)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + LEFT_BYTES, resource.RLIM_INFINITY))
    try:
        bytearray(STATE_BYTES)
    except MemoryError:
        print("there is no memory for a copy", flush=True)
    saved = engine.save(1, state, {}, timeout_s=120.0, on_stage=print)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    restored = engine.restore(state, timeout_s=120.0)
    assert restored is not None
    assert bool((restored.state["w"] == state["w"]).all())
    print("saved", saved.bytes, flush=True)
    engine.close(60)


main(sys.argv[1])
