"""Stock Orbax reads what Gracepoint writes with any of its options, with metadata, bit for bit."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from gracepoint.checkpoint import ArrayHandler, AsyncCheckpointer, ParamInfo, SaveArgs, StringHandler, WriteOptions
from tests.unit.checkpoint.fakes.engine import assert_same, engine, in_gang, rich_state, save, sharding
from tests.unit.checkpoint.fakes.formats import each_format

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


@each_format
def test_a_checkpoint_manager_restores_a_step(tmp_path: Path, options: WriteOptions) -> None:
    state = rich_state()
    save(engine(tmp_path, options=dataclasses.replace(options, target_chunk_bytes=32)), 3, state)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert_same(manager.restore(3, args=ocp.args.StandardRestore(state)), state)
    with ocp.CheckpointManager(tmp_path, item_handlers=ocp.StandardCheckpointHandler()) as manager:
        found = manager.item_metadata(3)
    assert (found["params"]["w"].shape, found["params"]["w"].dtype) == ((8, 8), np.float32)
    assert found["params"]["w"].sharding.to_jax_sharding() == state["params"].w.sharding
    assert found["params"]["w"].storage.chunk_shape == ((2, 4) if jax.device_count() > 1 else (1, 8))
    assert found["params"]["w"].storage.write_shape == sharding("x", "y").shard_shape((8, 8))


@each_format
def test_a_pytree_checkpointer_restores_a_path_with_strings(tmp_path: Path, options: WriteOptions) -> None:
    state = {"w": jnp.arange(8.0), "text": "ünï", "b": {"c/d": "slashed", "none": None}}
    with AsyncCheckpointer(options=options) as checkpointer:
        checkpointer.save(tmp_path / "here", state)
    found = ocp.PyTreeCheckpointer().restore(tmp_path / "here", args=ocp.args.PyTreeRestore(state))
    assert (found["text"], found["b"]) == ("ünï", state["b"])
    assert_same(found["w"], state["w"])


@each_format
def test_orbax_restores_the_parts_of_a_gang(tmp_path: Path, options: WriteOptions) -> None:
    options = dataclasses.replace(options, min_slice_bytes=1 << 10)
    state = {"w": np.arange(1 << 12, dtype=np.float32), "b": jnp.ones(3)}
    in_gang(3, lambda gang: save(engine(tmp_path, gang, options=options), 1, state))
    assert_same(ocp.StandardCheckpointer().restore(tmp_path / "1" / "default", state), state)


def test_values_are_cast_as_orbax_casts_them(tmp_path: Path) -> None:
    values = jnp.asarray(np.random.default_rng(0).standard_normal(1000).astype(np.float32) * 1e5)
    state = dict.fromkeys(("bfloat16", "float16", "float8_e4m3fn", "float64", "int8"), values)
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ours", state, save_args={n: SaveArgs(dtype=jnp.dtype(n)) for n in state})
    theirs = {name: ocp.SaveArgs(dtype=jnp.dtype(name)) for name in state}
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", args=ocp.args.PyTreeSave(state, save_args=theirs))
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), state)
    ours, expected = (
        ocp.PyTreeCheckpointer().restore(tmp_path / name, args=ocp.args.PyTreeRestore(state, restore_args=as_numpy))
        for name in ("ours", "theirs")
    )
    assert {name: value.dtype.name for name, value in ours.items()} == {name: name for name in state}
    del ours["int8"], expected["int8"]  # numbers that do not fit into an integer have no defined value in either
    assert_same(ours, expected)


@each_format
def test_orbax_s_own_handlers_restore_what_ours_stored(tmp_path: Path, options: WriteOptions) -> None:
    values = [jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding("x", "y")), jnp.arange(3, dtype=jnp.bfloat16)]
    infos = [ParamInfo(name, tmp_path) for name in ("params.w", "b")]
    handler = ArrayHandler(options)
    for future in handler.serialize(values, infos):
        future.result(timeout=60)
    handler.finalize(tmp_path)
    theirs = [_orbax_info(name, tmp_path, options) for name in ("params.w", "b")]
    args = [ocp.ArrayRestoreArgs() for _ in theirs]  # with the shardings of our file
    found = asyncio.run(ocp.type_handlers.ArrayHandler().deserialize(theirs, args))
    assert_same(list(found), values)
    assert [array.sharding for array in found] == [array.sharding for array in values]


@each_format
def test_our_handlers_restore_what_orbax_s_own_stored(tmp_path: Path, options: WriteOptions) -> None:
    values = [jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding("x", "y")), jnp.arange(3, dtype=jnp.bfloat16)]
    theirs = [_orbax_info(name, tmp_path, options) for name in ("params.w", "b")]
    _orbax_serialize(ocp.type_handlers.ArrayHandler(), values, theirs)
    if options.use_ocdbt:
        from orbax.checkpoint._src.serialization import ocdbt_utils, tensorstore_utils

        context = tensorstore_utils.get_ts_context(use_ocdbt=True)
        asyncio.run(ocdbt_utils.merge_ocdbt_per_process_files(tmp_path, context, bool(options.use_zarr3)))
    found = ArrayHandler().deserialize([ParamInfo(name, tmp_path) for name in ("params.w", "b")])
    assert_same(found, values)
    assert [array.sharding for array in found] == [array.sharding for array in values]


def test_strings_are_handed_over_both_ways(tmp_path: Path) -> None:
    ours = [ParamInfo("s", tmp_path / "ours"), ParamInfo("a/b", tmp_path / "ours")]
    for future in StringHandler().serialize(["é", "x"], ours):
        future.result(timeout=60)
    theirs = [_orbax_info(info.name, tmp_path / "ours", WriteOptions()) for info in ours]
    assert asyncio.run(ocp.type_handlers.StringHandler().deserialize(theirs)) == ["é", "x"]
    (tmp_path / "theirs").mkdir()
    theirs = [_orbax_info(info.name, tmp_path / "theirs", WriteOptions()) for info in ours]
    _orbax_serialize(ocp.type_handlers.StringHandler(), ["é", "x"], theirs)
    infos = [ParamInfo(info.name, tmp_path / "theirs") for info in ours]
    assert StringHandler().deserialize(infos) == ["é", "x"]


def _orbax_info(name: str, folder: Path, options: WriteOptions) -> Any:
    from etils import epath  # type: ignore[import-untyped]
    from orbax.checkpoint._src.serialization import tensorstore_utils

    return ocp.type_handlers.ParamInfo(
        name=name,
        parent_dir=epath.Path(folder),
        is_ocdbt_checkpoint=bool(options.use_ocdbt),
        use_zarr3=options.use_zarr3,
        use_compression=options.compression is not None,
        ts_context=tensorstore_utils.get_ts_context(use_ocdbt=bool(options.use_ocdbt)),
        keypath=(jax.tree_util.DictKey(name),),
    )


def _orbax_serialize(handler: Any, values: list[Any], infos: list[Any]) -> None:
    futures = asyncio.run(handler.serialize(values, infos, [ocp.SaveArgs() for _ in infos]))
    for future in futures:
        future.result()
