"""Who writes which chunk in gangs of any size: as if the chunks were assigned one by one, and only by their holders."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import grid
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.planning import chunks
from gracepoint.checkpoint.planning.chunks import make_plan, part_of
from gracepoint.checkpoint.planning.grid import holders_of, normal_index, stored_specs
from gracepoint.errors import CheckpointError
from tests.hypothesis_profiles import examples
from tests.unit.checkpoint.fakes import gang_arrays

SPECS = st.permutations(["x", "y", None]).flatmap(
    lambda names: st.sampled_from([tuple(names[:2]), (("x", "y"), None), (None, ("y", "x")), (), (None,)])
)


def greedy(loads: list[int], count: int, size: int) -> list[int]:
    counts = [0] * len(loads)
    for _ in range(count):
        least = min(range(len(loads)), key=lambda at: (loads[at] + counts[at] * size, at))
        counts[least] += 1
    return counts


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=7), st.integers(1, 30), st.integers(1, 20))
def test_each_item_goes_to_the_smallest_load(loads: list[int], count: int, size: int) -> None:
    found = chunks.fill(np.array([loads, loads[::-1]], np.int64), count, size)
    assert found.tolist() == [greedy(loads, count, size), greedy(loads[::-1], count, size)]


@settings(deadline=None, max_examples=examples(100))
@given(st.integers(1, 4), st.integers(1, 4), SPECS, st.integers(1, 4), st.randoms(use_true_random=False))
def test_holders_from_the_mesh_are_those_that_jax_names(
    x: int, y: int, spec: tuple[Any, ...], processes: int, random: Any
) -> None:
    process_of = [random.randrange(processes) for _ in range(x * y)]
    mesh = gang_arrays.mesh((x, y), ("x", "y"), process_of)
    leaf = gang_arrays.leaf("w", (144, 144), mesh, PartitionSpec(*spec))
    if len(set(process_of)) == 1:
        return  # not an array over several processes
    found = holders_of(leaf, processes)
    holders: dict[Any, set[int]] = collections.defaultdict(set)
    for device, slices in leaf.data.sharding.devices_indices_map((144, 144)).items():
        holders[normal_index(slices, (144, 144))].add(device.process_index)
    told = {
        found.index(number): set(held)
        for group in found.groups
        for numbers, held in zip(group.shards.tolist(), group.holders.tolist(), strict=True)
        for number in numbers
    }
    assert told == holders
    assert found.fewest == min(map(len, holders.values()))
    leaf.data.sharding = gang_arrays.Unnamed(leaf.data.sharding)
    assert [(g.shards.tolist(), g.holders.tolist()) for g in holders_of(leaf, processes).groups] == [
        (g.shards.tolist(), g.holders.tolist()) for g in found.groups
    ]


def state(process_index: int, mesh: jax.sharding.Mesh, options: WriteOptions, processes: int) -> list[pytree.Leaf]:
    """Returns leaves of every placement: over all devices, in replicas, on all of them, and a copy in each process."""
    leaves = [
        gang_arrays.leaf("all", (64, 32), mesh, PartitionSpec(("r", "f")), process_index=process_index),
        gang_arrays.leaf("some", (64, 32), mesh, PartitionSpec("f"), process_index=process_index),
        gang_arrays.leaf("none", (64, 32), mesh, PartitionSpec(), process_index=process_index),
        *pytree.flatten({"local": np.zeros((16, 16), np.float32), "number": 3}),
        gang_arrays.leaf("half", (32, 32), mesh, PartitionSpec(None, "r"), process_index=process_index),
    ]
    specs = stored_specs(leaves, processes, options)
    return [dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(leaves, specs, strict=True)]


@pytest.mark.parametrize("max_replicas", [None, 1, 2], ids=["all replicas write", "one writes", "two write"])
@pytest.mark.parametrize("devices", [1, 2, 4], ids=lambda devices: f"{devices} devices a process")
def test_every_chunk_of_a_gang_has_one_writer_that_holds_it(devices: int, max_replicas: int | None) -> None:
    mesh, processes = gang_arrays.mesh((4, 16), ("r", "f"), devices), 64 // devices
    options = WriteOptions(min_slice_bytes=64, target_chunk_bytes=256, max_replicas=max_replicas)
    plans = [
        make_plan(state(rank, mesh, options, processes), rank, processes, max_replicas=max_replicas)
        for rank in range(processes)
    ]
    leaves = state(0, mesh, options, processes)
    written = [chunk.file for plan in plans for chunk in plan.chunks if chunk.mine]
    expected = [leaf.spec.chunk_file(index) for leaf in leaves if leaf.spec for index in grid(leaf.spec)]
    assert sorted(written) == sorted(expected)
    assert {plan.total_chunks for plan in plans} == {len(expected)}
    assert len({tuple(plan.owners.items()) for plan in plans}) == 1
    assert sorted(itertools.chain(*(plan.arrays for plan in plans))) == list(range(len(leaves)))
    if max_replicas is None:
        loads = [sum(chunk.bytes for chunk in plan.chunks if chunk.mine) for plan in plans]
        assert max(loads) - min(loads) <= max(chunk.bytes for plan in plans for chunk in plan.chunks)


def test_metadata_of_arrays_is_written_by_all_processes() -> None:
    mesh = gang_arrays.mesh((8,), ("f",), 1)
    plans = [
        make_plan([gang_arrays.leaf(f"l{i}", (8,), mesh, PartitionSpec("f"), process_index=p) for i in range(16)], p, 8)
        for p in range(8)
    ]
    assert [len(plan.arrays) for plan in plans] == [2] * 8


def test_the_table_has_the_writer_of_each_chunk_in_order() -> None:
    mesh = gang_arrays.mesh((2, 4), ("r", "f"), 2)
    options = WriteOptions(min_slice_bytes=64, target_chunk_bytes=256)
    owners = chunks.assign(state(0, mesh, options, 4), 4)
    found = iter(chunks.from_table(chunks.table(owners)).tolist())
    leaves = [state(rank, mesh, options, 4) for rank in range(4)]
    writers = {c.file: r for r in range(4) for c in part_of(owners, leaves[r], r).chunks if c.mine}
    for leaf in leaves[0]:
        assert leaf.spec is not None
        assert [writers[leaf.spec.chunk_file(index)] for index in grid(leaf.spec)] == list(
            itertools.islice(found, len(grid(leaf.spec)))
        )
    assert not list(found)


def test_a_shard_that_nobody_saves_is_named() -> None:
    mesh = gang_arrays.mesh((8,), ("f",), 2)
    leaf = gang_arrays.leaf("w", (16, 4), mesh, PartitionSpec("f"))
    with pytest.raises(CheckpointError, match=r"leaf 'w': no process of those that save, 0, 1, 3, holds its shard at "):
        holders_of(leaf, 3, [0, 1, 3])
