"""Which replica reads which array: each array is read once, the replicas read about equally much, and only if it pays.

Over several processes, these restores are in tests/multiprocess/test_restore.py.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from gracepoint.checkpoint.format.array_spec import ArraySpec
from gracepoint.checkpoint.options import RestoreOptions, SingleReplicaArrayRestoreArgs
from gracepoint.checkpoint.reading.stored_tree import StoredLeaf
from gracepoint.checkpoint.restoring import readers as reader_choice
from gracepoint.checkpoint.restoring.leaves import LeafTarget
from gracepoint.checkpoint.restoring.placement import OnDevices, OnHost, OnOneReplica
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.multihost import InMemoryStore, StoreProcessGroup
from gracepoint.process_group import ProcessGroup, SingleProcess
from tests.unit.checkpoint.fakes.engine import sharding

MIB = 1 << 20
BY_PROCESS = np.array([[0, 0], [1, 1]])  # a mesh of two processes with two devices each


@pytest.mark.parametrize(
    ("processes", "is_sharded", "expected"),
    [
        pytest.param(BY_PROCESS, (False, False), 0, id="replicated everywhere"),
        pytest.param(BY_PROCESS, (False, True), 0, id="replicated over processes"),
        pytest.param(BY_PROCESS, (True, False), None, id="replicated within processes"),
        pytest.param(BY_PROCESS, (True, True), None, id="sharded"),
        pytest.param(np.arange(6).reshape(2, 3), (False, False), 1, id="the longest axis"),
        pytest.param(np.arange(6).reshape(2, 3), (False, True), 0, id="the axis that is left"),
        pytest.param(np.zeros((2, 2), int), (False, False), None, id="one process"),
    ],
)
def test_turns_are_taken_along_an_axis_with_several_processes(
    processes: Any, is_sharded: tuple[bool, ...], expected: int | None
) -> None:
    assert reader_choice.replicated_axis(processes, is_sharded) == expected


@pytest.mark.parametrize("count", [2, 3, 8])
def test_replicas_read_about_equally_many_bytes(count: int) -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 200).tolist()
    found = reader_choice.turns({position: (size, 0) for position, size in enumerate(sizes)}, (count, 4))
    read = [sum(size for position, size in enumerate(sizes) if found[position] == n) for n in range(count)]
    assert max(read) - min(read) <= max(sizes)
    assert found == reader_choice.turns({n: (sizes[n], 0) for n in reversed(range(len(sizes)))}, (count, 4))


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The devices of the first axis of ``sharding`` belong to two processes."""
    rows = {device.id: row for row, devices in enumerate(sharding().mesh.devices) for device in devices}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(reader_choice, "process_of", lambda device: rows[device.id])


def target(mib: int, *spec: Any, layout: Any = None) -> LeafTarget:
    shape = (mib, MIB // 4)
    stored = StoredLeaf("w", (), "jax.Array", ArraySpec("w", "array", shape, "<f4", shape))
    return LeafTarget(stored, None, OnDevices(shape, np.dtype(np.float32), sharding(*spec), layout))


def readers(*targets: LeafTarget, largest_bytes: int = 256 * MIB) -> list[int | None]:
    found = reader_choice.taken(targets, largest_bytes)
    return [each.placement.primary if isinstance(each.placement, OnOneReplica) else None for each in found]


@pytest.mark.usefixtures("two_processes")
def test_replicas_take_turns_if_that_saves_enough() -> None:
    assert readers(target(32), target(32)) == [0, 1]
    assert readers(target(32), target(16)) == [None, None]
    assert readers(target(64, "x"), target(32), target(32, None, "y")) == [None, 0, 1]
    assert readers(LeafTarget(target(1).stored, None, OnHost((1,))), target(64)) == [None, 0]


@pytest.mark.usefixtures("two_processes")
def test_arrays_that_are_too_large_are_read_by_all() -> None:
    assert readers(target(128), target(128, "y"), largest_bytes=64 * MIB) == [None, 0]
    assert readers(target(64, layout="a layout"), target(64)) == [None, 0]


def test_a_single_process_takes_no_turns() -> None:
    assert readers(target(64), target(64)) == [None, None]


@pytest.mark.parametrize(
    ("place", "count", "read_once", "args", "expected"),
    [
        pytest.param("gs://bucket/run", 2, None, None, True, id="in a bucket"),
        pytest.param("/run", 2, None, None, False, id="in a folder"),
        pytest.param("/run", 2, True, None, True, id="in a folder on request"),
        pytest.param("gs://bucket/run", 2, False, None, False, id="not wanted"),
        pytest.param("gs://bucket/run", 1, None, None, False, id="one process"),
        pytest.param("gs://bucket/run", 3, None, None, False, id="not all processes"),
        pytest.param("gs://bucket/run", 2, None, SingleReplicaArrayRestoreArgs(), False, id="one replica reads"),
    ],
)
@pytest.mark.usefixtures("two_processes")
def test_turns_are_taken_in_buckets_by_default(
    place: str, count: int, read_once: bool | None, args: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
    gang: ProcessGroup = SingleProcess() if count == 1 else StoreProcessGroup(InMemoryStore(), 0, count)
    found = reader_choice.may_be_taken(gang, storage_path(place), args, RestoreOptions(read_once=read_once))
    assert found == expected
