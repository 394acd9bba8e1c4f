"""Where the values of a restored array go: which regions this process reads, and what is made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy.typing as npt
from jax.experimental.layout import Format

from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.planning.write_plan import normal_index
from gracepoint.checkpoint.reading.read_group import Values


class Placement(Protocol):
    """Of one array."""

    @property
    def regions(self) -> Sequence[Index]:
        """The regions that this process needs, each once."""

    def put(self, values: Values) -> Any:
        """Takes over the values of some regions, or of all at once; returns a part, whose JAX arrays may be on their
        way."""

    def build(self, parts: Sequence[Any]) -> Any:
        """Makes the array of what ``put`` returned for all of its regions."""


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
    """One ``jax.Array`` that is not bound to its device: JAX may still move it."""

    def __init__(self, shape: Sequence[int], *, weak_scalar: bool = False) -> None:
        """With ``weak_scalar``, one without axes is weakly typed, as Python's numbers are."""
        super().__init__(shape)
        self._weak = weak_scalar and not shape

    def put(self, values: Values) -> Any:
        if self._weak:
            return jnp.asarray(values[self._whole].item())
        return jax.device_put(values[self._whole])


class OnDevices:
    """One ``jax.Array`` with a sharding, and a device layout where one is given.

    Where none of its devices are this process's, nothing is read, and the array has a type and a sharding alone.
    """

    def __init__(
        self, shape: Sequence[int], dtype: npt.DTypeLike, sharding: jax.sharding.Sharding, layout: Any = None
    ) -> None:
        self._shape = tuple(shape)
        self._dtype = dtype
        self._sharding = sharding
        self._layout = layout
        self._devices: dict[Index, list[Any]] = {}
        for device, slices in sharding.addressable_devices_indices_map(self._shape).items():
            self._devices.setdefault(normal_index(slices, self._shape), []).append(device)

    @property
    def regions(self) -> Sequence[Index]:
        return tuple(self._devices)

    def put(self, values: Values) -> Any:
        """Returns the array, of all regions at once, which is several times as fast; else those devices' by region."""
        if len(values) == len(self._devices):
            return self._whole(values)
        return {region: self._on_its_devices(region, part) for region, part in values.items()}

    def build(self, parts: Sequence[Any]) -> Any:
        if not parts:
            return jax.make_array_from_single_device_arrays(self._shape, self._sharding, [], dtype=self._dtype)
        if isinstance(parts[0], jax.Array):
            return parts[0]
        arrays_of = {region: arrays for part in parts for region, arrays in part.items()}
        arrays = [array for region in self._devices for array in arrays_of[region]]
        return jax.make_array_from_single_device_arrays(self._shape, self._sharding, arrays)

    def _whole(self, values: Values) -> jax.Array:
        where = self._sharding if self._layout is None else Format(self._layout, self._sharding)

        def region(slices: Any) -> npt.NDArray[Any]:
            return values[normal_index(slices, self._shape)]

        return jax.make_array_from_callback(self._shape, where, region)

    def _on_its_devices(self, region: Index, values: npt.NDArray[Any]) -> list[jax.Array]:
        kind = self._sharding.memory_kind
        devices = [jax.sharding.SingleDeviceSharding(d, memory_kind=kind) for d in self._devices[region]]
        where = devices if self._layout is None else [Format(self._layout, device) for device in devices]
        return list(jax.device_put([values] * len(where), where))
