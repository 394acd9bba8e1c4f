"""Arrays over the devices of processes that do not exist: shardings are JAX's own, devices and values are not there.

With them one process plans the saves of thousands. Only what planning asks of an array is there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gracepoint.checkpoint.format import pytree
from gracepoint.checkpoint.format.array_spec import ArraySpec


@dataclasses.dataclass(frozen=True, eq=False)
class Device:
    """A device of another machine. JAX asks for no more when it divides an array over devices."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "none"
    client: Any = None


@dataclasses.dataclass(frozen=True)
class Part:
    """What ``jax.Shard`` says of one shard. The index is made when it is asked for, as JAX does."""

    array: GangArray
    device: Any

    @property
    def index(self) -> Any:
        return self.array.sharding.devices_indices_map(self.array.shape)[self.device]


class GangArray(jax.Array):
    """An array as process ``process_index`` of a gang sees it."""

    shape: tuple[int, ...] = ()
    dtype: Any = None
    sharding: Any = None
    is_fully_addressable = False

    def __init__(self, shape: Sequence[int], dtype: Any, sharding: Any, process_index: int) -> None:
        self.shape, self.dtype, self.sharding = tuple(shape), np.dtype(dtype), sharding
        self._process_index = process_index

    def is_deleted(self) -> bool:
        return False

    @property
    def addressable_shards(self) -> list[Any]:
        return [Part(self, device) for device in _devices_of(self.sharding.mesh, self._process_index)]


@functools.cache
def _devices_of(on: Mesh, process_index: int) -> list[Any]:
    return [device for device in on.devices.flat if device.process_index == process_index]


def mesh(shape: Sequence[int], names: Sequence[str], process_of: Sequence[int] | int) -> Mesh:
    """Returns a mesh of devices that do not exist.

    ``process_of`` has the process of each device, in C order of the mesh, or how many devices each process has.
    """
    count = int(np.prod(shape))
    if isinstance(process_of, int):
        process_of = [number // process_of for number in range(count)]
    devices = [Device(number, process) for number, process in enumerate(process_of)]
    return Mesh(np.array(devices, object).reshape(shape), tuple(names))


class Unnamed:
    """A sharding that names no axes of a mesh, as JAX has some. Otherwise it is as another one."""

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sharding, name)


def leaf(
    name: str, shape: Sequence[int], on: Mesh, spec: PartitionSpec, *, process_index: int = 0, dtype: Any = "float32"
) -> pytree.Leaf:
    """Returns a leaf that is divided over a mesh, as it is found in the state of one process."""
    sharding = NamedSharding(on, spec)
    array = GangArray(shape, dtype, sharding, process_index)
    stored = ArraySpec(
        name, "array", tuple(shape), array.dtype.newbyteorder("<").str, sharding.shard_shape(tuple(shape))
    )
    return pytree.Leaf(name, ((name, pytree.MAPPING),), "jax.Array", stored, array)
