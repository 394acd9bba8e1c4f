"""One replica reads arrays, and sends them to the other replicas over the network of the devices.

This is for arrays that are replicated along an axis of the mesh. Only the processes of the primary replica, which is
one index of that axis, read from storage. The devices of the other replicas hold zeros. A sum over the replicas then
gives all of them the values of the primary replica. The bits of the values are summed as unsigned integers, so that no
value changes.

Every process makes the same call. Before a collective operation on the devices, all processes report whether reading
succeeded (``together``).
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gracepoint import machine
from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.loading.replica_agreement import ReplicaAgreement
from gracepoint.checkpoint.options import SingleReplica
from gracepoint.checkpoint.planning.shard_holders import normal_index
from gracepoint.checkpoint.reading.read_group import Values
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError, InvalidSharding, from_word

logger = logging.getLogger(__name__)

# Copies of an array that a device holds meanwhile: the replica's values or zeros, their sum, and the result.
_COPIES = 3


def check_sharding(replica: SingleReplica, where: str, sharding: Any) -> jax.sharding.NamedSharding:
    """Returns ``sharding`` if one of its replicas can read for the others.

    Raises:
        InvalidSharding: No replica can; says why.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise InvalidSharding(f"{where}: expected a NamedSharding, found {sharding}")
    mesh, axis = sharding.mesh, replica.replica_axis_index
    if not 0 <= axis < len(mesh.axis_names):
        raise InvalidSharding(f"{where}: the replicas' axis is {axis}, and the mesh has axes {mesh.axis_names}")
    count = mesh.devices.shape[axis]
    if not 0 <= replica.primary_replica_id < count:
        raise InvalidSharding(f"{where}: the primary replica is {replica.primary_replica_id}, and there are {count}")
    if count == 1:
        raise InvalidSharding(
            f"{where}: all devices are in the primary replica, as axis {mesh.axis_names[axis]!r} has one device; "
            f"there are no other replicas to hand anything to"
        )
    if mesh.axis_names[axis] in _axes_of(sharding.spec):
        raise InvalidSharding(
            f"{where}: it is sharded over axis {mesh.axis_names[axis]!r}, along which there should be replicas"
        )
    return sharding


def replica_of(replica: SingleReplica, where: str, reads: Any, sharding: Any, shape: Sequence[int]) -> SingleReplica:
    """Returns ``replica`` with the id of the replica that has the devices of the sharding ``reads``.

    Raises:
        InvalidSharding: These are not the devices of one replica, or get other parts than in ``sharding``.
    """
    mesh, axis = check_sharding(replica, where, sharding).mesh, replica.replica_axis_index
    replicas = [set(np.take(mesh.devices, index, axis=axis).flat) for index in range(mesh.devices.shape[axis])]
    devices = getattr(reads, "device_set", None)
    if devices not in replicas:
        raise InvalidSharding(
            f"{where}: single_replica_sharding is {reads}; expected one over the devices of one replica along axis "
            f"{mesh.axis_names[axis]!r}: {' or '.join(str(sorted(d.id for d in found)) for found in replicas)}"
        )
    parts = sharding.devices_indices_map(tuple(shape))
    theirs = reads.devices_indices_map(tuple(shape))
    if any(normal_index(theirs[d], shape) != normal_index(parts[d], shape) for d in devices):
        raise InvalidSharding(
            f"{where}: single_replica_sharding {reads} gives the replica's devices other parts than {sharding}"
        )
    return dataclasses.replace(replica, primary_replica_id=replicas.index(devices))


class OnOneReplica:
    """The placement of one array that the primary replica reads for all. ``hand_to_all`` builds it."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], sharding: Any, replica: SingleReplica) -> None:
        """``sharding`` is what ``check_sharding`` returned."""
        self.shape = tuple(shape)
        self.dtype = dtype
        self.sharding: jax.sharding.NamedSharding = sharding
        mesh, axis = sharding.mesh, replica.replica_axis_index
        self._replicas = mesh.devices.shape[axis]
        self._axis_name = mesh.axis_names[axis]
        self._shard_shape: tuple[int, ...] = tuple(sharding.shard_shape(self.shape))
        primary = set(np.take(mesh.devices, replica.primary_replica_id, axis=axis).flat)
        self._local = sharding.addressable_devices_indices_map(self.shape)
        self._primary: dict[Index, list[Any]] = {}
        for device, slices in self._local.items():
            if device in primary:
                self._primary.setdefault(normal_index(slices, self.shape), []).append(device)

    @property
    def regions(self) -> Sequence[Index]:
        return tuple(self._primary)

    @property
    def bytes_per_device(self) -> int:
        return math.prod(self._shard_shape) * self.dtype.itemsize

    def put(self, values: Values) -> Any:
        return {region: self._on_its_devices(region, part) for region, part in values.items()}

    def build(self, parts: Sequence[Any]) -> jax.Array:
        """Returns the bits of all replicas along a new first axis, with zeros in all replicas but the primary one."""
        held = {
            device: array
            for part in parts
            for region, arrays in part.items()
            for device, array in zip(self._primary[region], arrays, strict=True)
        }
        shard = _to_bits(np.empty((), self.dtype))
        inner = (*self._shard_shape, *shard.shape)
        arrays = [
            held[device] if device in held else jnp.zeros((1, *inner), shard.dtype, device=self._on(device))
            for device in self._local
        ]
        spec = jax.sharding.PartitionSpec(self._axis_name, *self.sharding.spec)
        return jax.make_array_from_single_device_arrays(
            (self._replicas, *self.shape, *shard.shape), jax.sharding.NamedSharding(self.sharding.mesh, spec), arrays
        )

    def _on_its_devices(self, region: Index, values: npt.NDArray[Any]) -> list[jax.Array]:
        bits, devices = _to_bits(values)[None], self._primary[region]
        return list(jax.device_put([bits] * len(devices), [self._on(device) for device in devices]))

    def _on(self, device: Any) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind)


def hand_to_all(
    placements: Sequence[OnOneReplica],
    parts: Sequence[list[Any]],
    read: Callable[[], None],
    replica: SingleReplica,
    together: ReplicaAgreement | None,
    deadline: Deadline,
) -> list[jax.Array]:
    """Reads in the primary replica, and returns the arrays in all processes.

    Args:
        placements: Placements of the arrays. The same in all processes.
        parts: One list for each array, which ``read`` fills.
        read: Reads this process's part.
        replica: How the replica reads for all others.
        together: The processes that restore together. None: this process restores alone.
        deadline: When the processes must have reported.

    Raises:
        CheckpointCorrupt: Another process found damage.
        CheckpointError: Another process could not read its part. Or there are several processes, and ``together`` is
            None.
        BarrierTimeout: Another process did not report in time.
    """
    if together is None and jax.process_count() > 1:
        raise CheckpointError(
            "one replica can read for all only where the processes restore together: found none to agree with"
        )
    started_s = time.monotonic()
    failure: Exception | None = None
    try:
        read()
    except Exception as error:  # noqa: BLE001 - told to the others, then raised
        failure = error
    metrics.tell_replica_read(time.monotonic() - started_s)
    limit_bytes = _agree(failure, replica, together, deadline)
    started_s = time.monotonic()
    arrays: list[jax.Array] = []
    for start, stop in _batches([placement.bytes_per_device for placement in placements], limit_bytes):
        stacked = tuple(placements[i].build(parts[i]) for i in range(start, stop))
        for i in range(start, stop):
            parts[i].clear()
        dtypes = tuple(placement.dtype for placement in placements[start:stop])
        shardings = tuple(placement.sharding for placement in placements[start:stop])
        merged = jax.jit(functools.partial(_merge, dtypes), out_shardings=shardings)(stacked)
        arrays += jax.block_until_ready(merged)
    elapsed_s = time.monotonic() - started_s
    metrics.tell_broadcast(elapsed_s)
    logger.info("replica %d handed %d arrays to all in %.3f s", replica.primary_replica_id, len(arrays), elapsed_s)
    return arrays


def _agree(
    failure: Exception | None, replica: SingleReplica, together: ReplicaAgreement | None, deadline: Deadline
) -> int:
    """Returns how many bytes of each device's part are sent at once, the same in all processes.

    Raises an error if reading failed in some process.
    """
    limit_bytes = replica.broadcast_memory_limit_bytes
    if limit_bytes is None:
        limit_bytes = int(_device_bytes() * replica.broadcast_memory_scaling_factor / _COPIES)
    if together is not None:
        told = together.tell(failure, limit_bytes, deadline)
        failed = [(process, said) for process, said in enumerate(told) if said.word is not None]
        if failed and failure is None:
            text = "; ".join(f"process {process} could not read its part: {said.failure}" for process, said in failed)
            words = {said.word for _, said in failed}
            raise from_word("corrupt" if words == {"corrupt"} else "error")(text)
        limit_bytes = min(said.limit_bytes for said in told)
    if failure is not None:
        raise failure
    return limit_bytes


def _batches(sizes_bytes: Sequence[int], limit_bytes: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of arrays that fit into the limit together. An array that is larger is in a range of its own."""
    start, total_bytes = 0, 0
    for position, size_bytes in enumerate(sizes_bytes):
        if position > start and total_bytes + size_bytes > limit_bytes:
            yield start, position
            start, total_bytes = position, 0
        total_bytes += size_bytes
    if sizes_bytes:
        yield start, len(sizes_bytes)


def _device_bytes() -> int:
    """Returns the free bytes on the device of this process that has the least free memory.

    If the devices do not report their memory, returns the free host memory divided by the number of devices.
    """
    free = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats:
            free.append(int(stats["bytes_limit"]) - int(stats.get("bytes_in_use", 0)))
    if free:
        return min(free)
    return machine.available_memory_bytes() // max(1, len(jax.local_devices()))


def _axes_of(spec: Sequence[Any]) -> set[str]:
    return {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None}


def _merge(dtypes: tuple[np.dtype[Any], ...], stacked: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(
        _from_bits(jnp.sum(bits, axis=0, dtype=bits.dtype), dtype) for bits, dtype in zip(stacked, dtypes, strict=True)
    )


def _to_bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of ``values`` as unsigned integers. Complex values get one more axis, of size two.

    Types that are smaller than a byte on the device are converted to a wider type first.
    """
    dtype = values.dtype
    wide = _widened(dtype)
    if wide is not None:
        values = values.astype(wide)
    if dtype.kind == "c":
        values = np.stack([values.real, values.imag], axis=-1)
    return values.view(f"u{values.dtype.itemsize}")


def _from_bits(bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Returns the values of type ``dtype`` whose bits ``_to_bits`` returned. Runs on the device."""
    wide = _widened(dtype)
    if dtype.kind == "b":
        return bits != 0
    if wide is not None:
        return jax.lax.bitcast_convert_type(bits, wide).astype(dtype)
    if dtype.kind == "c":
        halves = jax.lax.bitcast_convert_type(bits, np.dtype(f"f{dtype.itemsize // 2}"))
        return jax.lax.complex(halves[..., 0], halves[..., 1])
    return jax.lax.bitcast_convert_type(bits, dtype)


def _widened(dtype: np.dtype[Any]) -> np.dtype[Any] | None:
    """Returns a type of whole bytes that holds all values of a type smaller than a byte. None for other types."""
    for kind, info, wide in ((jnp.integer, jnp.iinfo, np.int8), (jnp.floating, jnp.finfo, np.float32)):
        if jnp.issubdtype(dtype, kind) and info(dtype).bits < 8:
            return np.dtype(wide)
    return None
