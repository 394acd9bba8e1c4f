"""Values as whole numbers of the same bits, for which sums with zeros change nothing, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt


def to_bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Returns the bits of ``values`` as whole numbers without a sign; of complex ones, with one more axis of two.

    Types that are smaller than a byte on the device are widened: they have no bits of their own here.
    """
    dtype = values.dtype
    wide = _widened(dtype)
    if wide is not None:
        values = values.astype(wide)
    if dtype.kind == "c":
        values = np.stack([values.real, values.imag], axis=-1)
    return values.view(f"u{values.dtype.itemsize}")


def from_bits(bits: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    """Returns the values of ``dtype`` that ``to_bits`` was given, on the device."""
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
    """Returns a type of whole bytes that holds all values of one that is smaller; None for others."""
    for kind, info, wide in ((jnp.integer, jnp.iinfo, np.int8), (jnp.floating, jnp.finfo, np.float32)):
        if jnp.issubdtype(dtype, kind) and info(dtype).bits < 8:
            return np.dtype(wide)
    return None
