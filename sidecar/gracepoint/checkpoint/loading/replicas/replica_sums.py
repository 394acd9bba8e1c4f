"""The programs that give the values of primary replicas to all replicas, as a sum over them (``single_replica``).

``compile`` lowers the programs in the caller's thread, because settings that JAX lowers by, such as x64, may hold for
that thread alone. Another thread ("gracepoint: compiling", a daemon) then compiles them while the caller reads. Until
``wait`` returns, only that thread uses the compiled programs. A compilation cannot be ended: if it takes too long, its
thread outlives the call.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from gracepoint.checkpoint.loading.replicas.value_bits import from_bits
from gracepoint.deadline import Deadline
from gracepoint.errors import CheckpointError
from gracepoint.jax_isolation import isolated, jit

logger = logging.getLogger(__name__)

# Most seconds to wait for a compilation whose result is not needed.
_END_S = 10.0


class Summed(Protocol):
    """The placement of one array. ``single_replica.OnOneReplica`` implements it.

    Attributes:
        dtype: Type of the array.
        sharding: Sharding of the array.
    """

    dtype: np.dtype[Any]
    sharding: jax.sharding.NamedSharding

    @property
    def bytes_per_device(self) -> int:
        """Bytes of each device's part."""

    def form(self) -> jax.ShapeDtypeStruct:
        """Returns the shape, type and sharding of the array that is summed along its first axis."""


class Sums:
    """The programs that give the values of the primary replicas to all. One for each batch of arrays."""

    def __init__(self, placements: Sequence[Summed]) -> None:
        self._placements = placements
        self._compiled: dict[tuple[int, int], Any] = {}  # written by the thread, read when it has ended
        self._thread: threading.Thread | None = None

    def batches(self, limit_bytes: int) -> Iterator[tuple[int, int]]:
        """Yields ranges of arrays that fit into the limit together. An array that is larger is in a range of its own.

        ``limit_bytes`` is for each device's part.
        """
        start, total_bytes = 0, 0
        for position, placement in enumerate(self._placements):
            if position > start and total_bytes + placement.bytes_per_device > limit_bytes:
                yield start, position
                start, total_bytes = position, 0
            total_bytes += placement.bytes_per_device
        if self._placements:
            yield start, len(self._placements)

    def compile(self, limit_bytes: int) -> None:
        """Lowers the programs of all batches, and starts to compile them."""
        lowered = {(start, stop): self._lowered(start, stop) for start, stop in self.batches(limit_bytes)}
        self._thread = threading.Thread(
            target=self._compile, args=(lowered,), name="gracepoint: compiling", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more threads: each is compiled when it is used
            self._thread = None

    def wait(self, deadline: Deadline) -> None:
        """Returns when ``compile`` has ended.

        Raises:
            CheckpointError: It has not ended by the deadline.
        """
        if self._thread is not None:
            self._thread.join(deadline.remaining_s())
            if self._thread.is_alive():
                raise CheckpointError("the program that sends arrays to other replicas was not compiled in time")

    def end(self) -> None:
        """Waits for the thread, for some seconds at most. The interpreter must not end while the thread compiles."""
        if self._thread is not None:
            self._thread.join(_END_S)

    def of(self, start: int, stop: int) -> Callable[[tuple[jax.Array, ...]], Any]:
        """Returns the program of one batch."""
        found: Callable[[tuple[jax.Array, ...]], Any] = self._compiled.get((start, stop)) or self._program(start, stop)
        return isolated()(found)

    def _lowered(self, start: int, stop: int) -> Any:
        return self._program(start, stop).lower(tuple(placement.form() for placement in self._placements[start:stop]))

    def _compile(self, lowered: dict[tuple[int, int], Any]) -> None:
        for (start, stop), program in lowered.items():
            try:
                self._compiled[start, stop] = program.compile()
            except Exception as error:  # noqa: BLE001 - it is compiled again when it is used, which raises
                logger.debug("the program of %d arrays was not compiled ahead: %s", stop - start, error)

    def _program(self, start: int, stop: int) -> Any:
        batch = self._placements[start:stop]
        dtypes = tuple(placement.dtype for placement in batch)
        shardings = tuple(placement.sharding for placement in batch)
        return jit(functools.partial(_merge, dtypes), out_shardings=shardings)


def _merge(dtypes: tuple[np.dtype[Any], ...], stacked: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(
        from_bits(jnp.sum(bits, axis=0, dtype=bits.dtype), dtype) for bits, dtype in zip(stacked, dtypes, strict=True)
    )
