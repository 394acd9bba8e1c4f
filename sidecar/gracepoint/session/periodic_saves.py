"""What is on the disk while training goes on: periodic saves, and how much would be lost. For the training thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gracepoint.errors import CheckpointError, SaveFailed
from gracepoint.multihost import Agreement
from gracepoint.preemption.time_budget import TimeBudget

if TYPE_CHECKING:
    from gracepoint.checkpoint.step_checkpointer import StepCheckpointer

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05


class PeriodicSaves:
    """See the module.

    Args:
        checkpointer: The engine.
        directory: Where its steps are.
        agreement: Says whether a preemption is under way.
        outlook: Says how much time it leaves, and whether that will do.

    Attributes:
        restored_step: That training began from; None: from nothing.
    """

    def __init__(
        self, checkpointer: StepCheckpointer, directory: str, agreement: Agreement, outlook: TimeBudget
    ) -> None:
        self._checkpointer = checkpointer
        self._directory = directory
        self._agreement = agreement
        self._outlook = outlook
        self.restored_step: int | None = None

    def check_that_nothing_newer_is_there(self, step: int) -> None:
        """Is asked at a first step before which nothing was restored.

        Raises:
            CheckpointError: The directory has a step that is as new or newer.
        """
        from gracepoint.checkpoint.api import latest_step

        newest = latest_step(self._directory)
        if newest is not None and newest >= step:
            raise CheckpointError(
                f"step({step}): {self._directory} has a complete step {newest}, and restore() was not called. The next "
                f"start would restore that one, and not what is trained now: call session.restore(like=state) before "
                f"the first step, or give this run a directory of its own"
            )

    def save_if_due(self, step: int, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> None:
        """Begins the save of this step, if it is time for one.

        Raises:
            CheckpointError: The save before failed, or this state cannot be saved.
            AgreementError: Another process is at another step; names both.
            BarrierError: The other processes cannot be reached.
        """
        if not self._checkpointer.save_interval.is_due(step):
            return
        over = self._is_the_save_before_over()
        if not self._checkpointer.is_begun_by_all(step, sync_point=self._agreement.sync_point, ready=over):
            log.error("a periodic save is left out, as the one before it does not end, and a preemption waits")
            return
        if self._agreement.noticed:
            # A preemption is about to save: that the save before failed must not keep it from that.
            try:
                self._checkpointer.executor.check_for_errors()
            except SaveFailed as error:
                log.error("a periodic save failed; a preemption is under way, which saves error=%s", error)
        self._checkpointer.save_in_background(step, state, host_state())

    def _is_the_save_before_over(self) -> bool:
        """Waits for it, as memory has room for one snapshot; False if that would be longer than a preemption leaves.

        Once the freeze has begun, all processes are waited for at the next sync point. So the save under way is stopped
        as long as there is time to save training as it is now; later, it is the best that can be had.
        """
        stopped = False
        while self._checkpointer.executor.is_busy(_LOOK_EVERY_S):
            if self._checkpointer.executor.hangs:
                # The next save tells, and ends training where nothing is to be saved.
                return not self._agreement.noticed
            if not self._agreement.in_epoch:
                continue
            if stopped or self._outlook.time_left_s() <= 0:
                return False
            if not self._outlook.doubt(drained=False):
                self._checkpointer.executor.stop("a preemption waits for training, which waited for this save")
                stopped = True
        return True

    def steps_at_risk(self, step: int) -> int | None:
        """Steps since what is committed; None where nothing is known to be."""
        last = self._checkpointer.executor.last_save
        saved = last.step if last is not None else self.restored_step
        return None if saved is None else step - saved
