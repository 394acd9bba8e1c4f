"""Dispatchers run a handler's work on arrays, in this process or in the processes that have the devices.

In single-controller JAX the devices of an array belong to other processes than the one that calls. Work must then run
in those processes, and a dispatcher for remote arrays sends it there. The dispatcher of this module runs it in a thread
of this process. The thread ends with the work. It is a daemon: storage that hangs keeps no process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from gracepoint.jax_isolation import isolated

Result = TypeVar("Result")


class Dispatcher(Protocol):
    """Copies arrays to host memory, and runs work where their shards are."""

    def device_to_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Copies ``arrays`` to the host memory of the processes that have their shards. Returns the copies, in order.

        When this returns, the originals may be donated. The copies have the shapes, types and shardings of the
        originals, except for the memory kind. They are passed to ``dispatch`` later.
        """

    def dispatch(self, name: str, function: Callable[[Sequence[Any]], Result], arrays: Sequence[Any]) -> Future[Result]:
        """Calls ``function`` where the shards of ``arrays`` are addressable. Returns at once.

        Args:
            name: Name of the work, for the name of a thread.
            function: Called with ``arrays`` as that process sees them. It uses no other arrays.
            arrays: JAX arrays. Empty if the work needs none.
        """


class InProcessDispatcher:
    """A dispatcher for arrays whose shards are addressable in this process."""

    def device_to_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        return [_to_host(array) for array in arrays]

    def dispatch(self, name: str, function: Callable[[Sequence[Any]], Result], arrays: Sequence[Any]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function(arrays))
            except BaseException as error:  # noqa: BLE001 - raised in the thread that asks for the result
                future.set_exception(error)

        threading.Thread(target=run, name=f"gracepoint: {name}", daemon=True).start()
        return future


@isolated()
def _to_host(array: jax.Array) -> jax.Array:
    if array.sharding.memory_kind == "device" and next(iter(array.sharding.device_set)).platform != "cpu":
        return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    return jnp.copy(array)
