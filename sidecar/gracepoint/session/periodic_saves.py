"""Periodic saves and snapshots, how long saves may fail, and how many steps would be lost without another one.

A save that fails does not end training: storage that is away for some minutes comes back. A failure is logged and
reported, and the save is tried again soon. If saves fail for longer than ``tolerate_s``, training ends, in all
processes at the same step: at a save that is due, the first process that asks decides for all (``DueSaves``). A save
fails in all processes or in none, so that all of them count alike.

A snapshot in the memory of nodes that fails or is skipped ends nothing: the saves are there. It is said in the log and
to the operator.

All of this belongs to the training thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gracepoint.errors import CheckpointError, SaveFailed
from gracepoint.preemption.coordinator import Coordinator
from gracepoint.preemption.forecast import Figures
from gracepoint.wire.messages import TroubleKind
from gracepoint.wire.names import DEFAULT_TOLERATE_FAILURES_S

if TYPE_CHECKING:
    from gracepoint.checkpoint.engine import StepCheckpointer
    from gracepoint.checkpoint.metrics import SaveStats
    from gracepoint.checkpoint.saving.memory_snapshots import MemorySnapshots

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.05
#: A save that failed is tried again after so many seconds, if none is due before.
_RETRIED_AFTER_S = 60.0


@dataclasses.dataclass
class _Failing:
    """The saves that failed since one was committed.

    Attributes:
        since_s: When the first of them was due.
        first_step: Its step.
        before: The committed save before them. None if there is none.
        saves: How many they are.
        tried_s: When the newest was due.
        error: What the newest failed with.
        reported: Whether the operator was told.
        told: Whether training was ended for it, and continues nevertheless, as the loop caught the error.
    """

    since_s: float
    first_step: int
    before: SaveStats | None
    saves: int = 0
    tried_s: float = 0.0
    error: Exception | None = None
    reported: bool = False
    told: bool = False


class PeriodicSaves:
    """Saves when it is due, and ends training if saves fail for too long.

    Args:
        checkpointer: The checkpoint engine.
        coordinator: Says whether a preemption is in progress, and how much time is left.
        tolerate_s: Seconds for which saves may fail. 0: the first failure ends training.
        clock: Returns monotonic seconds.

    Attributes:
        restored_step: The step that was restored. None if nothing was.
        own_step: The newest step that the training loop saved by its own means. None if there is none.
    """

    def __init__(
        self,
        checkpointer: StepCheckpointer,
        coordinator: Coordinator,
        *,
        tolerate_s: float = DEFAULT_TOLERATE_FAILURES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._checkpointer = checkpointer
        self._coordinator = coordinator
        self._tolerate_s = tolerate_s
        self._clock = clock
        self._failing: _Failing | None = None
        self._due_s, self._due_step = 0.0, 0  # of the newest save
        self.restored_step: int | None = None
        self.own_step: int | None = None
        coordinator.reporter.follow_interval(checkpointer.save_interval.follow)

    def check_that_nothing_newer_is_there(self, step: int) -> None:
        """To be called at a first step before which nothing was restored.

        Raises:
            CheckpointError: The directory has a step that is as new or newer, or what looks like one.
        """
        from gracepoint.checkpoint.format.layout import Layout
        from gracepoint.checkpoint.steps import listing
        from gracepoint.checkpoint.storage.locations import storage_path

        paths = Layout(storage_path(self._checkpointer.directory))
        newest = max(listing.complete_steps(paths), default=None)
        if newest is None:
            newer = [each for each in listing.look_alikes(paths) if each.step is not None and each.step >= step]
            if newer:
                raise listing.refusal(paths.root, newer)
        if newest is not None and newest >= step:
            raise CheckpointError(
                f"step({step}): {paths.root} has a complete step {newest}, and restore() was not called. The next "
                f"start would restore that one, and not what is trained now: call session.restore(like=state) before "
                f"the first step, or give this run a separate directory"
            )

    def begins(self, step: int) -> bool:
        """Returns whether the save of this step begins now. All processes get the same answer.

        If it does, the caller calls ``save``.

        Raises:
            SaveFailed: Saves have failed for longer than they may. Raised in all processes.
            AgreementError: Another process is at another step. The message names both.
            BarrierError: The other processes cannot be reached.
        """
        self._look()
        if not self._checkpointer.save_interval.is_due(step):
            return False
        time_spent, started = self._coordinator.reporter.time_spent, False
        time_spent.stops(step)
        try:
            started = self._begins(step)
        finally:
            if not started:
                time_spent.goes_on()
        return started

    def save(self, step: int, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> None:
        """Begins the save for which ``begins`` has stopped the training. Then training continues, even if this fails.

        Raises:
            CheckpointError: Another job has taken the directory over.
            jax.errors.JaxRuntimeError: The devices have failed to compute the state, so that training cannot continue.
        """
        from gracepoint.checkpoint.saving.device_copy import NotComputed

        try:
            self._checkpointer.access.check_lease()
        except CheckpointError as error:
            self._checkpointer.refuse(step, error)
            raise
        try:
            with self._stopped():
                self._checkpointer.save_in_background(step, state, host_state)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other processes count one failed save
            if isinstance(error, NotComputed) and error.devices is not None:
                raise error.devices from None
            self._failed(error)

    def check_newest(self) -> None:
        """To be called once training has finished.

        Raises:
            SaveFailed: The newest save failed, and no later one is there to make up for it.
        """
        self._look()
        if self._failing is not None:
            raise SaveFailed(f"{self._said(self._failing)}. Training has finished; what it did since then is not saved")

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        started = False
        try:
            with self._coordinator.activities.at("periodic save"):
                yield
            started = True
        finally:
            self._coordinator.reporter.time_spent.goes_on(periodic=started)

    def _begins(self, step: int) -> bool:
        over = self._is_the_save_before_over()
        self._look()
        executor = self._checkpointer.executor
        decided = self._checkpointer.due_saves.decide(
            step, sync_point=self._coordinator.sync_point, ready=over, saves=executor.saves, ends=self._ends()
        )
        executor.saves = decided.saves
        if decided.ends:
            if self._failing is not None:
                self._failing.told = True
            raise SaveFailed(decided.ends)
        if not decided.begins:
            logger.error("a periodic save is left out, as the one before it does not end, and a preemption waits")
            return False
        self._due_s, self._due_step = self._clock(), step
        return True

    # Failures.

    def _look(self) -> None:
        """Takes the outcome of the save before, if it has ended. Costs nothing while saves succeed."""
        executor, failing = self._checkpointer.executor, self._failing
        if failing is not None:
            if executor.last_save is not failing.before:
                self._failing = None
                over = f"a periodic save is committed again, after {failing.saves} that failed"
                logger.warning("%s", over)
                if failing.reported:
                    self._coordinator.reporter.trouble(TroubleKind.SAVES, over, over=True)
            elif self._clock() - failing.tried_s > _RETRIED_AFTER_S:
                failing.tried_s = self._clock()
                self._checkpointer.save_interval.hasten()
        if not executor.has_failed:
            return
        newest = executor.newest
        try:
            executor.check_for_errors()
        except SaveFailed as error:
            if newest is not None and newest.committed:
                logger.error("what follows a save has failed, the save itself is committed error=%s", error)
            else:
                self._failed(error)

    def _failed(self, error: Exception) -> None:
        """Notes that the newest save failed, in this process or in all."""
        from gracepoint.checkpoint.saving.device_copy import NotComputed

        if self._failing is None:
            self._failing = _Failing(self._due_s, self._due_step, self._checkpointer.executor.last_save)
        failing = self._failing
        failing.saves += 1
        failing.tried_s, failing.error, failing.told = self._due_s, error, False
        for_s, text = self._clock() - failing.since_s, self._said(failing)
        left_s = max(0.0, self._tolerate_s - for_s)
        logger.error("%s; training continues, and ends if none succeeds within %.0f s", text, left_s, exc_info=error)
        if isinstance(error, NotComputed):
            return  # nothing is wrong with the storage: the other process raises that, and the job restarts
        failing.reported = True
        self._coordinator.reporter.trouble(TroubleKind.SAVES, text, for_s=for_s, times=failing.saves, left_s=left_s)

    def _ends(self) -> str:
        """Returns why this process would end training now. Empty: it would not."""
        failing = self._failing
        if failing is None or failing.told or self._coordinator.noticed:
            return ""
        # A save is tried at least twice, as the interval between saves may be longer than they may fail.
        if self._tolerate_s > 0 and (failing.saves < 2 or self._clock() - failing.since_s <= self._tolerate_s):
            return ""
        where = "attach(tolerate_failures_s=...), the policy's checkpoint.tolerateFailuresSeconds"
        return f"{self._said(failing)}; they may fail for {self._tolerate_s:.0f} s ({where})"

    def _said(self, failing: _Failing) -> str:
        count = "a periodic save failed" if failing.saves == 1 else f"{failing.saves} periodic saves in a row failed"
        since = f"the first was that of step {failing.first_step}, {self._clock() - failing.since_s:.0f} s ago"
        return f"{count}; {since}: {failing.error}"

    def _is_the_save_before_over(self) -> bool:
        """Waits for the previous save, as host memory has room for one snapshot.

        Once the freeze has begun, the other processes wait at the next sync point. If there is time to save the current
        step, the save in progress is stopped. Otherwise it continues, as nothing newer can be committed in time.

        Returns:
            False if the save has not ended and a preemption leaves no more time.
        """
        executor, stopped = self._checkpointer.executor, False
        while executor.is_busy(_LOOK_EVERY_S):
            if executor.hangs:
                # The next save raises that, and so ends training unless a preemption is in progress.
                return not self._coordinator.noticed
            if not self._coordinator.in_epoch:
                continue
            if stopped or self._coordinator.time_left_s() <= 0:
                return False
            if not self._coordinator.doubt():
                executor.stop("a preemption waits for training, which waited for this save")
                stopped = True
        return True

    def steps_at_risk(self) -> int | None:
        """Returns the steps since the newest that a restart finds, stored or safe in memory. None: none is known."""
        last_save = self._checkpointer.executor.last_save
        saved = (
            last_save.step
            if last_save is not None
            else self.own_step
            if self.own_step is not None
            else self.restored_step
        )
        memory = self._checkpointer.memory
        if memory is not None and memory.newest is not None:
            saved = max(saved or 0, memory.newest.step)
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


class PeriodicSnapshots:
    """Takes snapshots in the memory of nodes when they are due.

    Args:
        memory: The engine's part of it.
        coordinator: Says whether a preemption is in progress, and reports.
        clock: Returns monotonic seconds.
    """

    def __init__(
        self, memory: MemorySnapshots, coordinator: Coordinator, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._memory = memory
        self._coordinator = coordinator
        self._clock = clock
        self._due_s: float | None = None  # when the newest was due
        self._interval_s: float | None = None
        self._reported = (memory.newest, memory.skips)

    def pass_step(self, step: int, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> None:
        """To be called at each step, after its periodic save, whose copy from the devices it shares.

        Raises:
            AgreementError: A snapshot is due, and another process is at another step. The message names both.
            BarrierError: The other processes cannot be reached.
        """
        memory = self._memory
        if memory.is_due(step):
            self._take(step, state, host_state)
        newest, skips = self._reported
        if memory.newest is not newest or memory.skips is not skips:
            self._report()

    def _take(self, step: int, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> None:
        memory, coordinator, now_s = self._memory, self._coordinator, self._clock()
        if self._due_s is not None:
            self._interval_s = now_s - self._due_s
        self._due_s = now_s
        coordinator.reporter.time_spent.stops(None)
        try:
            not_now = "a preemption is about to save" if coordinator.in_epoch else ""
            if memory.begins(step, sync_point=coordinator.sync_point, not_now=not_now):
                with coordinator.activities.at("snapshot"):
                    memory.begin(step, state, host_state)
        finally:
            coordinator.reporter.time_spent.goes_on()

    def _report(self) -> None:
        newest, skips = self._reported = self._memory.newest, self._memory.skips
        self._coordinator.reporter.snapshots(
            safe_step=None if newest is None else newest.step,
            copies=0 if newest is None else newest.copies,
            age_s=None if newest is None else self._clock() - newest.taken_s,
            interval_s=self._interval_s,
            skipped=skips.count,
            skipped_reason=skips.reason,
            size_bytes=0 if newest is None else newest.part_bytes,
            servers=() if newest is None else newest.nodes,
        )
