"""The first start and every later one: the devices never hold two states."""

from __future__ import annotations

import functools
import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gracepoint
from gracepoint.checkpoint import SingleReplica
from gracepoint.checkpoint.restoring import placement
from gracepoint.checkpoint.restoring.leaves import LeafTarget
from gracepoint.errors import CheckpointCorrupt, CheckpointMismatch, CheckpointNotFound, InvalidSharding, SettingsError
from gracepoint.preemption.exit import ProcessExit
from tests.unit.checkpoint.fakes.engine import sharding

pytestmark = pytest.mark.integration

LEAVES, SIDE = 16, 256


@pytest.fixture(autouse=True)
def _laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("GRACEPOINT_")] + ["JOB_COMPLETION_INDEX"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ProcessExit, "start", lambda self: None)


def build(value: float) -> dict[str, jax.Array]:
    return {f"w{i:02}": jnp.full((SIDE, SIDE), value + i, jnp.float32) for i in range(LEAVES)}


def shardings() -> dict[str, jax.sharding.Sharding]:
    return {f"w{i:02}": sharding("x", "y") if i % 2 else sharding(None, "y") for i in range(LEAVES)}


def init(value: float = 0.0) -> Callable[[], dict[str, jax.Array]]:
    made: Callable[[], dict[str, jax.Array]] = jax.jit(functools.partial(build, value), out_shardings=shardings())
    return made


def form() -> Any:
    return jax.eval_shape(init())


def save(root: Path, *steps: int) -> None:
    with gracepoint.attach(root, save_every_steps=1) as session:
        for step in steps:
            session.step(step, init(100.0 * step)())


def live_bytes() -> int:
    """Returns the bytes of all arrays on all devices; arrays that share a buffer of a device are counted once."""
    buffers: dict[tuple[Any, int], int] = {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            buffers[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    return sum(buffers.values())


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes on the devices, beyond those before the test, whenever an array was made."""
    gc.collect()  # of the tests before
    before, found = live_bytes(), [0]
    real: dict[Any, Any] = {}

    def watch(owner: Any, name: str) -> None:
        function = real[owner, name] = getattr(owner, name)

        def watched(*arguments: Any, **options: Any) -> Any:
            made = function(*arguments, **options)
            found.append(live_bytes() - before)
            return made

        monkeypatch.setattr(owner, name, watched)

    for kind in (placement.OnDevices, placement.OnDefaultDevice, LeafTarget):
        for name in ("put", "build"):
            if hasattr(kind, name):
                watch(kind, name)
    return found


def on_devices(state: Any) -> int:
    return sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)


@pytest.mark.parametrize("how", ["like", "init", "abstract like and init"])
def test_restoring_takes_no_more_device_memory_than_the_state(tmp_path: Path, peak: list[int], how: str) -> None:
    save(tmp_path, 1)
    state_bytes = on_devices(init()())
    gc.collect()
    del peak[1:]
    asks: dict[str, Callable[[], dict[str, Any]]] = {
        "like": lambda: {"like": init()()},
        "init": lambda: {"init": init()},
        "abstract like and init": lambda: {"like": form(), "init": init()},
    }
    with gracepoint.attach(tmp_path) as session:
        state, step = session.restore(**asks[how]())
    assert step == 1
    assert float(state["w03"][0, 0]) == 103.0
    assert on_devices(state) == state_bytes
    assert 0.99 * state_bytes <= max(peak) <= 1.1 * state_bytes  # all of it was seen, and no more


def test_asked_to_leave_like_alone_restore_does(tmp_path: Path) -> None:
    save(tmp_path, 1)
    like = init()()
    with gracepoint.attach(tmp_path) as session:
        session.restore(like=like, donate=False)
    assert float(like["w00"][0, 0]) == 0.0


def test_the_first_state_is_made_only_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> Any:
        calls.append(1)
        return init()()

    with gracepoint.attach(tmp_path, save_every_steps=1) as session:
        state, step = session.restore(like=form(), init=make)
        assert (step, calls) == (0, [1])
        session.step(1, state)
    with gracepoint.attach(tmp_path) as session:
        assert session.restore(like=form(), init=make)[1] == 1
    assert calls == [1]


def test_one_array_may_be_several_leaves_of_like(tmp_path: Path) -> None:
    save(tmp_path, 1)
    like = init()()
    like["w02"] = like["w00"]
    alias = jax.device_put(like["w01"], like["w01"].sharding)
    like["w03"] = alias
    with gracepoint.attach(tmp_path) as session:
        state, _ = session.restore(like=like)
    assert [float(state[name][0, 0]) for name in ("w00", "w01", "w02", "w03")] == [100.0, 101.0, 102.0, 103.0]


def test_array_of_like_in_use_elsewhere_fails_there_with_the_cause(tmp_path: Path) -> None:
    save(tmp_path, 1)
    like = init()()
    held = like["w00"]
    with gracepoint.attach(tmp_path) as session:
        session.restore(like=like)
    with pytest.raises(RuntimeError, match="deleted"):
        jnp.sum(held).block_until_ready()


def damage(step: Path) -> None:
    """Empties the files of one leaf."""
    for path in (step / "default" / "w07").iterdir():
        path.write_bytes(b"")


def test_damaged_step_falls_back_to_the_previous_one_when_donating(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    damage(tmp_path / "2")
    with gracepoint.attach(tmp_path) as session:
        state, step = session.restore(like=init()())
    assert step == 1
    assert float(state["w00"][0, 0]) == 100.0
    assert state["w01"].sharding == sharding("x", "y")


def test_after_a_restore_that_failed_half_way_nothing_looks_like_a_state(tmp_path: Path) -> None:
    save(tmp_path, 1)
    damage(tmp_path / "1")
    like = init()()
    with gracepoint.attach(tmp_path) as session:
        with pytest.raises(CheckpointCorrupt) as caught:
            session.restore(like=like)
        assert all(leaf.is_deleted() for leaf in like.values())
    assert "are deleted by now" in " ".join(caught.value.__notes__)


def test_a_checkpoint_that_does_not_fit_leaves_like_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 1)
    like = init()() | {"more": jnp.zeros(3)}
    with gracepoint.attach(tmp_path) as session, pytest.raises(CheckpointMismatch) as caught:
        session.restore(like=like)
    assert not any(leaf.is_deleted() for leaf in like.values())
    assert not hasattr(caught.value, "__notes__")


def test_a_form_without_values_and_no_checkpoint_need_init(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path) as session, pytest.raises(CheckpointNotFound, match="give init="):
        session.restore(like=form())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(dict, "found neither", id="nothing"),
        pytest.param(lambda: {"like": init()(), "init": init()}, "a second time", id="both have arrays"),
        pytest.param(
            lambda: {"init": lambda: build(0.0)}, r"the sharding of state\['w00'\].*out_shardings", id="no shardings"
        ),
        pytest.param(
            lambda: {"like": form(), "init": lambda: init()() | {"w00": np.zeros(3)}},
            r"state\['w00'\] in another way than like says",
            id="init makes another state",
        ),
    ],
)
def test_what_would_fail_at_the_restart_fails_at_the_first_start(
    tmp_path: Path, arguments: Callable[[], dict[str, Any]], message: str
) -> None:
    with gracepoint.attach(tmp_path) as session, pytest.raises(SettingsError, match=message):
        session.restore(**arguments())


def test_one_slice_reads_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    read: list[int] = []
    real = placement.OnDevices.put

    def put(self: placement.OnDevices, values: Any) -> Any:
        read.append(1)
        return real(self, values)

    monkeypatch.setattr(placement.OnDevices, "put", put)
    with gracepoint.attach(tmp_path) as session:
        state, _ = session.restore(init=init(), single_replica=True)
    assert [float(state[name][0, 0]) for name in state] == [100.0 + i for i in range(LEAVES)]
    assert len(read) == LEAVES // 2  # of the arrays that are split over the slices


def test_no_array_that_one_slice_could_read_for_all_is_an_error(tmp_path: Path) -> None:
    with gracepoint.attach(tmp_path) as session, pytest.raises(InvalidSharding, match="no array can be read"):
        session.restore(init=init(), single_replica=SingleReplica(replica_axis_index=1))
    shutil.rmtree(tmp_path)


PREEMPTED_AND_EXITS = """
import atexit, os, signal, sys, threading, time
import gracepoint, jax.numpy as jnp
from gracepoint.checkpoint.storage.posix import PosixPath

exits, put = threading.Event(), PosixPath.put

def slowly(path, data):
    if "throughput" in path.name:
        assert exits.wait(60)
        time.sleep(0.2)  # slow storage
    return put(path, data)

PosixPath.put = slowly
with gracepoint.attach(sys.argv[1]) as session:
    state, step = session.restore(init=lambda: {"w": jnp.ones(3)})
    atexit.register(exits.set)  # called before what the session has registered
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        step += 1
        session.step(step, state)
"""


def test_how_long_an_emergency_save_took_is_known_to_the_next_start(tmp_path: Path) -> None:
    environment = os.environ | {
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    ended = subprocess.run(
        [sys.executable, "-c", PREEMPTED_AND_EXITS, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 77, ended.stderr
    assert len(json.loads((tmp_path / ".gracepoint-throughput").read_text())["bytes_per_s"]["streamed"]) == 1
