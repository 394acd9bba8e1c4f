"""Decisions of process 0 that all processes learn before they need them, without a barrier.

All processes count the same events, for example their steps, and divide them into **blocks** of the same length. When
process 0 enters a block, it publishes the plan of the *next* block. When another process enters a block, it reads the
plan of that block, which is published by then: it waits only if it is a whole block ahead of process 0. So the cost is
one read in each block.

Plans that all processes have read are removed. This is done for ``_SHELF`` blocks at a time, which are called a
**shelf**. When a process enters the first block of a shelf, it reports that it is done with the shelf before.

One thread calls all methods. This module has no threads.
"""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.process_group import ProcessGroup

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
