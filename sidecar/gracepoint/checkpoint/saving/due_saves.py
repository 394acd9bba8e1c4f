"""What all processes decide when a periodic save is due: whether it is begun, and that it is the same save in all.

Asking belongs to the training thread, ``retire`` to the one that has committed a save. No process waits for another:
the first to ask decides, and writes that down for all others together with where it is.
"""

from __future__ import annotations

import dataclasses
import json

from gracepoint.errors import AgreementError
from gracepoint.process_group import ProcessGroup


@dataclasses.dataclass(frozen=True)
class _Word:
    """What the first process to ask says.

    Attributes:
        process: Its index.
        step: That is due.
        sync_point: Number of the sync point at which it is due.
        begins: True: the save is begun; False: it is left out.
    """

    process: int
    step: int
    sync_point: int
    begins: bool


class OtherSave(AgreementError):
    """Another process is at another step. ``begun`` says whether it has begun its save."""

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


class DueSaves:
    """Counts the saves that are due, alike in all processes.

    Args:
        gang: The processes.
        key: Below which the decisions are written; used by nothing else.
    """

    def __init__(self, gang: ProcessGroup, key: str) -> None:
        self._gang = gang
        self._key = key
        self._asked = 0
        self._retired = 0  # the thread of whichever save was committed last; never two at a time

    def are_begun(self, step: int, *, sync_point: int, ready: bool) -> bool:
        """Whether the save that is due is begun, as the first process that asks would have it.

        Raises:
            OtherSave: The first process is at another step or at another sync point; names both.
            BarrierError: The store cannot be reached.
        """
        self._asked += 1
        mine = _Word(self._gang.process_index, step, sync_point, ready)
        text = self._gang.decide(f"{self._key}/{self._asked}", json.dumps(dataclasses.astuple(mine)))
        first = _Word(*json.loads(text))
        if (first.step, first.sync_point) != (step, sync_point):
            raise OtherSave(
                f"periodic save {self._asked} is due in process {first.process} with step {first.step} at sync point "
                f"{first.sync_point}, and in process {mine.process} with step {step} at sync point {sync_point}: "
                f"every process must call step() once for each step, with the same number",
                begun=first.begins,
            )
        return first.begins

    @property
    def asked(self) -> int:
        """How many saves were due so far."""
        return self._asked

    def retire(self, asked: int) -> None:
        """All processes have asked for so many: what was decided then is removed. Called in the same order in all.

        Raises:
            BarrierError: The store cannot be reached.
        """
        for number in range(self._retired + 1, asked + 1):
            self._gang.retire(f"{self._key}/{number}")
        self._retired = max(self._retired, asked)
