"""Where a handler's work on arrays is done: in this process, or where a dispatcher for remote arrays takes it.

With arrays whose devices belong to other processes than the one that calls (single-controller JAX), work must be
done beside the devices. A dispatcher takes it there; the one that is here takes it to a thread of this process,
which ends with the work, and is a daemon: storage that hangs keeps no process from leaving.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

Result = TypeVar("Result")


class Dispatcher(Protocol):
    """Takes arrays to host memory, and work to where their shards are."""

    def device_to_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Copies ``arrays`` to host memory where their shards are; returns the copies, in the same order.

        When this returns, the originals may be donated. The copies have the shapes, types and shardings of the
        originals, but for the kind of memory; ``dispatch`` is given them later.
        """

    def dispatch(self, name: str, function: Callable[[Sequence[Any]], Result], arrays: Sequence[Any]) -> Future[Result]:
        """Calls ``function`` where the shards of ``arrays`` can be addressed; returns at once.

        Args:
            name: Of the work, in words.
            function: Is given ``arrays``, as they are seen there; it uses no others.
            arrays: Of JAX; empty where the work needs none.
        """


class InProcessDispatcher:
    """For arrays whose shards this process addresses itself."""

    def device_to_host(self, arrays: Sequence[Any]) -> Sequence[Any]:
        return [_to_host(array) for array in arrays]

    def dispatch(self, name: str, function: Callable[[Sequence[Any]], Result], arrays: Sequence[Any]) -> Future[Result]:
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function(arrays))
            except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
                future.set_exception(error)

        threading.Thread(target=run, name=f"gracepoint: {name}", daemon=True).start()
        return future


def _to_host(array: jax.Array) -> jax.Array:
    if array.sharding.memory_kind == "device" and next(iter(array.sharding.device_set)).platform != "cpu":
        return jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    return jnp.copy(array)
