"""What a caller may ask for, leaf by leaf: the words are Orbax's, so that code written for it reads on."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class SaveArgs:
    """How one leaf is saved.

    Attributes:
        dtype: Its values are cast to this type on the way; None keeps the leaf's own.
        chunk_byte_size: A chunk has at most this many bytes: shards (or slices of them, where replicas share the
            work) are cut further, evenly, along their axes. None: as ``WriteOptions.target_chunk_bytes`` says.
        shard_axes: Axes that are cut before all others; without a ``chunk_byte_size``, into single elements.
    """

    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class RestoreArgs:
    """How one leaf is restored.

    Attributes:
        restore_type: ``jax.Array``, ``numpy.ndarray`` or a type derived from one of them, as ``type(array)`` is;
            ``int``, ``float``, ``bool`` or ``str``; None: as it was saved.
        dtype: Values are cast to this type; None keeps what was saved. Typed PRNG keys are not cast: their own type
            and that of their data are what is saved, and others do not fit.
    """

    restore_type: Any = None
    dtype: Any = None


@dataclasses.dataclass(frozen=True)
class ArrayRestoreArgs(RestoreArgs):
    """How one ``jax.Array`` is restored.

    Attributes:
        mesh: With ``mesh_axes``, another way to give the sharding.
        mesh_axes: A ``jax.sharding.PartitionSpec``.
        sharding: Of the restored array; neither given: the one of the checkpoint's ``_sharding`` file.
        global_shape: Of the restored array; None: the saved one.
        shape: Another name for ``global_shape``.
        strict: A ``global_shape`` that is not the saved one is an error; else values are cut off or filled up with
            zeros at the end of each axis.
    """

    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True


@dataclasses.dataclass(frozen=True)
class SingleReplicaArrayRestoreArgs(ArrayRestoreArgs):
    """How one ``jax.Array`` is restored by one replica's processes, which then hand it to all.

    Attributes:
        single_replica_sharding: Over the devices of one replica, which reads; None: the replica that
            ``SingleReplica.primary_replica_id`` names.
    """

    single_replica_sharding: Any = None
