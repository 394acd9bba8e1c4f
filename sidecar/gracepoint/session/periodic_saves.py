"""Periodic saves, and how many steps would be lost without another one. Belongs to the training thread."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gracepoint.errors import CheckpointError, SaveFailed
from gracepoint.preemption.coordinator import Coordinator
from gracepoint.preemption.forecast import Figures

if TYPE_CHECKING:
    from gracepoint.checkpoint.checkpointers.step_checkpointer import StepCheckpointer

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05


class PeriodicSaves:
    """See the module.

    Args:
        checkpointer: The checkpoint engine.
        directory: The directory of its steps.
        coordinator: Says whether a preemption is under way, and how much time is left.

    Attributes:
        restored_step: The step that was restored. None if nothing was.
        own_step: The newest step that the training loop saved by its own means. None if there is none.
    """

    def __init__(self, checkpointer: StepCheckpointer, directory: str, coordinator: Coordinator) -> None:
        self._checkpointer = checkpointer
        self._directory = directory
        self._coordinator = coordinator
        self.restored_step: int | None = None
        self.own_step: int | None = None
        coordinator.reporter.follow_interval(checkpointer.save_interval.follow)

    def check_that_nothing_newer_is_there(self, step: int) -> None:
        """To be called at a first step before which nothing was restored.

        Raises:
            CheckpointError: The directory has a step that is as new or newer, or what looks like one.
        """
        from gracepoint.checkpoint.format.layout import Layout
        from gracepoint.checkpoint.steps import foreign, listing
        from gracepoint.checkpoint.storage.storage_path import storage_path

        paths = Layout(storage_path(self._directory))
        newest = max(listing.complete_steps(paths), default=None)
        if newest is None:
            found = [each for each in foreign.look_alikes(paths) if each.step is not None and each.step >= step]
            if found:
                raise foreign.refusal(paths.root, found)
        if newest is not None and newest >= step:
            raise CheckpointError(
                f"step({step}): {self._directory} has a complete step {newest}, and restore() was not called. The next "
                f"start would restore that one, and not what is trained now: call session.restore(like=state) before "
                f"the first step, or give this run a directory of its own"
            )

    def begins(self, step: int) -> bool:
        """Returns whether the save of this step begins now. All processes get the same answer.

        If it does, the caller makes it within ``stopped``.

        Raises:
            CheckpointError: The previous save failed.
            AgreementError: Another process is at another step. The message names both.
            BarrierError: The other processes cannot be reached.
        """
        if not self._checkpointer.save_interval.is_due(step):
            return False
        time_spent, begun = self._coordinator.reporter.time_spent, False
        time_spent.stops(step)
        try:
            begun = self._begins(step)
        finally:
            if not begun:
                time_spent.goes_on()
        return begun

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """The block begins a periodic save, for which ``begins`` has stopped the training. Then training goes on."""
        begun = False
        try:
            with self._coordinator.activities.at("periodic save"):
                yield
            begun = True
        finally:
            self._coordinator.reporter.time_spent.goes_on(periodic=begun)

    def _begins(self, step: int) -> bool:
        over = self._is_the_save_before_over()
        if not self._checkpointer.due_saves.are_begun(step, sync_point=self._coordinator.sync_point, ready=over):
            log.error("a periodic save is left out, as the one before it does not end, and a preemption waits")
            return False
        if self._coordinator.noticed:
            # A preemption is about to save: the failure of the previous save must not keep training from that.
            try:
                self._checkpointer.executor.background.check_for_errors()
            except SaveFailed as error:
                log.error("a periodic save failed; a preemption is under way, which saves error=%s", error)
        return True

    def _is_the_save_before_over(self) -> bool:
        """Waits for the previous save, as host memory has room for one snapshot.

        Once the freeze has begun, the other processes wait at the next sync point. If there is time to save the current
        step, the save under way is stopped. Otherwise it goes on, as nothing newer can be committed in time.

        Returns:
            False if the save has not ended and a preemption leaves no more time.
        """
        background, stopped = self._checkpointer.executor.background, False
        while background.is_busy(_LOOK_EVERY_S):
            if background.hangs:
                # The next save raises that, and so ends training unless a preemption is under way.
                return not self._coordinator.noticed
            if not self._coordinator.in_epoch:
                continue
            if stopped or self._coordinator.time_left_s() <= 0:
                return False
            if not self._coordinator.doubt():
                background.stop("a preemption waits for training, which waited for this save")
                stopped = True
        return True

    def steps_at_risk(self) -> int | None:
        """Returns the steps since the last committed one. None if no step is known to be committed."""
        last = self._checkpointer.executor.last_save
        saved = last.step if last is not None else self.own_step if self.own_step is not None else self.restored_step
        return None if saved is None else self._coordinator.step - saved

    def saved_by_the_loop(self, step: int, took_s: float, figures: Figures | None) -> None:
        """Notes that the training loop has saved this step by its own means.

        Args:
            step: The step.
            took_s: Seconds since the save began.
            figures: What an emergency save would take now. None if that is not known.
        """
        self.own_step = step
        self._coordinator.reporter.time_spent.passed(step, ago_s=took_s)
        if figures is not None:
            self._coordinator.report_forecast(figures, step)
