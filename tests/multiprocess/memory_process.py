"""Saves as in an emergency where hardly any memory is left, and restores.

Arguments: the directory, and the file of a control group that this process is to join; none: its own limits are set.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from gracepoint.checkpoint import WriteOptions, verify
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.deadline import Deadline
from gracepoint.process_group import SingleProcess
from tests.multiprocess.launcher import here

MIB = 1 << 20
STATE_BYTES = 192 * MIB
#: Of address space that is written to: the stacks of the writer's threads, and nothing as large as the state.
LEFT_BYTES = 112 * MIB
WAYS = {
    "direct": WriteOptions(target_chunk_bytes=8 * MIB),
    "page cache": WriteOptions(target_chunk_bytes=8 * MIB),
    "TensorStore": WriteOptions(target_chunk_bytes=8 * MIB, express=False),
}


def data_bytes() -> int:
    """What counts against the limit: private memory that can be written to."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData:")]
    return int(line.split()[1]) * 1024


def leave_little_memory() -> None:
    """Limits this process to what it has and ``LEFT_BYTES``, so that there is no memory for a copy of the state.

    Memory that was counted may be given back a moment later: stacks of threads that have ended, and what JAX frees in
    the background. Then the limit is set again.
    """
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + LEFT_BYTES, resource.RLIM_INFINITY))
        try:
            bytearray(STATE_BYTES)
        except MemoryError:
            print("there is no memory for a copy", flush=True)
            return


def main(directory: str) -> None:
    here().initialize_jax()
    sharding = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), jax.sharding.PartitionSpec("x"))
    shape = (STATE_BYTES // 4 // 1024, 1024)
    state = jax.block_until_ready({"w": jax.device_put(jnp.full(shape, 7.0), sharding)})
    engine = StepCheckpointer(Layout(storage_path(directory)), gang=SingleProcess(), attempt="job-0-a")
    engine.prepare(state, in_background=False)
    leave_little_memory()
    saved = engine.save(1, state, {}, deadline=Deadline.after(120.0, time.monotonic), on_stage=print)
    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    restored = engine.restore(state, timeout_s=120.0)
    assert restored is not None
    assert bool((restored.state["w"] == state["w"]).all())
    print("saved", saved.bytes, flush=True)
    engine.close(60)


def main_in_group(directory: str, procs: Path) -> None:
    here().initialize_jax()
    shape = (STATE_BYTES // 4 // 1024, 1024)
    state = {"w": jnp.full(shape, 7.0)}
    for name, options in WAYS.items():
        engine = StepCheckpointer(
            Layout(storage_path(f"{directory}/{name}")),
            gang=SingleProcess(),
            attempt="job-0-a",
            settings=SaveSettings(options),
        )
        engine.prepare(state, in_background=False)
        if name == "page cache":
            for device in engine.executor._writer._express._direct:
                engine.executor._writer._express._direct[device] = False
        procs.write_text(str(os.getpid()))
        saved = engine.save(1, state, {}, deadline=Deadline.after(120.0, time.monotonic), on_stage=lambda stage: None)
        print("saved", name, saved.bytes, flush=True)
        (procs.parent.parent / "cgroup.procs").write_text(str(os.getpid()))
        engine.close(60)
        report = verify(f"{directory}/{name}/1")
        assert report.ok, report
    procs.write_text(str(os.getpid()))
    print("a copy is the end", flush=True)
    bytearray(STATE_BYTES)
    print("there was memory for a copy", flush=True)


if len(sys.argv) > 2:
    main_in_group(sys.argv[1], Path(sys.argv[2]))
else:
    main(sys.argv[1])
