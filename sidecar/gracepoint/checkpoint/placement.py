"""Where the values of a restored array go: which regions this process reads, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy.typing as npt
from jax.experimental.layout import Format

from gracepoint.checkpoint.plan import normal_index
from gracepoint.checkpoint.spec import Index


class Placement(Protocol):
    """Of one array."""

    @property
    def regions(self) -> Sequence[Index]:
        """The regions that this process needs, each once."""

    def put(self, region: Index, values: npt.NDArray[Any]) -> Any:
        """Takes over one region's values; the host memory they were read into is free on return. From any thread."""

    def build(self, parts: Mapping[Index, Any]) -> Any:
        """Makes the array of what ``put`` returned for each region."""


class OnHost:
    """One numpy array."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._whole = tuple((0, size) for size in shape)
        self.regions = (self._whole,)

    def put(self, region: Index, values: npt.NDArray[Any]) -> Any:
        return values

    def build(self, parts: Mapping[Index, Any]) -> Any:
        return parts[self._whole]


class OnDefaultDevice(OnHost):
    """One ``jax.Array`` that is not bound to its device: JAX may still move it."""

    def __init__(self, shape: Sequence[int], *, weak_scalar: bool = False) -> None:
        """With ``weak_scalar``, one without axes is weakly typed, as Python's numbers are."""
        super().__init__(shape)
        self._weak = weak_scalar and not shape

    def put(self, region: Index, values: npt.NDArray[Any]) -> Any:
        if self._weak:
            return jnp.asarray(values.item())
        return jax.block_until_ready(jax.device_put(values))


class OnDevices:
    """One ``jax.Array`` with a sharding, and a device layout where one is given."""

    def __init__(self, shape: Sequence[int], sharding: jax.sharding.Sharding, layout: Any = None) -> None:
        self._shape = tuple(shape)
        self._sharding = sharding
        self._layout = layout
        self._devices: dict[Index, list[Any]] = {}
        for device, slices in sharding.addressable_devices_indices_map(self._shape).items():
            self._devices.setdefault(normal_index(slices, self._shape), []).append(device)

    @property
    def regions(self) -> Sequence[Index]:
        return tuple(self._devices)

    def put(self, region: Index, values: npt.NDArray[Any]) -> Any:
        kind = self._sharding.memory_kind
        devices = [jax.sharding.SingleDeviceSharding(d, memory_kind=kind) for d in self._devices[region]]
        where = devices if self._layout is None else [Format(self._layout, device) for device in devices]
        return jax.block_until_ready(jax.device_put([values] * len(where), where))

    def build(self, parts: Mapping[Index, Any]) -> Any:
        arrays = [array for region in self._devices for array in parts[region]]
        if isinstance(self._sharding, jax.sharding.SingleDeviceSharding):
            return arrays[0]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)
