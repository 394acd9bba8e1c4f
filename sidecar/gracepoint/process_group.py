"""What the library needs from the other processes, as a protocol, and decisions that it makes with nothing else.

The checkpoint engine and the session see the other processes only through ``ProcessGroup``. ``gracepoint.multihost``
implements it on the JAX coordination service, and ``SingleProcess`` for a job of one process.

``PlansAhead``: decisions of process 0 that all processes learn before they need them, without a barrier. All processes
count the same events, for example their steps, and divide them into **blocks** of the same length. When process 0
enters a block, it publishes the plan of the *next* block. When another process enters a block, it reads the plan of
that block, which is published by then: it waits only if it is a whole block ahead of process 0. So the cost is one read
in each block. Plans that all processes have read are removed, ``_SHELF`` blocks at a time, which are called a
**shelf**: a process that enters the first block of a shelf reports that it is done with the shelf before. One thread
calls all methods; there are no threads here.

``SaveProgress``: how far a save in the background is, for those who watch it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Protocol


class ProcessGroup(Protocol):
    """The processes that train together, as one of them sees them.

    Every call with a ``key`` is collective unless it says otherwise: each process makes it once, with the same key. The
    caller makes keys unique within the attempt (``save/3/commit``, or ``multihost.BarrierKeys``); the implementation
    adds job and attempt in front. Calls with different keys may run in different threads at the same time.

    ``processes`` names the processes that take part by their ``process_index``, alike in all of them. None means all. A
    process that is not among them must not make the call.
    """

    @property
    def process_index(self) -> int:
        """This process's index: ``jax.process_index()``, 0 to ``process_count - 1``."""

    @property
    def process_count(self) -> int:
        """How many processes train together."""

    def awaited(self) -> list[int]:
        """Returns the processes for which this process waits now in any call, sorted. Any thread may ask."""

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
            timeout_s: Seconds that this process waits. Then it gives the barrier up, and no process passes.
            on_last: Called in the process that arrives last, before any process passes. If it raises, the other
                processes raise ``BarrierFailed``.
            processes: The processes that take part. None for all.

        Raises:
            BarrierTimeout: Not all processes came in time. Names the missing ones.
            BarrierFailed: A process called ``fail`` for this key, or its ``on_last`` raised.
            BarrierCancelled: A process called ``cancel`` for this key.
            BarrierReused: This process has used the key before.
            ValueError: This process is not in ``processes``, or ``processes`` has an index that does not exist.
        """

    def fail(self, key: str, error: BaseException) -> None:
        """Tells the processes that wait for ``key``, now or later, that this process does not come, and why."""

    def cancel(self, key: str, reason: str) -> bool:
        """Ends the waits for ``key``, in other threads of this process and in all other processes.

        Returns:
            True if no process passes or has passed it. False if the barrier was decided before: then all processes
            pass, or all raise what was decided.
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
        """Returns the ``value`` of process ``source`` in all processes. The others pass None. The source does not wait.

        Raises:
            BarrierTimeout: The source did not publish its value in time. The process may call again with the same key.
            BarrierFailed, BarrierCancelled, BarrierReused, ValueError: As ``barrier``.
        """

    def reduce(
        self,
        key: str,
        value: str,
        merge: Callable[[list[str]], str],
        *,
        timeout_s: float,
        processes: Collection[int] | None = None,
    ) -> str:
        """Returns the result of ``merge`` in all processes.

        Args:
            key: As ``barrier``.
            value: This process's value.
            merge: Called in the process that arrives last, with the values of all in the order of their indices. If it
                raises, the other processes raise ``BarrierFailed``.
            timeout_s: As ``barrier``.
            processes: As ``barrier``.

        Raises:
            BarrierTimeout, BarrierFailed, BarrierCancelled, BarrierReused, ValueError: As ``barrier``.
        """

    def gather(self, key: str, value: str, *, timeout_s: float, processes: Collection[int] | None = None) -> list[str]:
        """Returns every process's ``value``, in the order of their indices.

        For values that are mostly equal, as equal ones are sent once. Where they differ, the answer grows with the
        number of processes: use ``reduce``.

        Raises:
            BarrierTimeout: Not all processes published their value in time. Names the missing ones.
            BarrierFailed, BarrierCancelled, BarrierReused, ValueError: As ``barrier``.
        """

    def decide(self, key: str, value: str) -> str:
        """Returns the ``value`` of the process that called first, in all processes that call. Does not wait.

        Not collective: any number of processes may call, at any time.
        """

    def decide_in_turn(self, key: str, find: Callable[[], str], *, timeout_s: float) -> str:
        """Returns the value that ``find`` returned in one process, in all processes that call.

        Not collective, as ``decide``. ``find`` may be slow, and may ask something that all processes share. So one
        process at a time calls it, and the others wait ``timeout_s`` for its value. If none comes, because that process
        has died or its ``find`` hangs, the next process calls ``find``. After a few such turns, all processes that
        still wait call it.

        If ``find`` raises, this process raises that error, and the others continue.
        """

    def leave(self, folder: str, *, processes: Collection[int] | None = None) -> None:
        """Says that this process is done with the keys below ``folder``. The last process to say so removes them.

        Collective, once for each folder. Does not wait.

        Args:
            folder: The folder. No key outside of it is removed.
            processes: The processes that use these keys, and call this. None for all.
        """

    def retire(self, folder: str) -> None:
        """Removes the key ``folder`` and those below it, which all processes have passed. Process 0 does it for all.

        A process may call it once it knows that all have passed, for example from a later barrier; it need not. Does
        not wait.
        """


class SingleProcess:
    """A job of one process: there is nothing to wait for."""

    process_index = 0
    process_count = 1

    def awaited(self) -> list[int]:
        return []

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

    def reduce(
        self,
        key: str,
        value: str,
        merge: Callable[[list[str]], str],
        *,
        timeout_s: float,
        processes: Collection[int] | None = None,
    ) -> str:
        return merge([value])

    def gather(self, key: str, value: str, *, timeout_s: float, processes: Collection[int] | None = None) -> list[str]:
        return [value]

    def decide(self, key: str, value: str) -> str:
        return value

    def decide_in_turn(self, key: str, find: Callable[[], str], *, timeout_s: float) -> str:
        return find()

    def leave(self, folder: str, *, processes: Collection[int] | None = None) -> None:
        pass

    def retire(self, folder: str) -> None:
        pass


_SHELF = 32
#: Seconds that a process waits for the plan of process 0. Long enough for an evaluation that only process 0 runs.
_WAIT_S = 1800.0


class PlansAhead:
    """Publishes a plan for each block, one block ahead.

    Args:
        gang: The processes.
        key: Prefix of the keys of the plans. Nothing else uses it.
        first: The plan of the first block, the same in all processes.
    """

    def __init__(self, gang: ProcessGroup, key: str, first: str) -> None:
        self._gang = gang
        self._key = key
        self._plan = first  # of the block to enter next; only process 0 knows it, except for the first block
        self._blocks = 0  # entered so far

    def enter(self, plan_next: Callable[[str], str]) -> str:
        """Enters the next block and returns its plan. Collective.

        Args:
            plan_next: Called in process 0 with the plan of the block that is entered. Returns the plan of the block
                after it.

        Raises:
            BarrierTimeout: Process 0 is so far behind that it has not published the plan in time.
        """
        plan = self._plan
        if self._gang.process_index == 0:
            self._plan = plan_next(plan)
            self._gang.broadcast(self._key_of(self._blocks + 1), self._plan, timeout_s=_WAIT_S)
        elif self._blocks > 0:
            plan = self._gang.broadcast(self._key_of(self._blocks), None, timeout_s=_WAIT_S)
        shelf, place = divmod(self._blocks, _SHELF)
        if place == 0 and shelf > 0:
            self._gang.leave(f"{self._key}/{shelf - 1}")
        self._blocks += 1
        return plan

    def end(self) -> None:
        """Says that this process enters no more blocks. All processes say so after the same block."""
        if self._blocks == 0:
            return
        for shelf in sorted({(self._blocks - 1) // _SHELF, self._blocks // _SHELF}):
            self._gang.leave(f"{self._key}/{shelf}")

    def _key_of(self, block: int) -> str:
        return f"{self._key}/{block // _SHELF}/{block}"


@dataclasses.dataclass(frozen=True)
class StorageWait:
    """A wait for storage that process 0 does not reach, or that it may not reach.

    Attributes:
        tries: How often process 0 has found it away. None in the other processes, which wait for process 0.
    """

    tries: int | None


@dataclasses.dataclass(frozen=True)
class SaveProgress:
    """A background save that is in progress in this process.

    Attributes:
        step: Its step.
        stage: The stage that this process's part has reached: "", "written", "durable" or "committed".
        done_bytes: Bytes of this process's part that are written.
        total_bytes: Bytes of this process's part.
        thread_id: Python's identifier of the thread that saves. None if it has not started.
    """

    step: int
    stage: str
    done_bytes: int
    total_bytes: int
    thread_id: int | None
