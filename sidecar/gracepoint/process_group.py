"""What the library needs from the other processes of the gang, as a protocol.

The checkpoint engine and the session see the gang only through this; ``gracepoint.multihost`` implements it
on the JAX coordination service, and ``SingleProcess`` is the gang of one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol


class ProcessGroup(Protocol):
    """The processes that train together, as one of them sees them.

    Every call that names a ``key`` is collective: each process makes it with the same key, once. Keys are
    made unique within the attempt by the caller (``save/3/commit``, or ``multihost.BarrierKeys``); the
    implementation puts job and attempt in front. Calls with different keys may run at the same time in
    different threads.

    ``processes`` names those that take part, the same ones in each of them, by ``process_index``; None means
    all. A process that is not among them must not make the call.
    """

    @property
    def process_index(self) -> int:
        """This process's index: ``jax.process_index()``, 0 to ``process_count - 1``."""

    @property
    def process_count(self) -> int:
        """How many processes the gang has."""

    def barrier(
        self,
        key: str,
        *,
        timeout_s: float,
        on_last: Callable[[], None] | None = None,
        processes: Collection[int] | None = None,
    ) -> None:
        """Blocks until every process has arrived.

        Args:
            key: Unique within the attempt.
            timeout_s: Seconds until it gives up.
            on_last: Called in the one process that arrives last, before any is released. Its exception
                releases the others with ``BarrierFailed``.
            processes: Who takes part; None for all.

        Raises:
            BarrierTimeout: Not all came in time; says who is missing.
            BarrierFailed: A process called ``fail`` for this key, or its ``on_last`` raised.
            BarrierCancelled: A process called ``cancel`` for this key.
            BarrierReused: This process used the key before.
            ValueError: This process is not in ``processes``, or one there is not in the gang.
        """

    def fail(self, key: str, error: BaseException) -> None:
        """Tells those that wait for ``key``, or will, that this process does not come, and why."""

    def cancel(self, key: str, reason: str) -> bool:
        """Gives up what waits for ``key``, in another thread of this process and in all others.

        Returns:
            True if nobody passes or has passed it. False if it was decided before: then all pass, or what
            they were told stands.
        """

    def broadcast(
        self,
        key: str,
        value: str | None,
        *,
        timeout_s: float,
        source: int = 0,
        processes: Collection[int] | None = None,
    ) -> str:
        """Hands the ``value`` of process ``source`` to all; the others pass None. The source waits for nobody.

        Raises:
            BarrierTimeout: The source did not publish in time.
            BarrierFailed, BarrierCancelled, BarrierReused, ValueError: As ``barrier``.
        """

    def gather(self, key: str, value: str, *, timeout_s: float, processes: Collection[int] | None = None) -> list[str]:
        """Returns every process's ``value``, in the order of their indices.

        Raises:
            BarrierTimeout: Not all published in time; says who is missing.
            BarrierFailed, BarrierCancelled, BarrierReused, ValueError: As ``barrier``.
        """

    def decide(self, key: str, value: str) -> str:
        """Returns the ``value`` of the process that called first: the same in all that ask. Waits for nobody.

        Not collective: any number of processes may ask, whenever they like.
        """

    def leave(self, folder: str) -> None:
        """This process is done with the keys below ``folder``; the last process to say so removes them.

        Collective, for each folder once; waits for nobody.
        """

    def retire(self, folder: str) -> None:
        """Removes the key ``folder`` and those below it, which all processes have passed; process 0 does it for all.

        Each process calls it where it knows that, as from a later barrier, or does not. Waits for nobody.
        """


class SingleProcess:
    """The gang of one process: nothing to wait for."""

    process_index = 0
    process_count = 1

    def barrier(
        self,
        key: str,
        *,
        timeout_s: float,
        on_last: Callable[[], None] | None = None,
        processes: Collection[int] | None = None,
    ) -> None:
        if on_last is not None:
            on_last()

    def fail(self, key: str, error: BaseException) -> None:
        pass

    def cancel(self, key: str, reason: str) -> bool:
        return False

    def broadcast(
        self,
        key: str,
        value: str | None,
        *,
        timeout_s: float,
        source: int = 0,
        processes: Collection[int] | None = None,
    ) -> str:
        if value is None:
            raise ValueError(f"broadcast of {key!r}: process 0 must give the value, found None")
        return value

    def gather(self, key: str, value: str, *, timeout_s: float, processes: Collection[int] | None = None) -> list[str]:
        return [value]

    def decide(self, key: str, value: str) -> str:
        return value

    def leave(self, folder: str) -> None:
        pass

    def retire(self, folder: str) -> None:
        pass
