"""How much time a preemption leaves, as a test says."""

from __future__ import annotations

from gracepoint.preemption.forecast import TimeBudget


class Left(TimeBudget):
    """A budget without a mailbox. Of several values, each is given once, and the last one from then on."""

    def __init__(self, *until_s: float) -> None:
        self._until_s = list(until_s)
        self.reserve_s = 1.0

    def until_deadline_s(self) -> float:
        return self._until_s.pop(0) if len(self._until_s) > 1 else self._until_s[0]
