"""One process of tests of how sessions start: joins the cluster and does its acts, one after the other.

starting_process.py ROOT
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gracepoint
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.reading.parallel_reader import ReadGroup
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierFailed, CheckpointError, GracepointError
from tests.multiprocess.launcher import here

ZEROS = np.zeros(4, np.float32)


def over(processes: list[int], *spec: Any) -> NamedSharding:
    """Returns a sharding over the devices of ``processes``: along x by process, along y by device of each."""
    devices = [device for device in jax.devices() if device.process_index in processes]
    return NamedSharding(Mesh(np.array(devices).reshape(len(processes), -1), ("x", "y")), PartitionSpec(*spec))


def everybody() -> list[int]:
    return list(range(jax.process_count()))


def slices(step: float) -> Callable[[], Any]:
    """Returns what makes a state of which each process holds a slice, and a leaf that is split over all."""

    def build() -> Any:
        return {
            "replicated": jnp.arange(64, dtype=jnp.float32).reshape(8, 8) + step,
            "split": jnp.arange(12, dtype=jnp.float32) + step,
            "key": jax.random.key(int(step)),
        }

    processes = everybody()
    shardings = {"replicated": over(processes, "y"), "split": over(processes, "x"), "key": over(processes)}
    made: Callable[[], Any] = jax.jit(build, out_shardings=shardings)
    return made


def assert_same_here(found: Any, expected: Any) -> None:
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            leaf, other = jax.random.key_data(leaf), jax.random.key_data(other)
        assert leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
        for a, b in zip(leaf.addressable_shards, other.addressable_shards, strict=True):
            np.testing.assert_array_equal(a.data, b.data)


def one_slice_reads(root: Path) -> None:
    """The first start makes the state; in the next, process 0's slice reads what is replicated."""
    with gracepoint.attach(root / "slices", save_every_steps=1) as session:
        _, step = session.restore(init=slices(0), single_replica=True)
        assert step == 0
        session.step(1, slices(1)())
    read: set[str] = set()
    with gracepoint.attach(root / "slices") as session:
        with reading(read):
            state, step = session.restore(init=slices(0), single_replica=True)
        assert step == 1
        assert_same_here(state, slices(1)())
    assert read == ({"replicated", "split", "key"} if jax.process_index() == 0 else {"split"}), read


def refused(root: Path, name: str, state: Any) -> GracepointError:
    with gracepoint.attach(root / name) as session:
        try:
            session.step(1, state)
        except GracepointError as error:
            return error
    raise AssertionError(f"{name} was not refused")


def an_array_on_one_process(root: Path) -> None:
    everywhere = jax.make_array_from_callback((4,), over(everybody()), lambda index: ZEROS[index])
    alone = jax.make_array_from_callback((4,), over([0]), lambda index: ZEROS[index], dtype=np.float32)
    error = refused(root, "alone", {"w": everywhere, "alone": alone})
    assert isinstance(error, BarrierFailed if jax.process_index() == 0 else CheckpointError), repr(error)
    assert "leaf 'alone'" in str(error)
    assert "the devices of process 0 alone" in str(error)


def a_copy_in_some_and_one_array_in_others(root: Path) -> None:
    """The leaf is global where it lies over all, and local where each has its own: one name, two plans."""
    mine = jnp.zeros(4)
    if jax.process_index():
        mine = jax.make_array_from_callback((4,), over(everybody()), lambda index: ZEROS[index])
    error = refused(root, "mixed", {"w": np.zeros(3), "mixed": mine})
    assert isinstance(error, CheckpointError), repr(error)
    assert "leaf 'mixed': a copy in each process" in str(error)
    assert "one array over processes 0-2" in str(error)


def an_array_on_some_processes(root: Path) -> None:
    def state(step: float) -> Any:
        values = np.arange(8.0, dtype=np.float32) + step
        return {
            "all": jax.make_array_from_callback((8,), over(everybody()), lambda index: values[index]),
            "some": jax.make_array_from_callback(
                (8,), over([0, 1], "x"), lambda index: values[index], dtype=values.dtype
            ),
        }

    with gracepoint.attach(root / "some", save_every_steps=1) as session:
        assert session.restore(like=state(0))[1] == 0
        session.step(1, state(1))
    with gracepoint.attach(root / "some") as session:
        found, step = session.restore(like=state(0))
    assert step == 1
    assert_same_here(found, state(1))


@contextlib.contextmanager
def reading(names: set[str]) -> Iterator[None]:
    """Notes the names of the leaves that are read in the block."""
    real = ReadGroup.read

    def read(self: ReadGroup, piece: Index, deadline: Deadline) -> bool:
        names.add(self.name)
        return real(self, piece, deadline)

    ReadGroup.read = read  # type: ignore[method-assign]
    try:
        yield
    finally:
        ReadGroup.read = real  # type: ignore[method-assign]


ACTS: list[Callable[[Path], None]] = [
    one_slice_reads,
    an_array_on_some_processes,
    an_array_on_one_process,
    a_copy_in_some_and_one_array_in_others,
]


if __name__ == "__main__":
    here().initialize_jax(shutdown_timeout_s=20)
    for act in ACTS:
        act(Path(sys.argv[1]))
        print(f"did {act.__name__}", flush=True)
    jax.distributed.shutdown()
