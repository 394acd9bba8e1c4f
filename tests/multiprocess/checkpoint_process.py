"""One process of the checkpoint tests: joins the cluster and does what its arguments say, one after the other.

    checkpoint_process.py ROOT ATTEMPT ACTION...

Actions: ``save:STEP``, ``background:STEP``, ``restore:STEP`` (fails unless this step comes back bit for bit),
``restore-without-keys:STEP``, ``orbax-restore:STEP``, ``orbax-save:STEP``. What the next save or restore is to meet:
``kill:POINT:PROCESSES`` makes the named processes (``0``, ``1``, ``01``) kill themselves at a point of it,
``last:PROCESS`` is the last to come to the commit, ``hold:PROCESS:FILE`` has written its files and waits for ``FILE``,
``patience:SECONDS`` bounds a save, ``quiet:SECONDS`` makes a writer dead, ``tell-waiting`` prints when a restore waits.
"""

from __future__ import annotations

import functools
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.saving import operation
from gracepoint.checkpoint.steps import commit
from gracepoint.checkpoint.steps.commit import RenameCommit
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.posix import PosixPath
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.checkpoint.writing import chunk_writer
from gracepoint.deadline import Deadline
from gracepoint.errors import GracepointError
from gracepoint.multihost import StoreProcessGroup
from gracepoint.process_group import ProcessGroup
from tests.multiprocess.launcher import here

LAYERS = 3
SAVE_TIMEOUT_S = 3.0  # and how long a survivor waits for the dead


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))


def make_state(step: int) -> Any:
    """Returns the state of ``step``: arrays over all processes, replicated ones, and some local to each process."""

    def place(values: Any, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh(), PartitionSpec(*spec))
        array = np.asarray(values)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    rng = np.random.default_rng(step)
    return {
        "layers": [
            {
                "both": place(rng.standard_normal((16, 8)).astype(np.float32), "x", "y"),
                "columns": place(rng.standard_normal((4, 8)).astype(jnp.bfloat16), None, ("x", "y")),
                "rows": place(rng.integers(0, 99, (8, 4)), "x"),
                "replicated": place(rng.standard_normal(100).astype(np.float32)),
            }
            for _ in range(LAYERS)
        ],
        "mask": place(rng.integers(0, 2, 8).astype(bool), "y"),
        "count": place(np.int32(step)),
        "local": {"array": jnp.asarray(step), "numpy": np.full(3, step), "python": step},
    }


def with_keys(state: Any, step: int) -> Any:
    """Adds typed PRNG keys, which multi-process Orbax does not restore everywhere."""
    replicated = NamedSharding(mesh(), PartitionSpec())
    data = np.asarray(jax.random.key_data(jax.random.key(step)))
    array = jax.make_array_from_callback(data.shape, replicated, lambda index: data[index])
    return {**state, "key": jax.random.wrap_key_data(array)}


def assert_same_here(found: Any, expected: Any) -> None:
    """Compares the shards of this process bit for bit."""
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    assert structures[0] == structures[1]
    leaves = dict(jax.tree_util.tree_flatten_with_path(expected)[0])
    for path, leaf in jax.tree_util.tree_flatten_with_path(found)[0]:
        where, other = jax.tree_util.keystr(path), leaves[path]
        if isinstance(other, jax.Array) and jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        if isinstance(other, jax.Array):
            assert leaf.sharding == other.sharding, where
            for a, b in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
                assert np.asarray(a.data).tobytes() == np.asarray(b.data).tobytes(), where
        else:
            assert type(leaf) is type(other), where
            assert np.asarray(leaf).tobytes() == np.asarray(other).tobytes(), where


before_the_end: list[Callable[[], object]] = []


def die() -> None:
    for wait in before_the_end:
        wait()
    print("dying", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def around(module: Any, name: str, *, before: Callable[..., bool] | None = None, after: Any = None) -> None:
    """Makes ``module.name`` kill the process before or after a call for whose arguments the function is true."""
    real = getattr(module, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if before is not None and before(*arguments):
            die()
        result = real(*arguments, **options)
        if after is not None and after(*arguments):
            die()
        return result

    setattr(module, name, wrapped)


def is_done_record(path: StoragePath, data: bytes) -> bool:
    return path.name.startswith("done.process_")


def is_commit(source: Any, target: Any) -> bool:
    return Path(target).name.isdigit()


def is_third_chunk() -> Callable[..., bool]:
    seen = itertools.count(1)
    return lambda folders, job, chunk, *_: chunk.mine and next(seen) == 3


POINTS: dict[str, Callable[[], None]] = {
    "before any file": lambda: around(chunk_writer.ChunkWriter, "write", before=lambda *_: True),
    "in the middle of the files": lambda: around(chunk_writer, "_write_chunk", before=is_third_chunk()),
    "after the files": lambda: around(chunk_writer.ChunkWriter, "write", after=lambda *_: True),
    "before the done-record": lambda: around(PosixPath, "put", before=is_done_record),
    "after the done-record": lambda: around(PosixPath, "put", after=is_done_record),
    "before the manifest": lambda: around(commit, "_complete", before=lambda *_: True),
    "after the manifest": lambda: around(PosixPath, "put", after=lambda path, _: path.name == "_GRACEPOINT"),
    "before the rename": lambda: around(os, "rename", before=is_commit),
    "after the rename": lambda: around(os, "rename", after=is_commit),
    "after the commit": lambda: around(operation.SaveOperation, "_commit", after=lambda *_: True),
}


def main(root: str, attempt: str, *actions: str) -> None:
    place = here()
    place.initialize_jax(shutdown_timeout_s=5)
    gang = place.gang(attempt)
    engine = StepCheckpointer(Layout(storage_path(root)), gang=gang, attempt=attempt)
    engine.prepare(with_keys(make_state(0), 0))
    for action in actions:
        verb, *arguments = action.split(":")
        try:
            ACTIONS[verb](engine, gang, root, *arguments)
        except GracepointError as error:
            print(f"{action} failed: {type(error).__name__}: {error}", flush=True)
    engine.close(30)
    for wait in before_the_end:
        wait()


def do_kill(engine: StepCheckpointer, gang: ProcessGroup, root: str, point: str, processes: str) -> None:
    if "1" in processes:
        assert isinstance(gang, StoreProcessGroup)
        before_the_end.append(functools.partial(let_process_1_die_first, gang))
    if str(gang.process_index) in processes:
        POINTS[point]()


def let_process_1_die_first(gang: StoreProcessGroup) -> None:
    """With process 0 it would be ended by JAX, before its point perhaps."""
    if gang.process_index == 1:
        gang._store.set("dying", str(os.getpid()))
    else:
        other = gang._store.get("dying", timeout_s=60)
        while os.path.exists(f"/proc/{other}"):
            time.sleep(0.01)


def do_last(engine: StepCheckpointer, gang: ProcessGroup, root: str, process: str) -> None:
    def wait(each: operation.SaveOperation, *_: Any) -> bool:
        assert isinstance(gang, StoreProcessGroup)
        # One counter for up to 31 processes, with a bit for each that has arrived.
        while (
            sum(int(n).bit_count() for n in gang._store.list(f"{each.key}/.arrived").values()) < gang.process_count - 1
        ):
            time.sleep(0.01)
        return False

    if gang.process_index == int(process):
        around(operation.SaveOperation, "_commit", before=wait)


def do_hold(engine: StepCheckpointer, gang: ProcessGroup, root: str, process: str, file: str) -> None:
    def wait(path: StoragePath, data: bytes) -> bool:
        while is_done_record(path, data) and not os.path.exists(file):
            time.sleep(0.01)
        return False

    if gang.process_index == int(process):
        around(PosixPath, "put", before=wait)


def do_patience(engine: StepCheckpointer, gang: ProcessGroup, root: str, seconds: str) -> None:
    global SAVE_TIMEOUT_S
    SAVE_TIMEOUT_S = float(seconds)


def do_quiet(engine: StepCheckpointer, gang: ProcessGroup, root: str, seconds: str) -> None:
    RenameCommit.quiet_s = float(seconds)


def do_tell_waiting(engine: StepCheckpointer, gang: ProcessGroup, root: str) -> None:
    looks = itertools.count(1)

    def tell(*_: Any) -> bool:
        if next(looks) == 2:
            print("waiting", flush=True)
        return False

    around(commit, "salvage", before=tell)


def do_save(engine: StepCheckpointer, gang: ProcessGroup, root: str, step: str) -> None:
    state = with_keys(make_state(int(step)), int(step))
    saved = engine.save(
        int(step),
        state,
        {},
        deadline=Deadline.after(SAVE_TIMEOUT_S, time.monotonic),
        on_stage=lambda stage: print(stage, flush=True),
    )
    print(f"saved {saved.step}", flush=True)


def do_background(engine: StepCheckpointer, gang: ProcessGroup, root: str, step: str) -> None:
    """Saves in the background while a donating step overwrites the state."""
    overwrite = jax.jit(lambda state: jax.tree.map(lambda x: x + x, state), donate_argnums=0)
    state = with_keys(make_state(int(step)), int(step))
    engine.save_in_background(int(step), state, {"process": gang.process_index})
    for _ in range(3):
        state["layers"] = overwrite(state["layers"])
    jax.block_until_ready(state["layers"])
    engine.executor.wait_until_finished(30)
    print(f"saved {step}", flush=True)


def do_restore(engine: StepCheckpointer, gang: ProcessGroup, root: str, step: str) -> None:
    expected = with_keys(make_state(int(step)), int(step))
    restored = engine.restore(with_keys(make_state(0), 0), timeout_s=30)
    assert restored is not None
    assert restored.step == int(step), restored.step
    assert_same_here(restored.state, expected)
    print(f"restored {restored.step} with {restored.host_state}", flush=True)


def do_restore_without_keys(engine: StepCheckpointer, gang: ProcessGroup, root: str, step: str) -> None:
    restored = engine.restore(make_state(0), timeout_s=30)
    assert restored is not None
    assert_same_here(restored.state, make_state(int(step)))
    print(f"restored {restored.step}, by Orbax: {restored.by_orbax}", flush=True)


def do_orbax_restore(engine: StepCheckpointer, gang: ProcessGroup, root: str, step: str) -> None:
    import orbax.checkpoint as ocp

    like = with_keys(make_state(0), 0)
    # Orbax refuses a state in which an array is local to each process, so such leaves are asked for as numpy arrays.
    like["local"] = {"array": np.asarray(0, np.int32), "numpy": np.zeros(3, np.int64), "python": 0}
    with ocp.CheckpointManager(root) as manager:
        assert manager.latest_step() == int(step)
        found = manager.restore(int(step), args=ocp.args.PyTreeRestore(like, restore_args=_restore_args(like)))
    found["local"]["array"] = jnp.asarray(found["local"]["array"])
    assert_same_here(found, with_keys(make_state(int(step)), int(step)))
    print(f"Orbax restored {step}", flush=True)


def _restore_args(like: Any) -> Any:
    import orbax.checkpoint as ocp

    return jax.tree.map(
        lambda leaf: (
            ocp.ArrayRestoreArgs(sharding=leaf.sharding)
            if isinstance(leaf, jax.Array)
            else ocp.RestoreArgs(restore_type=type(leaf))
        ),
        like,
    )


def do_orbax_save(engine: StepCheckpointer, gang: ProcessGroup, root: str, step: str) -> None:
    import orbax.checkpoint as ocp

    state = make_state(int(step))
    state["local"]["array"] = np.asarray(state["local"]["array"])
    with ocp.CheckpointManager(root) as manager:
        manager.save(int(step), args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    print(f"Orbax saved {step}", flush=True)


ACTIONS: dict[str, Callable[..., None]] = {
    "kill": do_kill,
    "last": do_last,
    "hold": do_hold,
    "patience": do_patience,
    "quiet": do_quiet,
    "tell-waiting": do_tell_waiting,
    "save": do_save,
    "background": do_background,
    "restore": do_restore,
    "restore-without-keys": do_restore_without_keys,
    "orbax-restore": do_orbax_restore,
    "orbax-save": do_orbax_save,
}

if __name__ == "__main__":
    RenameCommit.quiet_s = 0.5  # the dead are known to be dead here
    main(*sys.argv[1:])
    if any(action.startswith("kill:") for action in sys.argv):
        sys.stdout.flush()
        os._exit(0)  # JAX's way out waits for all peers, and one of them was killed
    jax.distributed.shutdown()
