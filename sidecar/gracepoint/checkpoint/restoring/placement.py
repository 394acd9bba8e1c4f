"""Where the values of a restored array are placed: the regions that this process reads, and the array built from them.

Arrays that are replicated along an axis of the mesh can be read by one replica, which sends them to the others over the
network of the devices (``OnOneReplica``). Only the processes of the primary replica, which is one index of that axis,
read from storage. Arrays may have different primary replicas. The devices of the other replicas hold zeros. A sum over
the replicas then gives all of them the values of the primary replica. The bits of the values are summed as unsigned
integers, so that no value changes.

For such arrays every process makes the same call (``hand_to_all``). If a process failed before a collective operation
on the devices, the others would wait in that operation forever. So each process first reports, with a timeout, whether
it has read its part (``ReplicaAgreement``). A process that fails earlier reports that at once. Other arrays are read
meanwhile. If the processes have agreed on their memory before they read, the sums are compiled while they read.

``Sums`` are the programs that give the values of primary replicas to all replicas, as a sum over the bits of the values
as unsigned integers: unlike a sum of the values, that changes none. ``compile`` lowers the programs in the caller's
thread, because settings that JAX lowers by, such as x64, may hold for that thread alone. Another thread ("gracepoint:
compiling", a daemon) then compiles them while the caller reads. Until ``wait`` returns, only that thread uses the
compiled programs. A compilation cannot be ended: if it takes too long, its thread outlives the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental.layout import Format

from gracepoint import machine
from gracepoint.checkpoint import metrics
from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.options import SingleReplica, SingleReplicaArrayRestoreArgs
from gracepoint.checkpoint.orbax import is_orbax
from gracepoint.checkpoint.planning.grid import normal_index
from gracepoint.checkpoint.reading.parallel_reader import Values
from gracepoint.deadline import Deadline
from gracepoint.errors import BarrierError, CheckpointError, InvalidSharding, from_word, to_word
from gracepoint.jax_isolation import isolated, jit, setting
from gracepoint.process_group import ProcessGroup
from gracepoint.threads import NoThread, start_thread


@dataclasses.dataclass(frozen=True)
class ReplicaAnswer:
    """The report of one process.

    Attributes:
        limit_bytes: Most bytes of each device's part that the process can receive at once.
        word: Kind of the error with which reading failed (``errors.to_word``). None if the process has read its part.
        failure: Message of that error. Empty if there is none.
    """

    limit_bytes: int
    word: str | None
    failure: str


class ReplicaAgreement:
    """The reports that the processes exchange in one restore. At each meeting, each process reports once.

    Args:
        gang: The processes that restore together.
        key: Prefix of the keys of the exchanges. Unique to this restore.
        meets_first: Whether the processes also meet before they read (``ready``). The same in all processes.

    Attributes:
        agreed_bytes: Most bytes of each device's part that every process can receive at once. None before ``ready``.
    """

    def __init__(self, gang: ProcessGroup, key: str, *, meets_first: bool = False) -> None:
        self.gang = gang
        self.meets_first = meets_first
        self.agreed_bytes: int | None = None
        self._key = key
        self._meeting: str | None = f"{key}/ready" if meets_first else key  # the next one. None: there is none

    def ready(self, limit_bytes: int, deadline: Deadline) -> int:
        """Meets before reading. Returns ``agreed_bytes``. No other meeting follows without ``expects_report``.

        Raises:
            CheckpointError: Another process has failed.
            BarrierTimeout: A process did not report in time.
        """
        answers = self.report(None, limit_bytes, deadline)
        raise_failure_in(answers)
        self.agreed_bytes = min(answer.limit_bytes for answer in answers)
        return self.agreed_bytes

    def expects_report(self) -> None:
        """Notes after ``ready`` that all processes report once more."""
        self._meeting = self._key

    def report(self, failure: Exception | None, limit_bytes: int, deadline: Deadline) -> list[ReplicaAnswer]:
        """Reports for this process at the next meeting. Returns the reports of all processes, by index.

        Raises:
            BarrierTimeout: A process did not report in time.
        """
        key, self._meeting = self._meeting, None
        assert key is not None
        kind, text = (None, "") if failure is None else (to_word(failure), str(failure) or repr(failure))
        message = json.dumps([limit_bytes, kind, text])
        answers = self.gang.gather(key, message, timeout_s=deadline.remaining_s())
        return [ReplicaAnswer(*json.loads(answer)) for answer in answers]

    @contextlib.contextmanager
    def reporting_errors(self, deadline: Deadline) -> Iterator[None]:
        """Reports an error that leaves the block, if the others wait for this process at a meeting."""
        try:
            yield
        except Exception as error:
            if self._meeting is not None:
                with contextlib.suppress(BarrierError):
                    self.report(error, 0, deadline)
            raise


def raise_failure_in(answers: Sequence[ReplicaAnswer]) -> None:
    """Raises an error if a process reported one. If all reported the same kind of error, this one is of that kind."""
    failed = [(process, answer) for process, answer in enumerate(answers) if answer.word is not None]
    if failed:
        text = "; ".join(f"process {process} could not read its part: {answer.failure}" for process, answer in failed)
        kinds = {answer.word for _, answer in failed}
        raise from_word(str(kinds.pop()) if len(kinds) == 1 else "error")(text)


def asks_one_replica(restore_args: Any) -> bool:
    """Returns whether some of ``restore_args`` ask one replica to read for all."""
    kind = SingleReplicaArrayRestoreArgs
    return any(isinstance(arg, kind) or is_orbax(arg, kind.__name__) for arg in jax.tree.leaves(restore_args))


def to_bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
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


def from_bits(bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Returns the values of type ``dtype`` whose bits ``to_bits`` returned. Runs on the device."""
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


logger = logging.getLogger(__name__)

# Copies of an array that a device holds during the sum: the replica's values or zeros, their sum, and the result.
_COPIES = 3
# Most seconds to wait for a compilation whose result is not needed.
_END_S = 10.0


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
    if mesh.axis_names[axis] in axes_of(tuple(sharding.spec)):
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
            f"{mesh.axis_names[axis]!r}: {' or '.join(str(sorted(d.id for d in ids)) for ids in replicas)}"
        )
    parts = sharding.devices_indices_map(tuple(shape))
    indices = reads.devices_indices_map(tuple(shape))
    if any(normal_index(indices[d], shape) != normal_index(parts[d], shape) for d in devices):
        raise InvalidSharding(
            f"{where}: single_replica_sharding {reads} gives the replica's devices other parts than {sharding}"
        )
    return dataclasses.replace(replica, primary_replica_id=replicas.index(devices))


#: Arrays of zeros on devices, by device, shape and type.
Zeros = dict[tuple[Any, tuple[int, ...], Any], jax.Array]


class OnOneReplica:
    """The placement of one array that the primary replica reads for all. ``hand_to_all`` builds it."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], sharding: Any, replica: SingleReplica) -> None:
        """``sharding`` is what ``check_sharding`` returned."""
        self.shape = tuple(shape)
        self.dtype = dtype
        self.sharding: jax.sharding.NamedSharding = sharding
        mesh, axis = sharding.mesh, replica.replica_axis_index
        self.primary = replica.primary_replica_id
        self._replicas = mesh.devices.shape[axis]
        self._axis_name = mesh.axis_names[axis]
        self._shard_shape: tuple[int, ...] = tuple(sharding.shard_shape(self.shape))
        primary = set(np.take(mesh.devices, replica.primary_replica_id, axis=axis).flat)
        self._local = sharding.addressable_devices_indices_map(self.shape)
        self._primary: dict[Index, list[Any]] = {}
        for device, slices in self._local.items():
            if device in primary:
                self._primary.setdefault(normal_index(slices or (), self.shape), []).append(device)

    @property
    def regions(self) -> Sequence[Index]:
        return tuple(self._primary)

    @property
    def bytes_per_device(self) -> int:
        return math.prod(self._shard_shape) * self.dtype.itemsize

    def put(self, values: Values) -> Any:
        return {region: self._on_its_devices(region, part) for region, part in values.items()}

    def form(self) -> jax.ShapeDtypeStruct:
        """Returns the form of what ``build`` returns: the bits of all replicas along a new first axis."""
        bits = to_bits(np.empty((), self.dtype))
        spec = jax.sharding.PartitionSpec(self._axis_name, *self.sharding.spec)
        return jax.ShapeDtypeStruct(
            (self._replicas, *self.shape, *bits.shape),
            bits.dtype,
            sharding=jax.sharding.NamedSharding(self.sharding.mesh, spec),
        )

    @isolated()
    def build(self, parts: Sequence[Any], zeros: Zeros | None = None) -> jax.Array:
        """Returns the bits of all replicas, with zeros in all replicas but the primary one.

        ``zeros`` has the zeros that earlier calls made. Zeros that are missing are made and added to it.
        """
        zeros = {} if zeros is None else zeros
        held = {
            device: array
            for part in parts
            for region, arrays in part.items()
            for device, array in zip(self._primary[region], arrays, strict=True)
        }
        form = self.form()
        inner = (1, *self._shard_shape, *form.shape[1 + len(self.shape) :])
        for device in self._local:
            key = (device, inner, form.dtype)
            # A copy from the host needs no program to be compiled. Arrays of equal shape and type share their zeros.
            if device not in held and key not in zeros:
                zeros[key] = jax.device_put(np.zeros(inner, form.dtype), self._on(device))
        arrays = [held[d] if d in held else zeros[d, inner, form.dtype] for d in self._local]
        return jax.make_array_from_single_device_arrays(form.shape, form.sharding, arrays)

    def _on_its_devices(self, region: Index, values: npt.NDArray[Any]) -> list[jax.Array]:
        bits, devices = to_bits(values)[None], self._primary[region]
        with isolated():
            return list(jax.device_put([bits] * len(devices), [self._on(device) for device in devices]))

    def _on(self, device: Any) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(device, memory_kind=self.sharding.memory_kind)


class Sums:
    """The programs that give the values of the primary replicas to all. One for each batch of arrays."""

    def __init__(self, placements: Sequence[OnOneReplica]) -> None:
        self._placements = placements
        self._compiled: dict[tuple[int, int], Any] = {}  # written by the thread, read when it has ended
        self._thread: threading.Thread | None = None

    def batches(self, limit_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of arrays that fit into the limit together. An array that is larger is in a separate range.

        ``limit_bytes`` is for each device's part.
        """
        start, total_bytes = 0, 0
        for position, placement in enumerate(self._placements):
            if position > start and total_bytes + placement.bytes_per_device > limit_bytes:
                yield start, position
                start, total_bytes = position, 0
            total_bytes += placement.bytes_per_device
        if self._placements:
            yield start, len(self._placements)

    def compile(self, limit_bytes: int) -> None:
        """Lowers the programs of all batches, and starts to compile them."""
        lowered = {(start, stop): self._lowered(start, stop) for start, stop in self.batches(limit_bytes)}
        self._thread = threading.Thread(
            target=self._compile, args=(lowered,), name="gracepoint: compiling", daemon=True
        )
        try:
            start_thread(self._thread)
        except NoThread:  # the system has no more threads: each is compiled when it is used
            self._thread = None

    def wait(self, deadline: Deadline) -> None:
        """Returns when ``compile`` has ended.

        Raises:
            CheckpointError: It has not ended by the deadline.
        """
        if self._thread is not None:
            self._thread.join(deadline.remaining_s())
            if self._thread.is_alive():
                raise CheckpointError("the program that sends arrays to other replicas was not compiled in time")

    def end(self) -> None:
        """Waits for the thread, for some seconds at most. The interpreter must not end while the thread compiles."""
        if self._thread is not None:
            self._thread.join(_END_S)

    def of(self, start: int, stop: int) -> Callable[[tuple[jax.Array, ...]], Any]:
        """Returns the program of one batch."""
        program: Callable[[tuple[jax.Array, ...]], Any] = self._compiled.get((start, stop)) or self._program(
            start, stop
        )
        return isolated()(program)

    def _lowered(self, start: int, stop: int) -> Any:
        return self._program(start, stop).lower(tuple(placement.form() for placement in self._placements[start:stop]))

    def _compile(self, lowered: dict[tuple[int, int], Any]) -> None:
        for (start, stop), program in lowered.items():
            try:
                self._compiled[start, stop] = program.compile()
            except Exception as error:  # noqa: BLE001 - it is compiled again when it is used, which raises
                logger.debug("the program of %d arrays was not compiled ahead: %s", stop - start, error)

    def _program(self, start: int, stop: int) -> Any:
        batch = self._placements[start:stop]
        dtypes = tuple(placement.dtype for placement in batch)
        shardings = tuple(placement.sharding for placement in batch)
        return jit(functools.partial(_merge, dtypes), out_shardings=shardings)


def _merge(dtypes: tuple[np.dtype[Any], ...], stacked: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(
        from_bits(jnp.sum(bits, axis=0, dtype=bits.dtype), dtype) for bits, dtype in zip(stacked, dtypes, strict=True)
    )


def hand_to_all(
    placements: Sequence[OnOneReplica],
    parts: Sequence[list[Any]],
    read: Callable[[Callable[[], None]], None],
    replica: SingleReplica,
    together: ReplicaAgreement | None,
    deadline: Deadline,
) -> list[jax.Array]:
    """Reads in the primary replica, and returns the arrays in all processes.

    Args:
        placements: Placements of the arrays. The same in all processes.
        parts: One list for each array, which ``read`` fills.
        read: Reads this process's part. It calls its argument when the lists are filled, and may read other arrays
            meanwhile. The caller reports its errors (``ReplicaAgreement.reporting_errors``).
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
    sums, arrays = Sums(placements), list[jax.Array]()
    if together is not None and together.agreed_bytes is not None:
        sums.compile(together.agreed_bytes)

    def hand() -> None:
        metrics.tell_replica_read(time.monotonic() - started_s)
        sums.wait(deadline)
        limit_bytes = _agree(replica, together, deadline)
        read_s = time.monotonic()
        for start, stop in sums.batches(limit_bytes):
            zeros: Zeros = {}
            stacked = tuple(placements[i].build(parts[i], zeros) for i in range(start, stop))
            for i in range(start, stop):
                parts[i].clear()
            arrays.extend(jax.block_until_ready(sums.of(start, stop)(stacked)))
        elapsed_s = time.monotonic() - read_s
        metrics.tell_broadcast(elapsed_s)
        replica_ids = ", ".join(map(str, sorted({placement.primary for placement in placements})))
        logger.info("replica %s handed %d arrays to all in %.3f s", replica_ids, len(arrays), elapsed_s)

    try:
        read(hand)
    finally:
        sums.end()
    return arrays


def _agree(replica: SingleReplica, together: ReplicaAgreement | None, deadline: Deadline) -> int:
    """Reports that this process has read its part. Returns how many bytes of each device's part are sent at once.

    Raises an error if reading failed in some process.
    """
    if together is None:
        return limit_of(replica)
    limit_bytes = limit_of(replica) if together.agreed_bytes is None else together.agreed_bytes
    answers = together.report(None, limit_bytes, deadline)
    raise_failure_in(answers)
    return min(answer.limit_bytes for answer in answers)


def limit_of(replica: SingleReplica) -> int:
    """Returns how many bytes of each device's part this process can send at once."""
    if replica.broadcast_memory_limit_bytes is not None:
        return replica.broadcast_memory_limit_bytes
    return int(_device_bytes() * replica.broadcast_memory_scaling_factor / _COPIES)


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


def axes_of(spec: Sequence[Any]) -> set[str]:
    """Returns the names of the axes of the mesh over which an array is sharded."""
    return {axis for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,)) if axis is not None}


class LeafPlacement(Protocol):
    """The placement of one array."""

    @property
    def regions(self) -> Sequence[Index]:
        """The regions that this process needs, without duplicates."""

    def put(self, values: Values) -> Any:
        """Takes the values of some regions, or of all regions at once. Returns a part for ``build``.

        The transfer of the part's JAX arrays to devices may not have ended yet.
        """

    def build(self, parts: Sequence[Any]) -> Any:
        """Builds the array from the parts that ``put`` returned for all of its regions."""


class OnHost:
    """One numpy array."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._whole = tuple((0, size) for size in shape)
        self.regions = (self._whole,)

    def put(self, values: Values) -> Any:
        return values[self._whole]

    def build(self, parts: Sequence[Any]) -> Any:
        return parts[0]


class OnDefaultDevice(OnHost):
    """One ``jax.Array`` that is not committed to its device: JAX may still move it."""

    def __init__(self, shape: Sequence[int], *, weak_scalar: bool = False) -> None:
        """With ``weak_scalar``, an array without axes is weakly typed, like Python's numbers."""
        super().__init__(shape)
        self._weak = weak_scalar and not shape

    def put(self, values: Values) -> Any:
        default, x64 = setting("jax_default_device"), setting("jax_enable_x64")  # the caller's: they choose both
        with isolated(), jax.default_device(default):
            if not self._weak:
                return jax.device_put(values[self._whole])
            with jax.enable_x64(x64):
                return jnp.asarray(values[self._whole].item())


class OnDevices:
    """One ``jax.Array`` with a sharding, and with a device layout if one is given.

    If this process has none of its devices, nothing is read, and the array has no shards in this process.

    Attributes:
        shape: Shape of the array.
        dtype: Type of the array.
        sharding: Sharding of the array.
        layout: Its layout on the devices. None: the default one.
    """

    def __init__(
        self, shape: Sequence[int], dtype: np.dtype[Any], sharding: jax.sharding.Sharding, layout: Any = None
    ) -> None:
        self.shape = tuple(shape)
        self.dtype = dtype
        self.sharding = sharding
        self.layout = layout
        self._devices: dict[Index, list[Any]] = {}
        for device, slices in sharding.addressable_devices_indices_map(self.shape).items():
            self._devices.setdefault(normal_index(slices or (), self.shape), []).append(device)

    @property
    def regions(self) -> Sequence[Index]:
        return tuple(self._devices)

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_per_device(self) -> int:
        """Bytes of each device's part."""
        return int(math.prod(self.sharding.shard_shape(self.shape)) * self.dtype.itemsize)

    def put(self, values: Values) -> Any:
        """Returns the array if ``values`` has all regions, which is several times as fast.

        Otherwise returns the single-device arrays of each region.
        """
        if len(values) == len(self._devices):
            return self._whole(values)
        return {region: self._on_its_devices(region, part) for region, part in values.items()}

    @isolated()
    def build(self, parts: Sequence[Any]) -> Any:
        if not parts:
            return jax.make_array_from_single_device_arrays(self.shape, self.sharding, [], dtype=self.dtype)
        if isinstance(parts[0], jax.Array):
            return parts[0]
        arrays_of = {region: arrays for part in parts for region, arrays in part.items()}
        arrays = [array for region in self._devices for array in arrays_of[region]]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, arrays)

    def _whole(self, values: Values) -> jax.Array:
        where = self.sharding if self.layout is None else Format(self.layout, self.sharding)

        def region(slices: Any) -> npt.NDArray[Any]:
            return values[normal_index(slices, self.shape)]

        with isolated():
            return jax.make_array_from_callback(self.shape, where, region)

    def _on_its_devices(self, region: Index, values: npt.NDArray[Any]) -> list[jax.Array]:
        kind = self.sharding.memory_kind
        devices = [jax.sharding.SingleDeviceSharding(d, memory_kind=kind) for d in self._devices[region]]
        where = devices if self.layout is None else [Format(self.layout, device) for device in devices]
        with isolated():
            return list(jax.device_put([values] * len(where), where))
