"""Loops on an accelerator's devices: interrupted saves, ``jax.set_mesh``, the transfer guard.

Where there is no accelerator, values leave the CPU's devices as they leave an accelerator's.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import gracepoint
from gracepoint.checkpoint import AsyncCheckpointer, RestoreArgs, WriteOptions, all_steps, restore, save, verify
from gracepoint.errors import CheckpointError
from tests import accelerators

OPTIONS = WriteOptions(pinned_host_transfer=True)
#: Of an array that is transferred chunk by chunk, as its shards are large.
LARGE = (20, 1 << 20)


class Interrupted(Exception):
    """What a signal's handler raises."""


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    devices = jax.devices("gpu") if accelerators.has_gpu() else jax.devices("cpu")
    kind = getattr(request, "param", AxisType.Auto)
    return jax.make_mesh((1, len(devices)), ("x", "y"), axis_types=(kind, kind), devices=devices)


def init(mesh: jax.sharding.Mesh) -> Any:
    """Returns the function that makes the first state."""

    def build() -> dict[str, Any]:
        small = {f"w{number}": jnp.zeros((256, 1024)) for number in range(16)}
        return {"large": jnp.zeros(LARGE), "small": small, "seen": jnp.int32(0), "key": jax.random.key(1)}

    form = jax.eval_shape(build)
    spec = {"large": PartitionSpec(None, "y"), "seen": PartitionSpec(), "key": PartitionSpec()}
    specs = spec | {"small": dict.fromkeys(form["small"], PartitionSpec(None, "y"))}
    shardings = jax.tree.map(
        lambda one: NamedSharding(mesh, one), specs, is_leaf=lambda one: isinstance(one, PartitionSpec)
    )
    return jax.jit(build, out_shardings=shardings)


def _trained_once(state: dict[str, Any]) -> dict[str, Any]:
    changed = {name: jax.tree.map(lambda leaf: leaf + 1, state[name]) for name in ("large", "small", "seen")}
    return {**changed, "key": state["key"]}


train = jax.jit(_trained_once)


def values_of(path: Path) -> set[float]:
    """Returns the values that a checkpoint holds beside its key."""
    tree = restore(path, restore_args=RestoreArgs(restore_type=np.ndarray))
    leaves = [tree["large"], tree["seen"], *tree["small"].values()]
    return {float(value) for leaf in leaves for value in np.unique(leaf)}


@pytest.fixture
def alarms() -> Iterator[None]:
    """A handler that raises, as a user's has it, is called when the timer has run out."""

    def interrupt(*_: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def passed(session: gracepoint.Session, step: int, state: Any, after_s: float) -> bool:
    """Passes a sync point that is interrupted after that time. Returns whether it was."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            session.step(step, state)
        except CheckpointError:  # the save before this one was interrupted
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Interrupted:
        return True
    return False


@pytest.mark.usefixtures("alarms")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt met a destructor
def test_after_interrupts_each_checkpoint_has_the_values_of_its_step(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    session = gracepoint.attach(tmp_path, save_every_steps=1, keep_last=1000, write_options=OPTIONS)
    state, step = session.restore(init=init(mesh))
    interrupts = 0
    for step, after_s in zip(range(1, 25), itertools.cycle((0.002, 0.03, 0.1, 0.01, 10.0)), strict=False):
        state = jax.block_until_ready(train(state))
        interrupts += passed(session, step, state, after_s)
    try:
        session.close()
    except CheckpointError:  # of the last save
        session.close()
    committed = all_steps(tmp_path)
    assert interrupts > 0
    assert committed
    assert {number: values_of(tmp_path / str(number)) for number in committed} == {n: {float(n)} for n in committed}
    assert all(verify(tmp_path / str(number)).ok for number in committed)


def trained(root: Path, mesh: jax.sharding.Mesh, until: int) -> int:
    """Trains from the newest checkpoint to a step. Returns where it began."""
    with gracepoint.attach(root, save_every_steps=2, write_options=OPTIONS) as session:
        compiled = session.compile(train, jax.eval_shape(init(mesh)))
        state, began = session.restore(init=init(mesh))
        for step in range(began + 1, until + 1):
            state = compiled(state)
            session.step(step, state)
    return began


@pytest.mark.parametrize("mesh", [AxisType.Auto, AxisType.Explicit], indirect=True)
def test_under_set_mesh_loops_and_calls_save_and_restore(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    with jax.set_mesh(mesh):
        assert trained(tmp_path / "run", mesh, 4) == 0
        assert trained(tmp_path / "run", mesh, 6) == 4
        _saved_and_restored(tmp_path, mesh)
    assert values_of(tmp_path / "run" / "6") == {6.0}


def test_under_the_transfer_guard_loops_and_calls_save_and_restore(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    first = init(mesh)()
    with jax.transfer_guard("disallow"):
        assert trained(tmp_path / "run", mesh, 4) == 0
        assert trained(tmp_path / "run", mesh, 6) == 4
        _saved_and_restored(tmp_path, mesh)
    assert values_of(tmp_path / "run" / "6") == {6.0}
    assert first["large"].sharding.device_set == set(mesh.devices.flat)


def _saved_and_restored(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    state = train(init(mesh)())
    save(tmp_path / "now", state, options=OPTIONS)
    with AsyncCheckpointer(options=OPTIONS) as checkpointer:
        checkpointer.prepare(state)
        checkpointer.save(tmp_path / "later", state)
    for name in ("now", "later"):
        found = restore(tmp_path / name, state)
        assert found["large"].sharding == state["large"].sharding
        assert values_of(tmp_path / name) == {1.0}
