"""The bits of values as unsigned integers, and back. A sum of integers changes no value, unlike one of the values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt


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
