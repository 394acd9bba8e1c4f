"""How leaves are cut into chunks, and who writes them: the same in all processes, evenly, without gaps."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec, Format, grid
from gracepoint.checkpoint.options import MIB, SaveArgs, WriteOptions
from gracepoint.checkpoint.planning import chunks
from gracepoint.checkpoint.planning.grid import chunk_shape, slice_shape, stored_specs
from gracepoint.errors import CheckpointError, SettingsError
from tests.hypothesis_profiles import examples
from tests.unit.checkpoint.fakes.engine import sharding

SHAPES = st.lists(st.integers(1, 60), max_size=4).map(tuple)


def spec_of(leaf: Any, args: Any = None, *, processes: int = 1, **options: Any) -> ArraySpec:
    (spec,) = stored_specs(pytree.flatten({"w": leaf}), processes, WriteOptions(**options), args)
    assert spec is not None
    return spec


@settings(deadline=None)
@given(SHAPES, st.sampled_from([1, 2, 4, 8]), st.integers(8, 4096))
def test_chunks_divide_the_shape_and_are_as_small_as_asked(shape: tuple[int, ...], itemsize: int, asked: int) -> None:
    chunk = chunk_shape(shape, itemsize, asked)
    assert all(length % size == 0 for length, size in zip(shape, chunk, strict=True))
    assert math.prod(chunk) * itemsize <= asked
    assert chunk == shape or math.prod(shape) * itemsize > asked


@pytest.mark.parametrize(
    ("shape", "asked", "expected"),
    [
        pytest.param((8, 8), 4 * 32, (4, 8), id="the first axis, whose parts are contiguous"),
        pytest.param((7, 8), 4 * 28, (7, 4), id="an axis with a small factor before one of a prime length"),
        pytest.param((7, 3), 4 * 7, (7, 1), id="the axis with the smaller factor though it is the last"),
        pytest.param((7,), 4 * 6, (1,), id="a prime length, into single elements"),
        pytest.param((), 4, (), id="no axes"),
    ],
)
def test_shapes_are_cut_along(shape: tuple[int, ...], asked: int, expected: tuple[int, ...]) -> None:
    assert chunk_shape(shape, 4, asked) == expected


def test_chunks_may_be_as_small_as_the_least_size_and_not_smaller() -> None:
    assert chunk_shape((8,), 1, 4, smallest_bytes=4) == (4,)
    assert chunk_shape((8,), 1, 4, smallest_bytes=5) == (8,)


def test_axes_that_are_asked_for_are_cut_first() -> None:
    assert chunk_shape((8, 8), 4, 4 * 16, shard_axes=(1,)) == (8, 2)
    assert chunk_shape((8, 8), 4, 4 * 4, shard_axes=(1,)) == (4, 1)
    assert spec_of(np.zeros((8, 8)), SaveArgs(shard_axes=(1,))).chunk == (8, 1)
    assert spec_of(np.zeros((8, 8)), SaveArgs(chunk_byte_size=8 * 16, shard_axes=(1,))).chunk == (8, 2)
    assert spec_of(np.zeros((8, 8)), SaveArgs(chunk_byte_size=8 * 16)).chunk == (2, 8)


@settings(deadline=None)
@given(SHAPES, st.integers(1, 9), st.integers(1, 4096))
def test_slices_divide_the_shard_and_are_not_smaller_than_the_least(
    shape: tuple[int, ...], replicas: int, min_bytes: int
) -> None:
    piece = slice_shape(shape, replicas, 4, min_bytes)
    count = math.prod(shape) // math.prod(piece)
    assert all(length % size == 0 for length, size in zip(shape, piece, strict=True))
    assert count <= replicas
    assert count == 1 or math.prod(piece) * 4 >= min_bytes


def test_a_shard_is_sliced_for_as_many_replicas_as_its_axes_allow() -> None:
    assert slice_shape((5, 6), 3, 4, 1) == (5, 2)
    assert slice_shape((5, 7), 3, 4, 1) == (5, 7)
    assert slice_shape((4, 7), 3, 4, 1) == (2, 7)


def test_a_large_leaf_is_cut_though_nobody_asks() -> None:
    leaf = jax.ShapeDtypeStruct((1 << 26,), np.float32)  # 256 MiB
    spec = spec_of(np.broadcast_to(np.float32(0), leaf.shape))
    assert spec.chunk == (1 << 24,)
    assert spec.write_shape == leaf.shape


def test_large_leaf_is_not_split_into_tiny_chunks_unless_asked() -> None:
    prime = np.broadcast_to(np.float32(0), (7919,))
    assert spec_of(prime, target_chunk_bytes=7919).chunk == (7919,)
    assert spec_of(prime, SaveArgs(chunk_byte_size=7919)).chunk == (1,)
    assert spec_of(prime, SaveArgs(chunk_byte_size=4)).chunk == (1,), "an element has four bytes"


@pytest.mark.parametrize(
    ("size", "told"), [(7919, True), (1979, False), (8192, False)], ids=["a large prime", "as asked", "divisible"]
)
def test_leaf_is_named_if_it_cannot_be_cut_evenly(size: int, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    spec_of(np.zeros(size, np.float32), target_chunk_bytes=4 * 1979)
    assert ("leaf 'w' is written in chunks of" in caplog.text) is told


def test_a_replicated_leaf_is_shared_out_in_slices() -> None:
    leaf = np.zeros(2 * MIB, np.uint8)
    assert spec_of(leaf, processes=2).chunk == (MIB,)
    assert spec_of(leaf[None], processes=2).chunk == (1, MIB)
    assert spec_of(leaf, processes=2).write_shape is None  # a chunk is what is written
    assert spec_of(leaf, processes=2, replica_parallel=False).chunk == (2 * MIB,)
    assert spec_of(leaf, processes=2, max_replicas=1).chunk == (2 * MIB,)
    assert spec_of(leaf, processes=2, min_slice_bytes=2 * MIB).chunk == (2 * MIB,)


def test_shards_that_one_process_holds_are_not_sliced() -> None:
    leaf = jax.device_put(jnp.zeros((2048, 1024)), sharding("x", "y"))
    assert spec_of(leaf).chunk == (1024, 512)


def test_many_small_leaves_go_into_one_tree_and_others_into_files() -> None:
    def ocdbt(count: int, size: int, dtype: Any = np.uint8, **options: Any) -> bool:
        leaves = pytree.flatten({f"l{i}": np.zeros(size, dtype) for i in range(count)})
        formats = {spec.format for spec in stored_specs(leaves, 1, WriteOptions(**options)) if spec}
        assert len(formats) == 1
        return formats.pop().ocdbt

    assert ocdbt(600, 10)
    assert not ocdbt(512, 10)
    assert ocdbt(513, 10)
    assert not ocdbt(600, 1 << 18)
    assert not ocdbt(600, 1 << 15, np.float64)
    assert not ocdbt(600, 10, use_ocdbt=False)
    assert ocdbt(1, 10, use_ocdbt=True)


def test_the_stored_type_is_the_one_that_was_asked_for() -> None:
    assert spec_of(np.zeros(3), SaveArgs(dtype=jnp.bfloat16)).dtype == "bfloat16"
    assert spec_of(np.zeros(3)).dtype == "<f8"
    assert spec_of(np.zeros(3, complex), SaveArgs(dtype=np.complex64)).dtype == "<c8"


def test_the_stored_format_is_the_one_that_was_asked_for() -> None:
    leaf = np.zeros(3)
    assert spec_of(leaf, compression="zstd", compression_level=5).format == Format(2, ocdbt=False, zstd_level=5)
    assert spec_of(leaf, compression_level=5, compression=None).format == Format(2, ocdbt=False, zstd_level=None)
    assert spec_of(leaf, use_zarr3=True).format.zarr == 3


def test_arguments_may_be_for_some_leaves_or_for_all() -> None:
    leaves = pytree.flatten({"a": np.zeros(2), "b": {"c": np.zeros(2)}, "key": jax.random.key(1), "none": None})

    def dtypes(args: Any) -> list[str]:
        return [spec.dtype for spec in stored_specs(leaves, 1, WriteOptions(), args) if spec]

    assert dtypes({"b": {"c": SaveArgs(dtype=np.float32)}}) == ["<f8", "<f4", "<u4"]
    assert dtypes(SaveArgs(dtype=np.float32)) == ["<f4", "<f4", "<u4"]


@pytest.mark.parametrize(
    ("leaf", "args", "message"),
    [
        pytest.param(np.zeros(3), {"x": SaveArgs()}, "save_args['x']: the state has no leaf 'x'", id="no such leaf"),
        pytest.param(np.zeros(3), {"w": 3}, "save_args['w'] is 3; expected a SaveArgs", id="no arguments"),
        pytest.param(
            np.zeros(3),
            SaveArgs(chunk_byte_size=4),
            "leaf 'w': SaveArgs.chunk_byte_size is 4",
            id="below an element",
        ),
        pytest.param(np.zeros(3), SaveArgs(shard_axes=(1,)), "leaf 'w': SaveArgs.shard_axes has 1", id="no such axis"),
        pytest.param(np.zeros(3), SaveArgs(dtype="U4"), "leaf 'w': SaveArgs.dtype is <U4", id="no such type"),
        pytest.param(
            np.zeros(3, complex), SaveArgs(dtype=float), "would lose its imaginary part", id="complex to real"
        ),
        pytest.param(
            jax.random.key(0), {"w": SaveArgs(dtype=float)}, "typed PRNG keys cannot be cast", id="keys to numbers"
        ),
    ],
)
def test_arguments_that_cannot_be_met_are_refused_by_the_leaf_s_name(leaf: Any, args: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        spec_of(leaf, args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"compression": "gzip"}, "compression is 'gzip'; expected 'zstd' or None", id="no such codec"),
        pytest.param({"compression_level": 99}, "compression_level is 99; expected -7 to 22", id="no such level"),
        pytest.param({"min_slice_bytes": 0}, "min_slice_bytes is 0; expected a whole number", id="nothing"),
        pytest.param({"device_host_max_bytes": 1.5}, "device_host_max_bytes is 1.5", id="half a byte"),
        pytest.param({"max_replicas": True}, "max_replicas is True", id="no number"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        WriteOptions(**options)


@settings(deadline=None, max_examples=examples(50))
@given(
    st.lists(SHAPES.filter(lambda shape: 0 < math.prod(shape) < 500), min_size=1, max_size=5),
    st.integers(1, 4),
    st.sampled_from([None, 1, 2]),
    st.integers(8, 512),
)
def test_every_chunk_has_one_writer_and_all_processes_know_that(
    shapes: list[tuple[int, ...]], processes: int, max_replicas: int | None, chunk_bytes: int
) -> None:
    options = WriteOptions(min_slice_bytes=16, target_chunk_bytes=chunk_bytes, max_replicas=max_replicas)
    leaves = pytree.flatten({f"l{i}": np.zeros(shape) for i, shape in enumerate(shapes)})
    specs = stored_specs(leaves, processes, options)
    stored = [dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(leaves, specs, strict=True)]
    plans = [chunks.make_plan(stored, rank, processes, max_replicas=max_replicas) for rank in range(processes)]
    expected = sorted(spec.chunk_file(index) for spec in specs if spec for index in grid(spec))
    assert sorted(chunk.file for made in plans for chunk in made.chunks if chunk.mine) == expected
    assert {made.total_bytes for made in plans} == {sum(8 * math.prod(shape) for shape in shapes)}
    for index in range(len(shapes)):
        writers = {rank for rank, made in enumerate(plans) if made.mine_by_leaf[index]}
        assert len(writers) <= (max_replicas or processes)


def test_slices_even_out_what_processes_write() -> None:
    leaves = pytree.flatten({"w": np.zeros(4 * MIB, np.uint8)})
    specs = stored_specs(leaves, 4, WriteOptions())
    stored = [dataclasses.replace(leaf, spec=spec) for leaf, spec in zip(leaves, specs, strict=True)]
    loads = [sum(chunk.bytes for chunk in chunks.make_plan(stored, r, 4).chunks if chunk.mine) for r in range(4)]
    assert loads == [MIB] * 4
