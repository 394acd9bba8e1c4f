"""Keeps what the training loop has set for JAX away from what the library itself asks of JAX.

A training loop sets a mesh (``jax.set_mesh``), a default device, transfer guards, and flags that find its own mistakes
(``jax_debug_nans``, strict promotion, ``jax_no_tracing``). They are meant for its own computations. A slice of one
device's shard must not fail because it does not span the loop's mesh, because the state has a NaN, or because transfers
are forbidden. And it must be the same program in whichever thread it runs: JAX compiles again under other settings,
many of which hold for one thread alone.

So whatever the library computes, places or copies with JAX is within ``isolated``, or is a function that ``jit``
returned; ``tests/unit/test_jax_isolation.py`` finds what is not. What the user gave to the library (a step to compile,
``init``, host state, type handlers) runs as the user has set JAX: it is never within ``isolated``.

Numbers of 64 bits keep their width in here, whatever ``jax_enable_x64`` says. Whether a state may have them is decided
outside.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# What JAX's settings are in here: the flag, the public context manager that sets it for a thread, and the value.
_SETTINGS: tuple[tuple[str, str, Any], ...] = (
    ("jax_check_tracer_leaks", "check_tracer_leaks", False),
    ("jax_debug_infs", "debug_infs", False),
    ("jax_debug_key_reuse", "debug_key_reuse", False),
    ("jax_debug_nans", "debug_nans", False),
    ("jax_default_device", "default_device", None),
    ("jax_disable_jit", "disable_jit", False),
    ("jax_no_execution", "no_execution", False),
    ("jax_no_tracing", "no_tracing", False),
    ("jax_numpy_dtype_promotion", "numpy_dtype_promotion", "standard"),
    ("jax_numpy_rank_promotion", "numpy_rank_promotion", "allow"),
    ("jax_transfer_guard_device_to_device", "transfer_guard_device_to_device", "allow"),
    ("jax_transfer_guard_device_to_host", "transfer_guard_device_to_host", "allow"),
    ("jax_transfer_guard_host_to_device", "transfer_guard_host_to_device", "allow"),
)
# What ``with mesh:``, ``compute_on`` and ``set_xla_metadata`` set for a thread. No public names unset them.
_CONTEXTS: tuple[tuple[str, Any], ...] = (
    ("mesh_context_manager", ()),
    ("compute_on_context_manager", None),
    ("xla_metadata_context_manager", None),
)


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """The block, or the decorated function, uses JAX as if its caller had set nothing. Costs some microseconds."""
    import jax

    settings, contexts, no_mesh = _known()
    config = jax.config
    managers = [
        manager(value)
        for flag, manager, value in settings
        if (current := getattr(config, flag)) is not None and current != value  # None is JAX's default
    ]
    stale = [(context, value) for context, value in contexts if context.value != value]
    # An empty mesh is not the same to JAX as none: it is always set, so that nothing is compiled for each of them.
    with jax.set_mesh(no_mesh), jax.enable_x64(True):
        if not (managers or stale):  # mostly; and an ExitStack takes longer than all of the above
            yield
            return
        with contextlib.ExitStack() as stack:
            for manager in managers:
                stack.enter_context(manager)
            for context, value in stale:
                stack.callback(context.set_local, context.swap_local(value))
            yield


def setting(name: str) -> Any:
    """Returns what JAX's setting of this name is here: ``jax.config`` has them as attributes without types."""
    import jax

    return getattr(jax.config, name)


#: What may be wrong if JAX computes on the CPU by fallback, and what to do.
FALLBACK = (
    "The driver is not ready, or JAX's package for these devices is missing; JAX then takes the CPU without an error. "
    "Start again when jax.devices() shows the devices: with JAX_PLATFORMS=cuda (or tpu), JAX itself raises until then. "
    "If training is to continue on the CPU, set JAX_PLATFORMS=cpu"
)


def cpu_by_fallback() -> bool:
    """Returns whether JAX computes on the CPU though nothing asks for that (``JAX_PLATFORMS``, ``jax_platforms``)."""
    import jax

    chosen = setting("jax_platforms") or getattr(jax.config, "jax_platform_name", None)
    return jax.default_backend() == "cpu" and not chosen


def jit(function: Callable[..., Any], **options: Any) -> Any:
    """Returns ``function`` compiled by JAX. Its calls are isolated, and so is the ``lower`` that it has."""
    import jax

    jitted = jax.jit(function, **options)
    call: Any = isolated()(jitted)
    call.lower = isolated()(jitted.lower)
    return call


@isolated()
def to_numpy(array: Any) -> Any:
    """Returns the values of an array on the host, without a copy where they are there. Waits for them."""
    import numpy as np

    return np.asarray(array)


@functools.cache
def _known() -> tuple[Sequence[tuple[str, Any, Any]], Sequence[tuple[Any, Any]], Any]:
    """Returns the settings and contexts that this JAX has, and the mesh without devices."""
    import jax
    import numpy as np
    from jax._src import config

    settings = [(flag, getattr(jax, name), value) for flag, name, value in _SETTINGS if hasattr(jax.config, flag)]
    contexts = [(getattr(config, name), value) for name, value in _CONTEXTS if hasattr(config, name)]
    return settings, contexts, jax.sharding.Mesh(np.empty((), object), ())
