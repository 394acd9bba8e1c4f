"""One replica reads for all: bit for bit, only its own part, in batches of bounded memory, and only where it can.

Here the replicas are devices of one process; over several processes they are in tests/multiprocess/test_restore.py.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from gracepoint import machine
from gracepoint.checkpoint.handler_registry import ParamInfo
from gracepoint.checkpoint.handlers import ArrayHandler, SingleReplicaArrayHandler
from gracepoint.checkpoint.options import (
    ArrayRestoreArgs,
    RestoreOptions,
    SingleReplica,
    SingleReplicaArrayRestoreArgs,
    WriteOptions,
)
from gracepoint.checkpoint.reading import stored_arrays
from gracepoint.checkpoint.reading.stored_tree import open_tree
from gracepoint.checkpoint.restoring import placement as single_replica
from gracepoint.checkpoint.restoring.leaves import target_of
from gracepoint.checkpoint.restoring.placement import OnOneReplica
from gracepoint.checkpoint.restoring.restore_tree import read_tree
from gracepoint.checkpoint.storage.checks import read_checked
from gracepoint.checkpoint.storage.locations import storage_path
from gracepoint.checkpoint.storage.storage_path import StoragePath
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, InvalidSharding
from gracepoint.process_group import SingleProcess
from tests.unit.checkpoint.fakes.engine import assert_same, engine, save, sharding

pytestmark = pytest.mark.integration

RAW = WriteOptions(use_ocdbt=False)
SPECIAL = np.asarray([0x7FC00001, 0xFF800001, 0x80000000, 1], np.uint32).view(np.float32)  # NaNs, -0.0, a subnormal


def placed(values: Any, *spec: Any) -> jax.Array:
    return jax.device_put(np.asarray(values), sharding(*spec))


def state() -> dict[str, Any]:
    """Returns arrays of every kind of bits, replicated along x."""
    numbers = np.arange(16).reshape(4, 4)
    return {
        "special": placed(SPECIAL, "y"),
        "half": placed(SPECIAL.view(np.uint16).view(jnp.bfloat16), "y"),
        "eighth": placed(np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn), "y"),
        "complex": placed(np.stack([SPECIAL, SPECIAL[::-1]], -1).view(np.complex64)[:, 0], "y"),
        "int4": placed(np.arange(-8, 8).astype(jnp.int4), "y"),
        "int32": placed(numbers - 8, "y"),
        "uint32": placed(numbers.astype(np.uint32) + 2**31, None, "y"),
        "bool": placed(numbers % 3 == 0, "y"),
        "number": placed(np.float32(-0.0)),
        "replicated": placed(numbers.astype(np.float32)),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), sharding("y")),
    }


def read(folder: Path, like: Any, **replica: Any) -> Any:
    args = jax.tree.map(lambda leaf: SingleReplicaArrayRestoreArgs(sharding=leaf.sharding), like)
    options = RestoreOptions(single_replica=SingleReplica(**replica))
    return read_tree(storage_path(folder), like, args, options=options, deadline=Deadline.after(60, time.monotonic))


@pytest.mark.parametrize("primary", [0, 1])
def test_all_replicas_have_the_primary_one_s_values_bit_for_bit(tmp_path: Path, primary: int) -> None:
    save(engine(tmp_path), 1, state())
    found = read(tmp_path / "1", state(), primary_replica_id=primary)
    assert_same(found, state())
    for name, leaf in state().items():
        assert found[name].sharding == leaf.sharding, name
        data = jax.random.key_data(found[name]) if name == "keys" else found[name]
        by_index: dict[Any, bytes] = {}
        for shard in data.addressable_shards:  # the replicas hold the same
            assert (
                by_index.setdefault(str(shard.index), np.asarray(shard.data).tobytes())
                == np.asarray(shard.data).tobytes()
            ), name


@pytest.mark.parametrize("primary", [0, 1])
def test_only_the_primary_replica_reads_and_each_chunk_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, primary: int
) -> None:
    save(engine(tmp_path, options=RAW), 1, {"w": placed(np.arange(16.0).reshape(4, 4).astype(np.float32), "x", "y")})
    opened: list[str] = []
    given: list[Any] = []  # the devices that get what was read
    real = single_replica.OnOneReplica.put

    def noted(path: StoragePath, *rest: Any) -> None:
        opened.append(path.name)
        read_checked(path, *rest)

    def put(placement: single_replica.OnOneReplica, values: Any) -> Any:
        part = real(placement, values)
        given.extend(device for arrays in part.values() for array in arrays for device in array.devices())
        return part

    monkeypatch.setattr(single_replica.OnOneReplica, "put", put)
    monkeypatch.setattr(stored_arrays, "read_checked", noted)
    like = {"w": jax.ShapeDtypeStruct((4, 4), np.float32, sharding=sharding(None, "y"))}
    found = read(tmp_path / "1", like, primary_replica_id=primary)
    np.testing.assert_array_equal(found["w"], np.arange(16.0).reshape(4, 4))
    assert set(given) == set(sharding().mesh.devices[primary])
    assert sorted(name for name in opened if name[0].isdigit()) == ["0.0", "0.1", "1.0", "1.1"]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many arrays are handed over together."""
    found: list[int] = []
    of = single_replica.Sums.of

    def noted(sums: single_replica.Sums, start: int, stop: int) -> Any:
        found.append(stop - start)
        return of(sums, start, stop)

    monkeypatch.setattr(single_replica.Sums, "of", noted)
    return found


def test_arrays_are_handed_over_in_batches_of_the_memory_that_is_given(tmp_path: Path, batches: list[int]) -> None:
    like = {f"w{i}": placed(np.full((4, 4), i, np.float32), "y") for i in range(6)}  # 32 bytes of each device
    like["w9"] = placed(np.arange(64, dtype=np.float32))  # 256
    save(engine(tmp_path), 1, like)
    for limit_bytes, expected in ((64, [2, 2, 2, 1]), (1, [1] * 7), (1 << 20, [7])):
        batches.clear()
        assert_same(read(tmp_path / "1", like, broadcast_memory_limit_bytes=limit_bytes), like)
        assert batches == expected


@pytest.mark.parametrize(
    ("replica", "expected"),
    [
        pytest.param({"broadcast_memory_scaling_factor": 1.0}, [4, 2], id="all"),
        pytest.param({"broadcast_memory_scaling_factor": 0.5}, [2, 2, 2], id="half"),
        pytest.param({}, [3, 3], id="three quarters by default"),
    ],
)
def test_batches_use_a_fraction_of_the_devices_free_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    batches: list[int],
    replica: dict[str, float],
    expected: list[int],
) -> None:
    like = {f"w{i}": placed(np.full((4, 4), i, np.float32), "y") for i in range(6)}  # 32 bytes of each device
    save(engine(tmp_path), 1, like)
    # Three copies of four arrays on each device. These devices say nothing of their memory, which is the host's.
    monkeypatch.setattr(machine, "available_memory_bytes", lambda: 3 * 128 * len(jax.local_devices()))
    assert_same(read(tmp_path / "1", like, **replica), like)
    assert batches == expected


def test_values_are_cast_and_cut_before_they_are_handed_over(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, {"w": placed(np.arange(16.0, dtype=np.float32).reshape(4, 4), "y")})
    args = SingleReplicaArrayRestoreArgs(sharding=sharding("y"), dtype=jnp.bfloat16, shape=(6, 2), strict=False)
    found = read_tree(storage_path(tmp_path / "1"), None, {"w": args}, deadline=Deadline.after(60, time.monotonic))
    expected = np.zeros((6, 2))
    expected[:4] = np.arange(16.0).reshape(4, 4)[:, :2]
    assert found["w"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found["w"], np.float32), expected)


def test_leaves_of_one_replica_and_others_may_be_mixed(tmp_path: Path) -> None:
    saved = {"one": placed(np.arange(4.0), "y"), "all": placed(np.arange(4.0), ("x", "y")), "count": 3}
    save(engine(tmp_path), 1, saved)
    args = {"one": SingleReplicaArrayRestoreArgs(), "all": ArrayRestoreArgs(sharding=sharding())}
    found = read_tree(storage_path(tmp_path / "1"), saved, args, deadline=Deadline.after(60, time.monotonic))
    assert found["one"].sharding == sharding("y")
    assert found["all"].sharding == sharding()
    assert found["count"] == 3


MESH = sharding().mesh
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (jax.sharding.SingleDeviceSharding(jax.devices()[0]), {}, "leaf 'w': expected a NamedSharding, found Single"),
    (sharding("x"), {}, "leaf 'w': it is sharded over axis 'x', along which there should be replicas"),
    (sharding(("y", "x")), {}, "leaf 'w': it is sharded over axis 'x'"),
    (sharding("y"), {"replica_axis_index": 1}, "leaf 'w': it is sharded over axis 'y'"),
    (
        sharding("y"),
        {"replica_axis_index": 2},
        r"leaf 'w': the replicas' axis is 2, and the mesh has axes \('x', 'y'\)",
    ),
    (sharding("y"), {"primary_replica_id": 2}, "leaf 'w': the primary replica is 2, and there are 2"),
    (
        NamedSharding(jax.sharding.Mesh(MESH.devices.reshape(1, 4), ("x", "y")), jax.sharding.PartitionSpec("y")),
        {},
        "leaf 'w': all devices are in the primary replica",
    ),
    (sharding("y"), {"broadcast_memory_scaling_factor": 1.5}, "broadcast_memory_scaling_factor is 1.5"),
]


@pytest.mark.parametrize(("where", "replica", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_a_sharding_by_which_one_replica_cannot_read_for_all_is_refused(
    tmp_path: Path, where: Any, replica: dict[str, Any], message: str
) -> None:
    save(engine(tmp_path), 1, {"w": np.zeros(4, np.float32)})
    with pytest.raises(InvalidSharding, match=message):
        read(tmp_path / "1", {"w": jax.ShapeDtypeStruct((4,), np.float32, sharding=where)}, **replica)


def test_a_sharding_must_be_given(tmp_path: Path) -> None:
    save(engine(tmp_path), 1, {"w": placed(np.arange(4.0), "y")})
    with pytest.raises(CheckpointError, match="leaf 'w': give a sharding, by which one replica reads it for all"):
        read_tree(
            storage_path(tmp_path / "1"),
            None,
            {"w": SingleReplicaArrayRestoreArgs()},
            deadline=Deadline.after(60, time.monotonic),
        )


def test_the_handler_restores_what_it_serialized(tmp_path: Path) -> None:
    handler = SingleReplicaArrayHandler(gang=SingleProcess(), options=RAW)
    values = list(state().values())
    infos = [ParamInfo(name, tmp_path) for name in state()]
    for future in handler.serialize(values, infos):
        future.result(timeout=60)
    handler.finalize(tmp_path)
    args = [SingleReplicaArrayRestoreArgs(sharding=value.sharding) for value in values]
    assert_same(handler.deserialize(infos, args), values)
    assert handler.memory_size(values) == ArrayHandler(RAW).memory_size(values)
    with pytest.raises(CheckpointError, match="leaf 'special': expected SingleReplicaArrayRestoreArgs, found Array"):
        handler.deserialize(infos, [ArrayRestoreArgs(sharding=value.sharding) for value in values])
    with pytest.raises(CheckpointError, match="leaf 'special': expected SingleReplicaArrayRestoreArgs"):
        handler.deserialize(infos)


def replica_sharding(replica: int, *spec: Any) -> NamedSharding:
    """Returns a sharding over the devices of one replica along x."""
    return NamedSharding(jax.sharding.Mesh(sharding().mesh.devices[replica], ("y",)), jax.sharding.PartitionSpec(*spec))


@pytest.mark.parametrize("replica", [0, 1])
def test_the_replica_over_whose_devices_a_sharding_is_given_reads(tmp_path: Path, replica: int) -> None:
    like = {"a": placed(np.arange(8.0), "y")}
    save(engine(tmp_path, options=RAW), 1, like)
    args = SingleReplicaArrayRestoreArgs(sharding=sharding("y"), single_replica_sharding=replica_sharding(replica, "y"))
    (target,) = [
        target_of(leaf, None, args)
        for leaf in open_tree(storage_path(tmp_path / "1"), Deadline.after(60, time.monotonic)).leaves.values()
    ]
    assert isinstance(target.placement, OnOneReplica)
    part = target.placement.put({region: np.zeros(4, np.float32) for region in target.placement.regions})
    reading = {device for arrays in part.values() for array in arrays for device in array.devices()}
    assert reading == set(sharding().mesh.devices[replica].flat)
    found = read_tree(storage_path(tmp_path / "1"), like, args, deadline=Deadline.after(60, time.monotonic))
    assert_same(found, like)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        pytest.param(lambda: "nonsense", "single_replica_sharding is nonsense; expected one over", id="no sharding"),
        pytest.param(lambda: sharding("y"), "expected one over the devices of one replica along axis 'x'", id="all"),
        pytest.param(lambda: replica_sharding(0), "gives the replica's devices other parts than", id="other parts"),
    ],
)
def test_a_sharding_of_one_replica_that_is_none_is_refused(tmp_path: Path, given: Any, message: str) -> None:
    like = {"a": placed(np.arange(8.0), "y")}
    save(engine(tmp_path, options=RAW), 1, like)
    args = SingleReplicaArrayRestoreArgs(sharding=sharding("y"), single_replica_sharding=given())
    with pytest.raises(InvalidSharding, match=message):
        read_tree(storage_path(tmp_path / "1"), like, args, deadline=Deadline.after(60, time.monotonic))


def test_reading_and_handing_over_are_recorded_by_orbaxs_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gracepoint")
    heard: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        heard.append(event)

    like = {"a": placed(np.arange(8.0), "y")}
    save(engine(tmp_path, options=RAW), 1, like)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        read(tmp_path / "1", like)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert "/jax/checkpoint/read/primary_replica_deserialization_duration_secs" in heard
    assert "/jax/checkpoint/read/broadcast_duration_secs" in heard
    assert "process 0 read 32 bytes of" in caplog.text
    assert "replica 0 handed 1 arrays to all in" in caplog.text
