"""What a leaf of ``like`` asks of a checkpoint, and how the leaf is made from what was read."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from gracepoint.checkpoint import plan, tree
from gracepoint.checkpoint.spec import ArraySpec, zarr_dtype
from gracepoint.errors import CheckpointError, CheckpointMismatch

logger = logging.getLogger(__name__)

Regions = Mapping[plan.Index, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Target:
    """One leaf to restore.

    Attributes:
        name: Of the leaf.
        expected: Its type in words, as ``ArraySpec`` values are put by ``describe``.
        indices: Regions to read; all lie in this process.
        build: Makes the leaf from their values.
    """

    name: str
    expected: str
    indices: tuple[plan.Index, ...]
    build: Callable[[Regions], Any]

    def check(self, found: ArraySpec) -> None:
        """Raises CheckpointMismatch if the stored array is not what the leaf asks for."""
        stored = describe(found.shape, found.dtype, found.key_impl)
        if stored != self.expected:
            raise CheckpointMismatch(f"leaf {self.name!r}: expected {self.expected}, found {stored} in the checkpoint")


def describe(shape: tuple[int, ...], dtype: str, key_impl: str | None) -> str:
    return f"{dtype}{list(shape)}" + (f" (typed PRNG keys, {key_impl})" if key_impl else "")


def target_of(path: tuple[Any, ...], like: Any) -> Target:
    """Returns what ``like``, the leaf at ``path``, asks for.

    Raises:
        CheckpointError: Nothing can be restored into a leaf of this type.
    """
    name = tree.name_of(tree.path_of(path))
    if isinstance(like, jax.Array | jax.ShapeDtypeStruct):
        return _keys(name, like) if tree.is_typed_key(like) else _array(name, like)
    if isinstance(like, np.ndarray):
        return _whole(name, like.shape, like.dtype, lambda values: values.astype(like.dtype))
    if isinstance(like, np.generic):
        return _whole(name, (), like.dtype, lambda values: values[()])
    if isinstance(like, bool | int | float):
        return _whole(name, (), np.asarray(like).dtype, lambda values: type(like)(values.item()))
    raise CheckpointError(f"leaf {name!r}: cannot restore into a {type(like).__qualname__}")


def _whole(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], build: Callable[[npt.NDArray[Any]], Any]) -> Target:
    index = tuple((0, size) for size in shape)
    return Target(name, _described(shape, dtype), (index,), lambda regions: build(regions[index]))


def _array(name: str, like: Any) -> Target:
    shape, dtype, sharding = tuple(like.shape), np.dtype(like.dtype), _sharding_of(like)
    weak = bool(like.weak_type)
    if sharding is None:
        return _whole(name, shape, dtype, lambda values: _local(name, values, weak))
    target = _sharded(name, shape, dtype, sharding)
    if weak:
        _warn_of_weak_type(name)
    return target


def _keys(name: str, like: Any) -> Target:
    impl = key_impl_of(like)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(like.shape, like.dtype))
    shape, dtype = tuple(data.shape), np.dtype(data.dtype)
    sharding = _data_sharding(name, _sharding_of(like))
    local = sharding is None
    target = _whole(name, shape, dtype, jnp.asarray) if local else _sharded(name, shape, dtype, sharding)
    return dataclasses.replace(
        target,
        expected=describe(shape, zarr_dtype(dtype) or str(dtype), impl),
        build=lambda regions: jax.random.wrap_key_data(target.build(regions), impl=impl),
    )


def _sharded(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any) -> Target:
    slices = sharding.addressable_devices_indices_map(shape).values()
    indices = tuple(dict.fromkeys(plan.normal_index(index, shape) for index in slices))

    def build(regions: Regions) -> Any:
        return jax.make_array_from_callback(
            shape, sharding, lambda index: regions[plan.normal_index(index, shape)], dtype=dtype
        )

    return Target(name, _described(shape, dtype), indices, build)


def _local(name: str, values: npt.NDArray[Any], weak: bool) -> Any:
    """Makes an array that, as ``like``'s leaf, is not bound to a device: JAX may still move it."""
    if weak and values.ndim == 0:
        return jnp.asarray(values.item())  # weakly typed, as Python's numbers are
    if weak:
        _warn_of_weak_type(name)
    return jnp.asarray(values)


def _warn_of_weak_type(name: str) -> None:
    logger.warning(
        "leaf %r has a weak type in the state, and is restored with a strong one, which may change how it promotes: "
        "give it a dtype where it is made",
        name,
    )


def _sharding_of(like: Any) -> Any:
    """Returns where the leaf shall be, or None for the default device, without being bound to it."""
    if isinstance(like, jax.ShapeDtypeStruct):
        return like.sharding
    return like.sharding if like.committed else None


def _data_sharding(name: str, sharding: Any) -> Any:
    """Returns the sharding of typed keys' uint32 data: the keys' own, as the axis that it has more is never split."""
    if sharding is None or isinstance(sharding, jax.sharding.NamedSharding | jax.sharding.SingleDeviceSharding):
        return sharding
    raise CheckpointError(f"leaf {name!r}: typed PRNG keys cannot be restored with a {type(sharding).__name__}")


def key_impl_of(like: Any) -> str:
    """Returns the implementation's name of typed keys, given or abstract."""
    found: list[str] = []
    # Only a key, or a traced one, tells; nothing is computed here.
    jax.eval_shape(lambda key: found.append(str(jax.random.key_impl(key))), like)
    return found[0]


def _described(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    return describe(shape, zarr_dtype(dtype) or str(dtype), None)
