"""Where the values of a restored array go: the regions that this process reads, and the array built from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental.layout import Format

from gracepoint.checkpoint.format.array_spec import Index
from gracepoint.checkpoint.planning.shard_holders import normal_index
from gracepoint.checkpoint.reading.read_group import Values
from gracepoint.jax_isolation import isolated


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
        default, x64 = jax.config.jax_default_device, jax.config.jax_enable_x64  # the caller's: they choose both
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
            self._devices.setdefault(normal_index(slices, self.shape), []).append(device)

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
