"""When a periodic save is due, decides for all processes whether it begins, and checks that all are at the same step.

The training thread calls ``decide``. The thread that has committed a save calls ``retire``. No process waits for
another. The first process that asks decides, and records the decision together with its step and sync point.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from gracepoint.errors import AgreementError
from gracepoint.process_group import ProcessGroup


@dataclasses.dataclass(frozen=True)
class DueSave:
    """The decision of the first process that asks.

    Attributes:
        process: Index of that process.
        step: The step that is due in that process.
        sync_point: Number of the sync point at which it is due.
        begins: Whether the save begins. False: it is skipped.
        saves: How many saves that process has begun. Barriers are named by this count, so all take it over.
        ends: Why training ends here, as saves have failed for too long. Empty: it goes on.
    """

    process: int
    step: int
    sync_point: int
    begins: bool
    saves: int = 0
    ends: str = ""


class DueSaves:
    """Counts the saves that are due. The count is the same in all processes.

    Args:
        gang: The processes that save together.
        key: Prefix of the keys of the decisions. Nothing else uses it.
        fail: Called with the step and the error if the other processes began a save that this process cannot begin.
            They would wait for this process's part until the save's timeout.
    """

    def __init__(self, gang: ProcessGroup, key: str, fail: Callable[[int, AgreementError], None]) -> None:
        self._gang = gang
        self._key = key
        self._fail = fail
        self._asked = 0
        self._retired = 0  # written by the thread of the save that was committed last; never by two threads at a time

    def decide(self, step: int, *, sync_point: int, ready: bool, saves: int = 0, ends: str = "") -> DueSave:
        """Returns what all processes do about the save that is due. The first process that asks decides.

        Collective, for each save that is due. If only some processes began a save, it would never end, and the later
        saves of the processes would not match. The first process also records its step, and all others compare it with
        theirs.

        Args:
            step: The step that is due in this process.
            sync_point: Number of the sync point at which it is due; the same in all processes.
            ready: Whether this process can begin the save. If it cannot, and all begin, it waits for the previous save.
            saves: How many saves this process has begun.
            ends: Why this process would end training here. Empty: it would not.

        Raises:
            AgreementError: The first process asked at another sync point, or for another step; names both. The save
                fails in all processes.
            BarrierError: The other processes cannot be reached.
        """
        self._asked += 1
        mine = DueSave(self._gang.process_index, step, sync_point, ready and not ends, saves, ends)
        text = self._gang.decide(f"{self._key}/{self._asked}", json.dumps(dataclasses.astuple(mine)))
        first = DueSave(*json.loads(text))
        if (first.step, first.sync_point) != (step, sync_point):
            error = AgreementError(
                f"periodic save {self._asked} is due in process {first.process} with step {first.step} at sync point "
                f"{first.sync_point}, and in process {mine.process} with step {step} at sync point {sync_point}: "
                f"every process must call step() once for each step, with the same number"
            )
            if first.begins:
                self._fail(step, error)
            raise error
        return first

    @property
    def asked(self) -> int:
        """Number of saves that were due so far."""
        return self._asked

    def retire(self, asked: int) -> None:
        """Removes the first ``asked`` decisions, which all processes have read.

        All processes make these calls in the same order.

        Raises:
            BarrierError: The store cannot be reached.
        """
        for number in range(self._retired + 1, asked + 1):
            self._gang.retire(f"{self._key}/{number}")
        self._retired = max(self._retired, asked)
