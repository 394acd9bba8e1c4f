"""How checkpoints are written: the words are Orbax's where it has the same option."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Literal, Protocol

from gracepoint.errors import SettingsError

MIB = 1 << 20
_ZSTD_LEVELS = range(-7, 23)  # that zstd has


class TransferPriority(enum.Enum):
    """When a leaf's values are copied from its devices.

    Attributes:
        SYNCHRONOUS: Before the save returns, whatever ``device_host_max_bytes`` is: the leaf may be donated.
        ASYNCHRONOUS_PRIORITIZED: While the save goes on, before those that are deprioritized. The leaf must neither be
            donated nor changed until the save has ended.
        ASYNCHRONOUS_DEPRIORITIZED: The same, after all others.
    """

    SYNCHRONOUS = 0
    ASYNCHRONOUS_PRIORITIZED = 1
    ASYNCHRONOUS_DEPRIORITIZED = 2


class SaveCallback(Protocol):
    """What a save asks and tells, leaf by leaf, by JAX's key path. Told from the save's threads."""

    def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
        """Returns when the leaf is copied; asked only where ``device_host_max_bytes`` is set, and before the copy."""

    def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
        """All of the leaf that this process writes is in host memory."""

    def on_write_end(self, keypath: tuple[Any, ...]) -> None:
        """All of the leaf that this process writes is on the disk."""


@dataclasses.dataclass(frozen=True)
class Silent:
    """The callback of those who have none: everything is copied before the save returns."""

    def key_priority(self, keypath: tuple[Any, ...]) -> TransferPriority:
        return TransferPriority.SYNCHRONOUS

    def on_transfer_end(self, keypath: tuple[Any, ...]) -> None:
        pass

    def on_write_end(self, keypath: tuple[Any, ...]) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How a checkpoint's arrays are written. Equal in all processes.

    Attributes:
        use_ocdbt: Chunks are kept in TensorStore's B+tree format, in one file or few for each process; else each is a
            file. None: where there are many small chunks, whose files would cost more than their bytes.
        use_zarr3: Version 3 of zarr instead of 2.
        compression: Of chunks. It costs time wherever the disk is local (random float32 shrank by 8% in a
            measurement, and the save took twice as long).
        compression_level: Of zstd.
        replica_parallel: A shard that several processes hold is cut into slices, which they share out.
        min_slice_bytes: Smaller slices than that are not made.
        max_replicas: At most so many processes write one shard; None: all that hold it.
        target_chunk_bytes: Larger chunks are cut, where a shard's shape divides; several are then written at once.
        device_host_max_bytes: At most so many bytes are on their way from devices to the disk at once, of leaves that
            ``callback`` gives an asynchronous priority, and of all in a save that streams; None: no bound.
        write_limit_bytes: At most so many bytes are being written at once; None: no bound.
        pinned_host_transfer: Values come from devices through pinned host memory. None: on GPU and TPU.
        callback: Asked for priorities, and told what is done.
        express: Chunks that are files of their values' bytes are written without TensorStore, past the page cache where
            the file system lets them.
        store_sharding: Writes the shardings' file, from which a restore without arguments takes them.
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

    def __post_init__(self) -> None:
        """Raises SettingsError, naming the option, if a value is wrong."""
        for name in ("min_slice_bytes", "max_replicas", "target_chunk_bytes", "device_host_max_bytes"):
            _check_positive(name, getattr(self, name))
        _check_positive("write_limit_bytes", self.write_limit_bytes)
        if self.compression not in (None, "zstd"):
            raise SettingsError(f"WriteOptions.compression is {self.compression!r}; expected 'zstd' or None")
        if self.compression_level not in _ZSTD_LEVELS:
            raise SettingsError(
                f"WriteOptions.compression_level is {self.compression_level!r}; expected {_ZSTD_LEVELS.start} to "
                f"{_ZSTD_LEVELS.stop - 1}"
            )


def _check_positive(name: str, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise SettingsError(f"WriteOptions.{name} is {value!r}; expected a whole number of at least 1")


#: What is written where nothing is asked for.
DEFAULT_OPTIONS = WriteOptions()
