"""One process that saves, restores and verifies in every way, for the recording of the locks that are taken.

    locks_process.py ROOT

Each way is marked in the recording, so that the call that took a lock can be found. With more processes than one, only
the ways that several processes share are gone. The keeper is a process of its own, and recorded with this one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gracepoint
from gracepoint import checkpoint
from gracepoint.checkpoint import WriteOptions
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving.planner import SaveSettings
from gracepoint.checkpoint.steps import lease
from gracepoint.checkpoint.steps.retention import Retention
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.verification import verify
from gracepoint.deadline import Deadline
from tests.multiprocess.crash_process import make_state
from tests.multiprocess.launcher import here
from tests.multiprocess.strace import mark

TIMEOUT_S = 60.0
FORMATS = {
    "files": WriteOptions(),
    "compressed files": WriteOptions(compression="zstd"),
    "zarr 3": WriteOptions(use_zarr3=True),
    "OCDBT": WriteOptions(use_ocdbt=True),
    "compressed OCDBT": WriteOptions(use_ocdbt=True, compression="zstd"),
    "a worker process": WriteOptions(writer="worker"),
    "OCDBT by a worker process": WriteOptions(use_ocdbt=True, writer="worker"),
}


def main(root: str) -> None:
    place = here()
    place.initialize_jax(shutdown_timeout_s=5)
    top = Path(root)
    for name, options in FORMATS.items():
        steps(name, top / name, options)
    if place.process_count == 1:
        with_keeper(top)
        for name, options in FORMATS.items():
            paths(name, top, options)
            leaves(name, top / f"{name} of a handler", options)
        session(top / "session")
        manager(top / "manager")
    print("done", flush=True)


def steps(name: str, root: Path, options: WriteOptions) -> None:
    """Saves in the background, saves in an emergency, deletes a step, restores, and verifies."""
    mark(f"steps: {name}")
    gang = here().gang(name)
    engine = StepCheckpointer(
        Layout(storage_path(root)),
        gang=gang,
        attempt="job-0-a",
        retention=Retention(keep_last=1),
        settings=SaveSettings(options),
    )
    engine.save_in_background(1, make_state(1), {})
    engine.executor.wait_until_finished(TIMEOUT_S)
    deadline = Deadline.after(TIMEOUT_S, time.monotonic)
    engine.save(2, make_state(2), {}, deadline=deadline, on_stage=lambda stage: None)
    restored = engine.restore(make_state(0), timeout_s=TIMEOUT_S)
    assert restored is not None
    assert restored.step == 2
    engine.close(TIMEOUT_S)
    assert verify(root / "2").ok


def with_keeper(top: Path) -> None:
    socket = top / "keeper.sock"
    keeper = subprocess.Popen([sys.executable, "-m", "gracepoint.async_calls.keeper", str(socket)])
    try:
        until_s = time.monotonic() + TIMEOUT_S
        while not socket.exists():
            assert time.monotonic() < until_s, f"the keeper has no socket after {TIMEOUT_S:g} s"
            time.sleep(0.01)
        for ocdbt in (False, True):
            steps(f"a keeper, OCDBT {ocdbt}", top / f"kept {ocdbt}", WriteOptions(use_ocdbt=ocdbt, writer=str(socket)))
    finally:
        keeper.terminate()
        assert keeper.wait(TIMEOUT_S) == 0


def paths(name: str, top: Path, options: WriteOptions) -> None:
    """Saves to a path, replaces it, restores and verifies it."""
    mark(f"a path: {name}")
    path = top / f"path {name}"
    for step in (1, 2):
        checkpoint.save(path, make_state(step), options=options, force=True)
    assert checkpoint.restore(path, make_state(0))["n"] == 2
    assert checkpoint.restore(path)["n"] == 2
    assert verify(path).ok


def leaves(name: str, folder: Path, options: WriteOptions) -> None:
    """Saves and restores leaves by type handlers, and reads their metadata."""
    mark(f"handlers: {name}")
    if options.writer is not None:
        return  # handlers write in their own process
    infos = [checkpoint.ParamInfo("w", folder), checkpoint.ParamInfo("n", folder)]
    handlers = checkpoint.ArrayHandler(options), checkpoint.NumpyHandler(options)
    values: Iterator[Any] = iter((jnp.arange(4.0), np.arange(4)))
    for handler, info, value in zip(handlers, infos, values, strict=True):
        for future in handler.serialize([value], [info]):
            future.result(timeout=TIMEOUT_S)
    handlers[0].finalize(folder)
    for handler, info in zip(handlers, infos, strict=True):
        handler.metadata([info])
        (found,) = handler.deserialize([info])
        np.testing.assert_array_equal(found, np.arange(4))


def session(root: Path) -> None:
    """Trains twice in a session: with the lease, a cache of compiled programs, and a restore."""
    lease.BEAT_S = 0.05
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    for start in range(2):
        mark(f"session: start {start}")
        with gracepoint.attach(root, save_every_steps=1, keep_last=1, compilation_cache="on") as attached:
            state, step = attached.restore(init=jax.jit(lambda: {"w": jnp.zeros(8)}, out_shardings=sharding))
            for _ in range(2):
                step += 1
                state = jax.jit(lambda state: {"w": state["w"] + 1})(state)
                attached.step(step, state)
                time.sleep(3 * lease.BEAT_S)  # the lease is renewed meanwhile


def manager(root: Path) -> None:
    mark("a manager")
    with checkpoint.CheckpointManager(root, keep_last=1) as managed:
        for step in (1, 2):
            managed.save(step, make_state(step), force=True)
        managed.wait_until_finished()
        managed.restore(2, like=make_state(0))


if __name__ == "__main__":
    main(*sys.argv[1:])
    if here().process_count > 1:
        jax.distributed.shutdown()
