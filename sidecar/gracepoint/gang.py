"""What the library needs from the other processes of the gang, as a protocol.

The checkpoint engine and the session see the gang only through this; ``gracepoint.multihost`` implements it
on the JAX coordination service, and ``SingleProcess`` is the gang of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Gang(Protocol):
    """The processes that train together, as one of them sees them.

    Every call that names a ``key`` is collective: each process makes it with the same key, once. Keys are
    made unique within the attempt by the caller (``save/3/commit``); the implementation puts job and attempt
    in front. Calls with different keys may run at the same time in different threads.
    """

    @property
    def process_index(self) -> int:
        """This process's index: ``jax.process_index()``, 0 to ``process_count - 1``."""

    @property
    def process_count(self) -> int:
        """How many processes the gang has."""

    def barrier(self, key: str, *, timeout_s: float, on_last: Callable[[], None] | None = None) -> None:
        """Blocks until every process has arrived.

        Args:
            key: Unique within the attempt.
            timeout_s: Seconds until it gives up.
            on_last: Called in the one process that arrives last, before any is released. Its exception
                releases the others with ``BarrierFailed``.

        Raises:
            BarrierTimeout: Not all came in time; says who is missing.
            BarrierFailed: A process called ``fail`` for this key, or its ``on_last`` raised.
            BarrierReused: This process used the key before.
        """

    def fail(self, key: str, error: BaseException) -> None:
        """Tells those that wait, or will, at ``barrier(key)`` that this process does not come, and why."""

    def broadcast(self, key: str, value: str | None, *, timeout_s: float) -> str:
        """Hands process 0's ``value`` to all; the others pass None.

        Raises:
            BarrierTimeout: Process 0 did not publish in time.
        """

    def gather(self, key: str, value: str, *, timeout_s: float) -> list[str]:
        """Returns every process's ``value``, by process index.

        Raises:
            BarrierTimeout: Not all published in time; says who is missing.
        """


class SingleProcess:
    """The gang of one process: nothing to wait for."""

    process_index = 0
    process_count = 1

    def barrier(self, key: str, *, timeout_s: float, on_last: Callable[[], None] | None = None) -> None:
        if on_last is not None:
            on_last()

    def fail(self, key: str, error: BaseException) -> None:
        pass

    def broadcast(self, key: str, value: str | None, *, timeout_s: float) -> str:
        if value is None:
            raise ValueError(f"broadcast of {key!r}: process 0 must give the value, found None")
        return value

    def gather(self, key: str, value: str, *, timeout_s: float) -> list[str]:
        return [value]
