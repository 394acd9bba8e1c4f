"""The steps that this gang knows to be committed, and what a commit leaves to remove: old steps and keys.

The owner of the checkpointer and the thread of the background save call the methods, never both at a time: the owner
waits for that save before it saves, restores or closes. The owner may read ``newest`` at any time.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gracepoint.checkpoint.format.layout import Layout
from gracepoint.checkpoint.steps.cleanup import SETTLES_S, StepCleaner
from gracepoint.checkpoint.steps.retention import DamagedStep, Retention
from gracepoint.deadline import Deadline
from gracepoint.process_group import ProcessGroup

logger = logging.getLogger(__name__)


class CommittedSteps:
    """The newest step of this gang. Process 0 also removes what is not kept.

    Args:
        paths: The directory of the steps.
        gang: The processes that save together.
        key: Prefix of the keys of saves.
        attempt: Unique for each start of the gang; the same in all its processes.
        retention: Which steps are kept.

    Attributes:
        newest: The newest step that this process has restored, or knows to be committed. None if there is none.
    """

    def __init__(self, paths: Layout, gang: ProcessGroup, *, key: str, attempt: str, retention: Retention) -> None:
        self._gang = gang
        self._key = key
        self._cleaner = StepCleaner(paths, retention, attempt)
        self._has_tidied = False  # the first call also deletes unfinished saves of earlier starts
        self._retired = 0  # keys are removed up to this save
        self.newest: int | None = None

    def add(self, step: int) -> None:
        """Notes that ``step`` is committed. A newer one stays the newest: an older save may end after it."""
        self.newest = step if self.newest is None else max(step, self.newest)

    def has(self, step: int) -> bool:
        """Returns whether ``step`` is the newest one, so that it need not be saved again."""
        if self.newest != step:
            return False
        logger.info("step %d is committed already", step)
        return True

    def after_restore(self, damaged: Mapping[int, DamagedStep], ordinal: int, *, tidies: bool) -> None:
        """Marks ``damaged`` steps, removes the mark of the newest one, and tidies up; see ``StepCleaner``."""
        if self._gang.process_index == 0:
            self._cleaner.after_restore(
                damaged, self.newest, ordinal=ordinal, tidies=tidies, give_up_old=not self._has_tidied
            )
            self._has_tidied |= tidies

    def tidy(self, newest_good: int | None, ordinal: int) -> None:
        """Has old steps and trash deleted, and does not wait for that; see ``StepCleaner.tidy``."""
        if self._gang.process_index == 0:
            self._cleaner.tidy(newest_good, ordinal=ordinal, give_up_old=not self._has_tidied)
            self._has_tidied = True

    def settle(self, timeout_s: float = SETTLES_S) -> None:
        """Does what ``tidy`` was asked for, except for the deletion of trash; see ``StepCleaner.settle``."""
        if self._gang.process_index == 0:
            self._cleaner.settle(timeout_s)

    def finish(self, deadline: Deadline) -> None:
        """Waits until all trash is deleted, or until ``deadline``."""
        if self._gang.process_index == 0:
            self._cleaner.finish(deadline)

    def retire(self, ordinal: int) -> None:
        """Removes the keys of saves before ``ordinal``, which all processes have committed.

        Keys of the previous save stay: if it was stopped, its thread may still be ending.

        Raises:
            BarrierError: The store cannot be reached.
        """
        while self._retired < ordinal - 2:
            self._retired += 1
            self._gang.retire(f"{self._key}/save/{self._retired}")
