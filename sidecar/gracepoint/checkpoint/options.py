"""Options of saves and restores, for a whole checkpoint and for single leaves.

``SaveArgs``, ``RestoreArgs``, the classes derived from it, ``TransferPriority`` and ``Transform`` have Orbax's names,
and their fields have the names of Orbax's fields.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol

from gracepoint.arguments import shown
from gracepoint.errors import InvalidSharding, SettingsError

if TYPE_CHECKING:
    from gracepoint.checkpoint.handler_registry import HandlerRegistry

MIB = 1 << 20
#: Default of ``RestoreOptions.limit_bytes``. Enough for the fastest storage: at 10 GB/s, this many bytes are read in
#: 0.4 s.
READ_LIMIT_BYTES = 4 << 30
#: Values of ``WriteOptions.writer`` that mean threads of the training process.
IN_THREADS = (None, "thread")
_POSITIVE = ("min_slice_bytes", "max_replicas", "target_chunk_bytes", "device_host_max_bytes", "write_limit_bytes")
_ZSTD_LEVELS = range(-7, 23)  # the levels of zstd


class TransferPriority(enum.Enum):
    """When the values of a leaf are copied from its devices.

    Attributes:
        SYNCHRONOUS: Before the save returns, whatever ``device_host_max_bytes`` is. The leaf may then be donated.
        ASYNCHRONOUS_PRIORITIZED: In the background, before the leaves that are deprioritized. The leaf must not be
            donated or changed before the save has ended.
        ASYNCHRONOUS_DEPRIORITIZED: In the background, after all others. The leaf must not be donated or changed before
            the save has ended.
    """

    SYNCHRONOUS = 0
    ASYNCHRONOUS_PRIORITIZED = 1
    ASYNCHRONOUS_DEPRIORITIZED = 2


class SaveCallback(Protocol):
    """Functions that a save calls for each leaf, with JAX's key path.

    The thread that saves calls ``key_priority``. That thread or any other thread of the save calls the other two.
    """

    def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
        """Returns when to copy the leaf. Called only if ``device_host_max_bytes`` is set.

        A background save calls it once for each leaf. ``prepare`` calls it, too.
        """

    def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
        """Called when all that this process writes of the leaf is in host memory. If that is nothing: at the begin."""

    def on_write_end(self, keypath: tuple[Any, ...]) -> None:
        """Called when all that this process writes of the leaf is on the disk. If that is nothing: at the end."""


@dataclasses.dataclass(frozen=True)
class Silent:
    """The default callback: all leaves are copied before the save returns, and nothing is reported."""

    def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
        return TransferPriority.SYNCHRONOUS

    def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
        pass

    def on_write_end(self, keypath: tuple[Any, ...]) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How the arrays of a checkpoint are written. Equal in all processes.

    Attributes:
        use_ocdbt: Whether to store chunks in TensorStore's B+tree format, in one or a few files for each process, in
            place of one file for each chunk. None: only if there are many small chunks.
        use_zarr3: Whether to write version 3 of zarr. False: version 2.
        compression: How chunks are compressed. None: not at all. To a local disk, a save with compression is slower: in
            a measurement, random float32 values shrank by 8%, and the save took twice as long.
        compression_level: The level of zstd, from -7 to 22.
        replica_parallel: Whether processes that hold the same shard each write a slice of it.
        min_slice_bytes: Smallest size in bytes of a slice that ``replica_parallel`` makes.
        max_replicas: Largest number of processes that write one shard. None: all that hold it.
        target_chunk_bytes: Size in bytes above which a chunk is cut, if the shape of the shard can be divided evenly.
            The parts are written at the same time.
        device_host_max_bytes: Most bytes that are on their way from devices to the disk at once. It applies to leaves
            for which ``callback`` returns an asynchronous priority, and to all leaves of a save that does not return
            before it is committed. None: no limit.
        write_limit_bytes: Most bytes that are being written at once. None: no limit.
        pinned_host_transfer: Whether values leave devices through pinned host memory. None: on GPU and TPU.
        callback: Returns the priority of each leaf. Also called when a leaf is copied, and when it is written.
        express: Whether to write chunks that are files of plain values without TensorStore, and past the page cache
            where the file system allows that.
        store_sharding: Whether to write the file of shardings, which a restore without arguments uses.
        store_array_metadata: Whether to write Orbax's ``array_metadatas``. Orbax reads typed PRNG keys, and the write
            shapes of arrays, only from there.
        ocdbt_target_data_file_bytes: Size in bytes at which TensorStore begins another data file in OCDBT. A single
            value is never divided. None: TensorStore's default. 0: no limit.
        writer: Who writes files. ``thread``: threads of this process. ``worker``: a worker process, which finishes its
            save even if this process dies. An absolute path: a worker process of the keeper that has this socket.
            None: what the settings of the session say; without a session, ``thread``.
    """

    use_ocdbt: bool | None = None
    use_zarr3: bool = False
    compression: Literal["zstd"] | None = None
    compression_level: int = 1
    replica_parallel: bool = True
    min_slice_bytes: int = MIB
    max_replicas: int | None = None
    target_chunk_bytes: int = 64 * MIB
    device_host_max_bytes: int | None = None
    write_limit_bytes: int | None = None
    pinned_host_transfer: bool | None = None
    callback: SaveCallback = dataclasses.field(default_factory=Silent)
    express: bool = True
    store_sharding: bool = True
    store_array_metadata: bool = True
    ocdbt_target_data_file_bytes: int | None = None
    writer: str | None = None

    def __post_init__(self) -> None:
        """Raises SettingsError, naming the option, if a value is wrong."""
        for name in _POSITIVE:
            _check_positive(name, getattr(self, name))
        if self.ocdbt_target_data_file_bytes != 0:
            _check_positive("ocdbt_target_data_file_bytes", self.ocdbt_target_data_file_bytes)
        if self.writer not in (*IN_THREADS, "worker") and not str(self.writer).startswith("/"):
            raise SettingsError(f"WriteOptions.writer is {self.writer!r}; expected thread, worker, or a path")
        if self.compression not in (None, "zstd"):
            raise SettingsError(f"WriteOptions.compression is {self.compression!r}; expected 'zstd' or None")
        if self.compression_level not in _ZSTD_LEVELS:
            raise SettingsError(f"WriteOptions.compression_level is {self.compression_level!r}; expected -7 to 22")


def _check_positive(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise SettingsError(f"WriteOptions.{name} is {shown(value)}; expected a whole number of at least 1")


#: Default options of a save.
DEFAULT_OPTIONS = WriteOptions()


@dataclasses.dataclass
class SaveArgs:
    """How one leaf is saved.

    Attributes:
        dtype: Type that the values are cast to. None: the leaf's own type.
        chunk_byte_size: Largest size of a chunk, in bytes. Shards, or the slices of a shard that several processes
            write, are cut evenly along their axes. None: ``WriteOptions.target_chunk_bytes``.
        shard_axes: Axes that are cut before all others. Without ``chunk_byte_size`` they are cut into single elements.
    """

    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclasses.dataclass
class RestoreArgs:
    """How one leaf is restored.

    Attributes:
        restore_type: ``jax.Array``, ``numpy.ndarray`` or a type derived from one of them, ``int``, ``float``, ``bool``
            or ``str``. None: the type that was saved.
        dtype: Type that the values are cast to. None: the type that was saved. Typed PRNG keys are not cast: only
            their own type and the type of their data are accepted.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclasses.dataclass
class ArrayRestoreArgs(RestoreArgs):
    """How one ``jax.Array`` is restored.

    Attributes:
        mesh: Together with ``mesh_axes``, another way to give the sharding. None: ``sharding`` is used.
        mesh_axes: A ``jax.sharding.PartitionSpec``. None: ``sharding`` is used.
        sharding: Sharding of the restored array. None, and no mesh: the one in the file ``_sharding``.
        global_shape: Shape of the restored array. None: the shape that was saved.
        shape: Another name for ``global_shape``.
        strict: Whether a ``global_shape`` that differs from the saved shape is an error. False: values at the end of
            each axis are cut off, or zeros are added.
    """

    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True


@dataclasses.dataclass
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """How one ``jax.Array`` is restored if the processes of one replica read it, and send it to all others.

    Attributes:
        single_replica_sharding: Sharding over the devices of the replica that reads. None: the replica that
            ``SingleReplica.primary_replica_id`` names.
    """

    single_replica_sharding: Any = None


@dataclasses.dataclass(frozen=True)
class SingleReplica:
    """How one replica reads for all others.

    Attributes:
        replica_axis_index: Index of the axis of the mesh along which arrays are replicated.
        primary_replica_id: Index along that axis of the replica that reads.
        broadcast_memory_limit_bytes: Most bytes of each device's part that are sent at once. An array that is larger
            is sent alone. None: computed from the free memory of the devices.
        broadcast_memory_scaling_factor: Fraction of the free memory of the devices that is used if the limit is
            computed. Above 0 and at most 1.
    """

    replica_axis_index: int = 0
    primary_replica_id: int = 0
    broadcast_memory_limit_bytes: int | None = None
    broadcast_memory_scaling_factor: float = 0.75

    def __post_init__(self) -> None:
        """Raises InvalidSharding if a value is out of range."""
        if not 0 < self.broadcast_memory_scaling_factor <= 1:
            raise InvalidSharding(
                f"broadcast_memory_scaling_factor is {self.broadcast_memory_scaling_factor}; expected above 0 and at "
                f"most 1"
            )


DEFAULT_REPLICA = SingleReplica()


@dataclasses.dataclass
class Transform:
    r"""Where the leaves that a regular expression matches are restored from.

    Attributes:
        original_key: Path of the stored leaf, its keys joined by slashes. It may have references to groups of the
            regular expression, as ``\1``. None: the path of the leaf itself.
        use_fallback: Whether the leaf keeps its value from ``like``, even if it was saved.
        value_fn: Computes the leaf from the stored one. It gets the whole array as a ``numpy.ndarray``, in every
            process, or a number or string. None: the leaf is restored as it was saved.
    """

    original_key: str | None = None
    use_fallback: bool = False
    value_fn: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        """Raises SettingsError if the arguments contradict each other."""
        if self.use_fallback and (self.original_key is not None or self.value_fn is not None):
            raise SettingsError("Transform: use_fallback keeps the value of like: give no original_key or value_fn")


@dataclasses.dataclass(frozen=True)
class RestoreOptions:
    """How a tree is restored.

    Attributes:
        partial_restore: Whether leaves that are in the checkpoint and not in ``like`` are ignored. False: they are an
            error.
        keep_missing: Whether leaves that are in ``like`` and not in the checkpoint keep their value from ``like``.
            False: they are an error.
        limit_bytes: Most bytes of host memory in this process for values that are read and not yet on their devices. If
            one shard, or shards that share chunks, need more, they are read alone. None: no limit.
        single_replica: How one replica reads leaves that have ``SingleReplicaArrayRestoreArgs``.
        read_once: Whether replicas take turns to read arrays that are replicated over processes, and send them to the
            other processes. Equal in all processes. None: only in object stores.
        donate: Whether to delete the arrays of ``like`` that are restored before anything is read, so that the devices
            need not hold two states. Other references to these arrays become invalid, too. If the checkpoint does not
            fit ``like``, or there is no checkpoint, nothing is deleted. If reading fails, the arrays stay deleted.
        handlers: Handlers of leaf types of your own. None: those of the checkpointer.
        transforms: ``Transform`` by regular expressions, each for the paths of leaves of ``like``: their keys, joined
            by slashes. If several match, the last one counts. None: each leaf comes from its own path.
        transforms_default_to_original: Whether leaves that no expression matches come from their own path. False: they
            keep their value from ``like``, and ``use_fallback`` means the stored leaf.
    """

    partial_restore: bool = False
    keep_missing: bool = False
    limit_bytes: int | None = READ_LIMIT_BYTES
    single_replica: SingleReplica = DEFAULT_REPLICA
    read_once: bool | None = None
    donate: bool = False
    handlers: HandlerRegistry | None = None
    transforms: Mapping[str, Any] | None = None
    transforms_default_to_original: bool = True

    def with_handlers(self, handlers: HandlerRegistry | None) -> RestoreOptions:
        """Returns the options with the handlers of a checkpointer, if they have none."""
        return self if self.handlers is not None else dataclasses.replace(self, handlers=handlers)


#: Default options of a restore.
DEFAULT_RESTORE_OPTIONS = RestoreOptions()
