"""What is copied from devices, and in which pieces: on CPU devices as if their memory were not the host's, and on GPUs.

With ``pinned_host_transfer`` the values of CPU devices are copied as those of accelerators are, by the same slices.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from gracepoint.checkpoint.format.array_spec import Chunk
from gracepoint.checkpoint.options import WriteOptions
from gracepoint.checkpoint.saving import device_copy
from gracepoint.checkpoint.saving.device_copy import Pull
from gracepoint.checkpoint.saving.host_snapshot import Transfer
from gracepoint.checkpoint.saving.planner import SavePlanner, SaveSettings
from gracepoint.deadline import Deadline
from gracepoint.process_group import SingleProcess
from tests import accelerators
from tests.unit.checkpoint.fakes.engine import assert_same, engine, restore, save

pytestmark = pytest.mark.integration

CHUNK_BYTES = 1 << 10
WAYS = {
    "cpu": WriteOptions(pinned_host_transfer=True, target_chunk_bytes=CHUNK_BYTES),
    "gpu": WriteOptions(target_chunk_bytes=CHUNK_BYTES),
    "gpu, not pinned": WriteOptions(pinned_host_transfer=False, target_chunk_bytes=CHUNK_BYTES),
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Devices and how values come from them; shards of more than 4 KiB are large."""
    if request.param != "cpu" and not accelerators.has_gpu():
        pytest.skip(accelerators.NO_GPU)
    monkeypatch.setattr(device_copy, "_WHOLE_BYTES", 4 << 10)
    return str(request.param)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Pull, Any]]:
    """What was copied, with the array that it was copied from."""
    found: list[tuple[Pull, Any]] = []
    start = device_copy.start

    def noting(pull: Pull, data: Any, options: WriteOptions) -> Any:
        copied = start(pull, data, options)
        found.append((pull, copied))
        return copied

    monkeypatch.setattr(device_copy, "start", noting)
    return found


def devices(way: str) -> Sequence[Any]:
    found: Sequence[Any] = jax.devices(way.split(",")[0])
    return found[: 2 if len(found) >= 2 else 1]


def state(way: str) -> Any:
    """Large shards of many types, a transposed one, and small ones."""
    where = NamedSharding(Mesh(np.array(devices(way)), ("x",)), PartitionSpec("x"))
    alone = SingleDeviceSharding(devices(way)[-1])
    values = np.arange(1 << 14).reshape(128, 128)
    large = {
        name: jax.device_put(values.astype(jnp.dtype(name)), where)
        for name in ("bool", "int4", "uint32", "bfloat16", "float32", "complex64", "float8_e4m3fn")
    }
    turned = Format(Layout(major_to_minor=(1, 0)), alone)
    return {
        "large": large,
        "turned": jax.device_put(values.astype(np.float32), turned),
        "small": jax.device_put(np.arange(8.0), alone),
        "scalar": jax.device_put(np.float32(3), alone),
        "empty": jax.device_put(np.zeros((0, 4), np.float32), alone),
        "key": jax.random.wrap_key_data(jax.device_put(jax.random.key_data(jax.random.key(3)), alone)),
        "numpy": np.arange(3),
        "count": 3,
    }


@pytest.mark.parametrize("in_background", [True, False], ids=["snapshot", "stream"])
def test_large_shards_come_chunk_by_chunk_and_bit_for_bit(
    way: str, tmp_path: Path, started: list[tuple[Pull, Any]], in_background: bool
) -> None:
    saved = state(way)
    checkpointer = engine(tmp_path, options=WAYS[way])
    if in_background:
        checkpointer.save_in_background(1, saved, {})
        checkpointer.close(60)
    else:
        save(checkpointer, 1, saved)
    restored = restore(tmp_path, saved)
    assert restored is not None
    assert_same(restored.state, saved)
    assert sum(pull.region != pull.shard.index for pull, _ in started) > 8 * 16
    assert all(pull.bytes <= 4 << 10 for pull, _ in started)


def test_the_host_keeps_no_copy_of_the_states_own_arrays(
    way: str, tmp_path: Path, started: list[tuple[Pull, Any]]
) -> None:
    saved = state(way)
    arrays = [
        leaf for leaf in jax.tree.leaves(saved) if isinstance(leaf, jax.Array) and leaf.dtype != saved["key"].dtype
    ]
    shards = [array.addressable_data(position) for array in arrays for position in range(len(array.devices()))]
    save(engine(tmp_path, options=WAYS[way]), 1, saved)
    assert not {id(copied) for _, copied in started} & {id(shard) for shard in shards}
    assert [shard for shard in shards if cast(Any, shard)._npy_value is not None] == []


@pytest.mark.parametrize("in_background", [True, False], ids=["snapshot", "stream"])
def test_no_slice_is_compiled_in_a_save_that_was_prepared(
    way: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    started: list[tuple[Pull, Any]],
    in_background: bool,
) -> None:
    unseen = NamedSharding(Mesh(np.array(devices(way)), ("x",)), PartitionSpec("x"))
    shape = (64, 232 if in_background else 248)
    saved = {"w": jax.device_put(np.zeros(shape, np.float32), unseen)}
    checkpointer = engine(tmp_path, options=WAYS[way])
    checkpointer.prepare(saved)
    with jax.log_compiles():
        jax.jit(lambda x: x - 1)(saved["w"])
        assert "Compiling" in caplog.text  # else this tests nothing
        caplog.clear()
        if in_background:
            checkpointer.save_in_background(1, saved, {})
        else:
            save(checkpointer, 1, saved)
        checkpointer.close(60)
    assert "Compiling" not in caplog.text
    assert any(pull.region != pull.shard.index for pull, _ in started)


def test_device_without_memory_for_slices_is_saved(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    saved = state(way)
    jax.clear_caches()  # of the programs that slice
    monkeypatch.setattr(jax.lax, "dynamic_slice", full)
    checkpointer = engine(tmp_path, options=WAYS[way])
    checkpointer.prepare(saved)
    save(checkpointer, 1, saved)
    assert "as its device could not: RESOURCE_EXHAUSTED" in caplog.text
    restored = restore(tmp_path, saved)
    assert restored is not None
    assert_same(restored.state, saved)


def test_host_memory_of_a_device_is_sliced_in_place(way: str, tmp_path: Path, started: list[tuple[Pull, Any]]) -> None:
    offloaded = SingleDeviceSharding(devices(way)[0], memory_kind="pinned_host")
    saved = {"w": jax.device_put(np.arange(1 << 12, dtype=np.float32), offloaded)}
    save(engine(tmp_path, options=WAYS[way]), 1, saved)
    assert [pull.bytes for pull, _ in started] == [1 << 14]
    restored = restore(tmp_path, {"w": np.zeros(1 << 12, np.float32)})
    assert restored is not None
    np.testing.assert_array_equal(restored.state["w"], np.arange(1 << 12, dtype=np.float32))


@pytest.fixture
def limit_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    """How much may be on its way from devices."""
    monkeypatch.setattr(device_copy, "AHEAD_BYTES", 8 << 10)
    return 8 << 10


def test_bytes_from_devices_count_until_they_are_written(way: str, limit_bytes: int) -> None:
    options, in_memory, most = WAYS[way], 0, 0
    planner = SavePlanner(SingleProcess(), "job-0-a", SaveSettings(options))
    leaves, prepared = planner.plan(state(way))
    transfer = Transfer(leaves, prepared.specs, prepared.plan, options, None)
    unwritten: list[Chunk] = []
    deadline = Deadline.after(60.0, time.monotonic)
    lock = threading.Lock()

    def write_all() -> None:
        """A disk that is slower than the devices: it writes what there is only when there is no room for more."""
        nonlocal in_memory
        while unwritten or not ended.is_set():
            with lock:
                written, unwritten[:] = unwritten[:], []
                in_memory -= sum(chunk.bytes for chunk in written)
            for chunk in written:
                transfer.written(chunk)
            ended.wait(0.001)

    ended = threading.Event()
    writer = threading.Thread(target=write_all)
    writer.start()
    try:
        for chunk, values in transfer.chunks(deadline):
            if isinstance(leaves[chunk.leaf].data, np.ndarray):
                continue  # takes no memory
            with lock:
                unwritten.append(chunk)
                in_memory += values.nbytes
                most = max(most, in_memory)
    finally:
        ended.set()
        writer.join(30)
    assert 0 < most <= limit_bytes


@pytest.mark.parametrize(
    "writer",
    [{}, {"express": False}, {"use_ocdbt": True}, {"compression": "zstd"}, {"use_ocdbt": True, "compression": "zstd"}],
    ids=["express", "files", "OCDBT", "compressed", "compressed OCDBT"],
)
def test_every_writer_makes_room_as_it_writes(
    way: str, tmp_path: Path, limit_bytes: int, writer: dict[str, Any]
) -> None:
    options, saved = dataclasses.replace(WAYS[way], **writer), state(way)
    assert sum(leaf.nbytes for leaf in saved["large"].values()) > 10 * limit_bytes
    save(engine(tmp_path, options=options), 1, saved)
    restored = restore(tmp_path, saved)
    assert restored is not None
    assert_same(restored.state, saved)


def test_what_is_in_host_memory_waits_for_no_room(limit_bytes: int) -> None:
    options = WriteOptions(target_chunk_bytes=CHUNK_BYTES)
    saved = {"w": jnp.arange(1 << 14, dtype=jnp.float32), "n": np.arange(1 << 14)}
    leaves, prepared = SavePlanner(SingleProcess(), "job-0-a", SaveSettings(options)).plan(saved)
    transfer = Transfer(leaves, prepared.specs, prepared.plan, options, None)
    chunks = [chunk for chunk, _ in transfer.chunks(Deadline.after(0.0, time.monotonic))]
    assert sum(chunk.bytes for chunk in chunks) == 3 << 16
