"""What training loops set for JAX around their steps, each as a context manager."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

#: What CONTRACT_MESH may be: the kind of axes of the mesh that is set around each contract test.
CONTRACT_MESHES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of_all(kind: AxisType = AxisType.Auto) -> Mesh:
    """Returns a mesh of all devices, with an axis of another name than the states' own."""
    return jax.make_mesh((jax.device_count(),), ("loop",), axis_types=(kind,))


def mesh_of_states() -> Mesh:
    """Returns the mesh over which tests spread their states: 2 x 2 of the first four devices, with axes x and y.

    In a run of the contract tests under ``jax.set_mesh`` it is the mesh that is set: of one device, or of eight, which
    hold two replicas of everything along the axis z.
    """
    shape = {1: (1, 1), 8: (2, 2, 2)}.get(jax.device_count(), (2, 2))
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    kind = CONTRACT_MESHES.get(os.environ.get("CONTRACT_MESH", ""), AxisType.Auto)
    return Mesh(devices, ("x", "y", "z")[: len(shape)], axis_types=(kind,) * len(shape))


def no_mesh() -> AbstractContextManager[None]:
    """Within it no mesh is set: for what flax or Orbax cannot do under one."""
    unset: AbstractContextManager[None] = jax.set_mesh(Mesh(np.empty((), object), ()))
    return unset


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
        no_mesh()


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
