"""One process of the tests of the public checkpoint API: joins the cluster and does its acts, one after the other.

paths_process.py ROOT
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gracepoint
from gracepoint.checkpoint import AsyncCheckpointer
from gracepoint.checkpoint.async_checkpointer import restore, save
from gracepoint.checkpoint.checkpoint_manager import CheckpointManager
from gracepoint.checkpoint.engine import StepCheckpointer
from gracepoint.errors import SettingsError
from gracepoint.multihost import get_barrier_sync_fn
from tests.multiprocess.launcher import here


def state_on(processes: list[int], step: int) -> Any:
    """Returns arrays over the devices of ``processes``: one is split over all of them, one is on each."""
    devices = [device for device in jax.devices() if device.process_index in processes]
    mesh = Mesh(np.array(devices), ("x",))

    def place(values: Any, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

    rng = np.random.default_rng(step)
    return {
        "split": place(rng.standard_normal((12, 8)).astype(np.float32), "x"),
        "whole": place(rng.standard_normal(100).astype(np.float32)),
        "step": step,
    }


def assert_same_here(found: Any, expected: Any) -> None:
    structures: list[Any] = [jax.tree.structure(tree) for tree in (found, expected)]
    assert structures[0] == structures[1]
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(other, jax.Array):
            assert leaf.sharding == other.sharding
            for a, b in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
                np.testing.assert_array_equal(a.data, b.data)
        else:
            assert leaf == other


def several_at_once(root: Path, me: int, count: int) -> None:
    everybody = list(range(count))
    with AsyncCheckpointer() as one, AsyncCheckpointer() as two:
        for number in range(2):
            one.save(root / f"one-{number}", state_on(everybody, number))
            two.save(root / f"two-{number}", state_on(everybody, 10 + number))
        for checkpointer in (one, two):  # each waits for its own saves alone
            checkpointer.wait_until_finished()
        like = state_on(everybody, 99)
        assert_same_here(one.restore(root / "two-1", like), state_on(everybody, 11))
        assert_same_here(two.restore(root / "one-1", like), state_on(everybody, 1))
    save(root / "one-0", state_on(everybody, 20), force=True)
    assert_same_here(restore(root / "one-0", like), state_on(everybody, 20))
    # Without a target, in the shardings that it was saved with.
    assert_same_here(restore(root / "one-0")["split"], state_on(everybody, 20)["split"])


def orbax(root: Path, me: int, count: int) -> None:
    import orbax.checkpoint as ocp

    everybody = list(range(count))
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(root / "one-0", state_on(everybody, 99))
        assert_same_here(found, state_on(everybody, 20))
        checkpointer.save(root / "orbax", state_on(everybody, 30))
    assert_same_here(restore(root / "orbax", state_on(everybody, 99)), state_on(everybody, 30))


def a_part_of_the_processes(root: Path, me: int, count: int) -> None:
    part = [0, count - 1]
    checkpointer = AsyncCheckpointer(
        active_processes=part,
        primary_host=part[-1],
        post_finalization_callback=lambda: print(f"called back in {me}", flush=True),
    )
    if me in part:
        checkpointer.save(root / "part", state_on(part, 5))
        assert_same_here(checkpointer.restore(root / "part", state_on(part, 99)), state_on(part, 5))
        try:
            checkpointer.save(root / "too-much", state_on(list(range(count)), 5))
        except gracepoint.CheckpointError as error:
            print(f"refused: {error}", flush=True)
        checkpointer.close()
        with CheckpointManager(root / "part-steps", active_processes=part) as manager:
            assert manager.save(1, state_on(part, 6))
            assert_same_here(manager.restore(like=state_on(part, 99)).state, state_on(part, 6))
    else:
        try:
            checkpointer.save(root / "part", state_on([me], 5))
        except SettingsError as error:
            print(f"refused: {error}", flush=True)
    with AsyncCheckpointer(active_processes=[me], primary_host=me) as alone:  # each its own
        alone.save(root / f"alone-{me}", state_on([me], me))
        assert_same_here(alone.restore(root / f"alone-{me}", state_on([me], 99)), state_on([me], me))


def a_barrier_of_ones_own(root: Path, me: int, count: int) -> None:
    everybody = list(range(count))
    keys: list[str] = []
    wait = get_barrier_sync_fn()

    def sync(*, key: str, timeout_ms: int) -> None:
        keys.append(key)
        wait(key=key, timeout_ms=timeout_ms)

    with AsyncCheckpointer(barrier_sync_fn=sync, primary_host=1) as checkpointer:
        checkpointer.save(root / "own-barrier", state_on(everybody, 7))
        checkpointer.wait_until_finished()
        assert_same_here(checkpointer.restore(root / "own-barrier", state_on(everybody, 99)), state_on(everybody, 7))
    assert len(keys) == 2, keys


def steps_by_the_clock(root: Path, me: int, count: int) -> None:
    """Every process has its own time of day and its own pace."""
    rng, now = random.Random(me), [1e6 * me]

    saved = []
    everybody = list(range(count))
    with CheckpointManager(root / "steps", save_every_s=20, keep_last=2, clock=lambda: now[0]) as manager:
        for step in range(300):
            now[0] += rng.uniform(0, 1) * (1 + me)
            if manager.save(step, state_on(everybody, step)):
                saved.append(step)
        restored = manager.restore(like=state_on(everybody, 999))
    assert_same_here(restored.state, state_on(everybody, restored.step))
    print(f"steps {json.dumps([saved, restored.step])}", flush=True)


def a_session_by_the_clock(root: Path, me: int, count: int) -> None:
    """The session's periodic saves, by real clocks; the processes' steps take different times."""
    rng, saved = random.Random(me), []
    real = StepCheckpointer.save_in_background

    def save_in_background(self: StepCheckpointer, step: int, *arguments: Any, **options: Any) -> None:
        saved.append(step)
        real(self, step, *arguments, **options)

    StepCheckpointer.save_in_background = save_in_background  # type: ignore[method-assign]
    with gracepoint.attach(root / "session", save_every_s=0.3, keep_last=1) as session:
        state, first = session.restore(like=state_on(list(range(count)), 0))
        for step in range(first + 1, first + 200):
            time.sleep(rng.uniform(0, 0.01))
            session.step(step, state)
    print(f"session {json.dumps(saved)}", flush=True)


ACTS: list[Callable[[Path, int, int], None]] = [
    several_at_once,
    orbax,
    a_part_of_the_processes,
    a_barrier_of_ones_own,
    steps_by_the_clock,
    a_session_by_the_clock,
]


if __name__ == "__main__":
    place = here()
    place.initialize_jax(shutdown_timeout_s=20)
    for act in ACTS:
        act(Path(sys.argv[1]), jax.process_index(), jax.process_count())
        print(f"did {act.__name__}", flush=True)
    jax.distributed.shutdown()
