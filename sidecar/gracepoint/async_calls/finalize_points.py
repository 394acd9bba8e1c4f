"""Decides how many calls all processes finalize at the same question, without waiting for each other.

Every process asks at the same points of its training loop, as long as calls are active. A call ends at different
moments in different processes, so process 0 decides. The questions are counted and divided into blocks, whose plans
process 0 publishes one block ahead (``plans_ahead``). A plan says how many questions the block has, and how many calls
are finalized from its first question on.

A run of questions begins when a call is scheduled and none is active, and ends when none is active any more. The
training thread calls all methods. There are no threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from gracepoint.plans_ahead import PlansAhead
from gracepoint.process_group import ProcessGroup

#: Seconds that a block lasts about, and what is added for each process, because each reads one plan in each block.
_BLOCK_S = 0.25
_BLOCK_S_PER_PROCESS = 0.001


class FinalizePoints:
    """Answers the question "how many calls are finalized by now" alike in all processes.

    Args:
        gang: The processes.
        key: Prefix of the keys of the plans. Nothing else uses it.
        clock: Returns monotonic seconds. Only the clock of process 0 counts.
    """

    def __init__(self, gang: ProcessGroup, key: str, clock: Callable[[], float]) -> None:
        self._gang = gang
        self._key = key
        self._clock = clock
        self._block_s = _BLOCK_S + _BLOCK_S_PER_PROCESS * gang.process_count
        self._runs = 0
        self._question: int
        self._questions: int
        self._finalized: int
        self._begin_run()

    def ask(self, ended: int) -> int:
        """Returns the number of calls, counted from the first of the queue, that are to be finalized by now.

        Collective: every process asks at the same points.

        Args:
            ended: The number of calls that have ended in all processes, as this process knows. Only process 0's counts.

        Raises:
            BarrierTimeout: Process 0 is so far behind that it has not published the next plan in time.
        """
        if self._gang.process_count == 1:
            return ended
        if self._question == self._questions:
            before, self._question = self._questions, 0
            plan = self._plans.enter(lambda plan: json.dumps((self._questions_of_next(plan, before), ended)))
            self._questions, self._finalized = map(int, json.loads(plan))
        self._question += 1
        return self._finalized

    def end_run(self) -> None:
        """Says that no call is active any more. All processes say so at the same point."""
        self._plans.end()
        self._runs += 1
        self._begin_run()

    def _begin_run(self) -> None:
        self._plans = PlansAhead(self._gang, f"{self._key}/{self._runs}", json.dumps((1, 0)))
        self._question = 0  # asked so far in the block
        self._questions = 0  # length of the block
        self._finalized = 0
        self._entered_s: float | None = None  # used by process 0 only

    def _questions_of_next(self, plan: str, before: int) -> int:
        """Returns the length of the block after the one with ``plan``, from the speed in the block before."""
        now_s = self._clock()
        entered_s, self._entered_s = self._entered_s, now_s
        if entered_s is None:
            return 1
        question_s = max((now_s - entered_s) / before, 1e-6)
        return min(max(1, round(self._block_s / question_s)), 2 * int(json.loads(plan)[0]))
