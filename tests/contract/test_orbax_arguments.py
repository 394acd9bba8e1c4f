"""Arguments and switches that Orbax has: the same effect here, seen in the files and by Orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.metadata import array_metadata_store

from gracepoint import checkpoint
from gracepoint.checkpoint import ArrayHandler, AsyncCheckpointer, ParamInfo, WriteOptions
from gracepoint.errors import SettingsError
from tests.unit.checkpoint.fakes.engine import assert_same, sharding

pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]


def state() -> dict[str, Any]:
    return {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding("x", "y")), "n": np.arange(3), "i": 3}


def data_files(path: Path) -> list[int]:
    """Returns the sizes of the data files in which OCDBT keeps values."""
    return [file.stat().st_size for file in path.glob("ocdbt.process_*/d/*")]


@pytest.mark.parametrize("size", [1 << 14, 0], ids=["small", "no limit"])
def test_ocdbt_s_data_files_have_the_size_that_orbax_gives_them(tmp_path: Path, size: int) -> None:
    values = {str(number): jnp.arange(2048.0) for number in range(16)}
    args = ocp.args.PyTreeSave(values, ocdbt_target_data_file_size=size)
    ocp.PyTreeCheckpointer().save(tmp_path / "theirs", args=args)
    options = WriteOptions(use_ocdbt=True, ocdbt_target_data_file_bytes=size)
    checkpoint.save(tmp_path / "ours", values, options=options)
    # A file may exceed its size by one value, of 8 KiB. Without a limit, the number of files depends on timing, and
    # Orbax's files may have one value each.
    assert (max(data_files(tmp_path / "ours")) > (25 << 10)) == (size == 0)
    assert size == 0 or max(data_files(tmp_path / "theirs")) <= (25 << 10)
    assert_same(ocp.PyTreeCheckpointer().restore(tmp_path / "ours"), values)
    assert checkpoint.verify(tmp_path / "ours").damage == ()


@pytest.mark.parametrize("size", [-1, 1.5, True], ids=repr)
def test_data_files_of_an_impossible_size_are_refused(size: Any) -> None:
    with pytest.raises(SettingsError, match="WriteOptions.ocdbt_target_data_file_bytes is"):
        WriteOptions(ocdbt_target_data_file_bytes=size)


def test_without_array_metadatas_both_restore_what_both_write(tmp_path: Path) -> None:
    registry = type_handlers.create_type_handler_registry(
        (int, type_handlers.ScalarHandler()),
        (np.ndarray, type_handlers.NumpyHandler()),
        (jax.Array, type_handlers.ArrayHandler(array_metadata_store=None)),
    )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as theirs:
        theirs.save(tmp_path / "theirs", state())
        checkpoint.save(tmp_path / "ours", state(), options=WriteOptions(store_array_metadata=False))
        for path in (tmp_path / "theirs", tmp_path / "ours"):
            assert not (path / "array_metadatas").exists()
            assert_same(theirs.restore(path), state())
            assert_same(checkpoint.restore(path), state())
    assert_same(ocp.PyTreeCheckpointer().restore(tmp_path / "ours"), state())


def test_keys_without_array_metadatas_come_back_as_keys_from_the_manifest(tmp_path: Path) -> None:
    values = {"key": jax.random.key(3)}
    checkpoint.save(tmp_path / "ours", values, options=WriteOptions(store_array_metadata=False))
    assert_same(checkpoint.restore(tmp_path / "ours"), values)


@pytest.mark.parametrize("store", [None, array_metadata_store.Store()], ids=["None", "a store"])
def test_orbax_s_store_of_array_metadata_switches_the_file(tmp_path: Path, store: Any) -> None:
    handler = ArrayHandler(array_metadata_store=store)
    for future in handler.serialize([jnp.ones(3)], [ParamInfo("a", tmp_path)]):
        future.result()
    assert (tmp_path / "array_metadatas").exists() == (store is not None)
    assert_same(handler.deserialize([ParamInfo("a", tmp_path)]), [jnp.ones(3)])


def test_orbax_s_separate_folders_of_replicas_are_read(tmp_path: Path) -> None:
    arrays = type_handlers.ArrayHandler(
        use_replica_parallel=True,
        min_slice_bytes_for_replica_parallel=1,
        enable_replica_parallel_separate_folder=True,
        array_metadata_store=array_metadata_store.Store(),
    )
    registry = type_handlers.create_type_handler_registry((jax.Array, arrays))
    values = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), sharding()), "s": state()["w"]}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as checkpointer:
        checkpointer.save(tmp_path / "theirs", values)
    assert_same(checkpoint.restore(tmp_path / "theirs"), values)


def test_arguments_that_are_changed_count_for_the_next_save(tmp_path: Path) -> None:
    args = checkpoint.SaveArgs()
    values = {"a": jnp.arange(64.0)}
    with AsyncCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "0", values, save_args={"a": args})
        args.dtype, args.chunk_byte_size = jnp.dtype(jnp.bfloat16), 32
        checkpointer.save(tmp_path / "1", values, save_args={"a": args})
        found = [checkpointer.metadata(tmp_path / str(number)).tree["a"] for number in range(2)]
    assert [(leaf.dtype, leaf.chunk_shape) for leaf in found] == [(np.float32, (64,)), (jnp.bfloat16, (16,))]


def test_arguments_of_a_restore_can_be_changed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", state())
    args = checkpoint.ArrayRestoreArgs()
    args.sharding = sharding("y")
    found = checkpoint.restore(tmp_path / "a", {"w": state()["w"]}, restore_args={"w": args}, options=PARTIAL)
    assert found["w"].sharding == sharding("y")


PARTIAL = checkpoint.RestoreOptions(partial_restore=True)
