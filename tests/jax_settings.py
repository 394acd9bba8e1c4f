"""What training loops set for JAX around their steps, each as a context manager."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def mesh_of_all(kind: AxisType = AxisType.Auto) -> Mesh:
    """Returns a mesh of all devices, with an axis of another name than the states' own."""
    return jax.make_mesh((jax.device_count(),), ("loop",), axis_types=(kind,))


@contextlib.contextmanager
def set_for_all_threads(flag: str, value: Any, afterwards: Any) -> Iterator[None]:
    jax.config.update(flag, value)
    try:
        yield
    finally:
        jax.config.update(flag, afterwards)


@contextlib.contextmanager
def set_mesh_until_unset() -> Iterator[None]:
    """``jax.set_mesh`` as a function, not as a context manager."""
    jax.set_mesh(mesh_of_all())
    try:
        yield
    finally:
        jax.set_mesh(Mesh(np.empty((), object), ()))


@contextlib.contextmanager
def within_the_mesh() -> Iterator[None]:
    """``with mesh:``, the older form."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with mesh_of_all():
            yield


FLAGS: dict[str, tuple[Any, Any]] = {
    "jax_check_tracer_leaks": (True, False),
    "jax_debug_infs": (True, False),
    "jax_debug_key_reuse": (True, False),
    "jax_debug_nans": (True, False),
    "jax_disable_jit": (True, False),
    "jax_enable_x64": (True, False),
    "jax_no_execution": (True, False),
    "jax_no_tracing": (True, False),
    "jax_numpy_dtype_promotion": ("strict", "standard"),
    "jax_numpy_rank_promotion": ("raise", "allow"),
    "jax_transfer_guard": ("disallow_explicit", "allow"),
}
SETTINGS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "set_mesh": lambda: jax.set_mesh(mesh_of_all()),
    "set_mesh, explicit axes": lambda: jax.set_mesh(mesh_of_all(AxisType.Explicit)),
    "set_mesh, called": set_mesh_until_unset,
    "use_abstract_mesh": lambda: jax.sharding.use_abstract_mesh(mesh_of_all().abstract_mesh),
    "with mesh": within_the_mesh,
    "default_device": lambda: jax.default_device(jax.devices()[-1]),
    "transfer_guard": lambda: jax.transfer_guard("disallow_explicit"),
    "enable_x64": lambda: jax.enable_x64(True),
} | {flag: functools.partial(set_for_all_threads, flag, *values) for flag, values in FLAGS.items()}
