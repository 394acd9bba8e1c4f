"""The emergency: from the notice to the exit.

Three threads meet here, each in its own methods. The agreement's background thread (``epoch_opened``,
``epoch_settled``) learns that there is a preemption, starts the watchdog and reports Frozen and Agreed. The
training thread saves (``save``). The watchdog (``overdue``) has the last word if neither comes to an end in time.
What they share is the mailbox, the stages' stamps and ``_progress``, replaced as a whole and never changed.

The time: the deadline is when the pod dies. A **reserve** before it is kept for ending with the right code, so
everything that waits is bounded by ``time_left_s``, which is zero two reserves before the deadline: one for the
report of a failure, one for leaving. A deadline that is very near or past is no reason not to try: at least
``_LEAST_S`` are taken, as operators round and clouds are late.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gracepoint.errors import BarrierError, GracepointError, Preempted
from gracepoint.gang import Gang
from gracepoint.leaving import Leaving
from gracepoint.multihost import Agreement
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.reporting import Progress, Reporter
from gracepoint.settings import Settings
from gracepoint.stages import Stages, summary
from gracepoint.wire.messages import Phase

log = logging.getLogger(__name__)

_LEAST_S = 3.0
_RESERVE_S = 1.0
_RESERVE_PART = 0.1
_FLUSH_S = 3.0
_GATHER_S = 3.0


class Saver(Protocol):
    """The part of the checkpoint engine that an emergency needs."""

    def save(
        self,
        step: int,
        state: Any,
        host_state: Mapping[str, Any],
        *,
        timeout_s: float,
        on_stage: Callable[[str], None],
    ) -> Any:
        """Saves and commits; the result has ``bytes``, over all processes."""


class Emergency:
    """One preemption of this session; implements ``multihost.Observer``.

    Args:
        gang: The processes.
        settings: Exit codes.
        mailbox: What is coming, and when.
        reporter: Whom to tell.
        clock: Monotonic seconds; the mailbox's.
    """

    def __init__(
        self,
        gang: Gang,
        settings: Settings,
        mailbox: Mailbox,
        reporter: Reporter,
        clock: Callable[[], float],
    ) -> None:
        self._gang = gang
        self._settings = settings
        self._mailbox = mailbox
        self._reporter = reporter
        self._clock = clock
        self._leaving: Leaving | None = None
        self._stages = Stages(clock(), clock)
        self._progress = Progress()
        self._epoch: int | None = None
        self._deadline_floor_s = math.inf  # training may be held before ``epoch_opened`` has said how long
        self._reserve_s = _RESERVE_S
        self._failing = threading.Lock()
        self._failed = False

    def leave_by(self, leaving: Leaving) -> None:
        """Says who ends the process. Before any epoch."""
        self._leaving = leaving

    # The agreement's background thread.

    def epoch_opened(self, epoch: int, by: int, notice: str) -> None:
        """As ``multihost.Observer``."""
        if by != self._gang.process_index:
            log.warning("another process has a notice process=%d notice=%s", by, notice)
            self._mailbox.post(Disruption.from_json(notice))
        now_s = self._clock()
        self._epoch = epoch
        self._deadline_floor_s = now_s + _LEAST_S
        self._reserve_s = min(_RESERVE_S, _RESERVE_PART * self._until_deadline_s())
        first_s = self._mailbox.first_at_s
        self._stages = Stages(now_s if first_s is None else first_s, self._clock)
        if self._leaving is not None:
            self._leaving.watch(lambda: self._until_deadline_s() - self._reserve_s, self._settings.unsaved_exit_code)

    def epoch_settled(self, epoch: int, agreed: int) -> None:
        """As ``multihost.Observer``."""
        self._stages.mark("frozen")
        self._report(Phase.FROZEN)
        self._stages.mark("agreed")
        self._report(Phase.AGREED, ordinal=agreed)

    def epoch_failed(self, epoch: int, error: Exception) -> None:
        """As ``multihost.Observer``: decides the end, as training may be stuck in a step without its peers."""
        self._fail(f"not saved: {error}", error)

    def time_left_s(self) -> float:
        """As ``multihost.Observer``: for all work, without what ending takes."""
        return self._until_deadline_s() - 2 * self._reserve_s

    def _until_deadline_s(self) -> float:
        return max(self._mailbox.remaining_s(), self._deadline_floor_s - self._clock())

    # The training thread.

    def save(
        self,
        saver: Saver,
        agreement: Agreement,
        step: int,
        state: Any,
        host_state: Callable[[], Mapping[str, Any]],
    ) -> Preempted:
        """Saves at the agreed sync point and returns what to raise; never raises an error of its own.

        Args:
            saver: The checkpoint engine.
            agreement: To hold the steps of all processes against each other.
            step: This process's step.
            state: The train state of that step, perhaps still being computed.
            host_state: Gives the state that is no array.
        """
        try:
            agreement.confirm(step, timeout_s=max(0.001, self.time_left_s()))
            values = self._drain(state, host_state)
            self._stages.mark("drained")
            self._report(Phase.DRAINED, step=step)
            saved = saver.save(
                step, state, values, timeout_s=max(0.001, self.time_left_s()), on_stage=self._stages.mark
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, the process leaves, and says why
            return self.failed(step, error)
        spare_s = round(self._mailbox.remaining_s(), 3)
        reason = f"step {step} is committed, {abs(spare_s):.1f} s {'before' if spare_s >= 0 else 'after'} the deadline"
        self._decide(self._settings.saved_exit_code)
        # That the step is committed says of all processes what was known before of this one only.
        stages = self._gathered()
        self._report(Phase.WRITTEN, bytes=saved.bytes, stages=stages)
        self._report(Phase.DURABLE, stages=stages)
        self._report(Phase.COMMITTED, steps_lost=0, seconds_to_spare=spare_s, stages=stages, message=reason)
        self._reporter.flush(min(_FLUSH_S, max(0.0, self.time_left_s())))
        log.warning("preempted saved=True step=%d seconds_to_spare=%.1f", step, spare_s)
        return Preempted(self._settings.saved_exit_code, saved=True, step=step, reason=reason)

    def _drain(self, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Waits until the devices of all processes are done; one that fails lets the others wait no longer."""
        import jax

        key = f"epoch/{self._epoch}/drained"
        try:
            jax.block_until_ready(state)
            values = host_state()
        except Exception as error:
            with contextlib.suppress(GracepointError):  # the error itself says more
                self._gang.fail(key, error)
            raise
        self._gang.barrier(key, timeout_s=max(0.001, self.time_left_s()))
        return values

    def failed(self, step: int, error: Exception, steps_lost: int | None = None) -> Preempted:
        """Reports that nothing was saved, and returns what to raise."""
        reason = f"not saved at step {step}: {error}"
        self._fail(reason, error, step=step, steps_lost=steps_lost)
        self._reporter.flush(min(_FLUSH_S, max(0.0, self.time_left_s() + self._reserve_s)))
        preempted = Preempted(self._settings.unsaved_exit_code, saved=False, step=step, reason=reason)
        preempted.__cause__ = error
        return preempted

    def over(self) -> None:
        """Training had ended before the agreed sync point: there is nothing to save."""
        if self._leaving is not None:
            self._leaving.cancel()
        self._report(Phase.RETRACTED, message="training finished")

    def _gathered(self) -> dict[str, Any]:
        """The stages of all processes; of this one alone if a process is gone by now (the save is committed)."""
        wait_s = max(0.001, min(_GATHER_S, self.time_left_s()))
        try:
            return summary(self._gang.gather(f"epoch/{self._epoch}/stages", self._stages.to_json(), timeout_s=wait_s))
        except BarrierError as error:
            log.warning("stages of this process only error=%s", error)
            return self._stages.own()

    def _decide(self, code: int) -> None:
        if self._leaving is not None:
            self._leaving.decide(code)

    # The watchdog.

    def overdue(self) -> None:
        """The time is over and the training thread is stuck somewhere."""
        reason = f"not saved: the time was over; the last stage reached was {self._stages.last or 'noticed'}"
        self._fail(reason)
        self._reporter.flush(self._reserve_s / 2)

    # Any of the three.

    def _fail(self, reason: str, error: Exception | None = None, **known: int | None) -> None:
        """The first word of a failure is the one that counts, and is told at once."""
        with self._failing:
            if self._failed:
                return
            self._failed = True
        log.error("preempted saved=False reason=%s", reason, exc_info=error)
        self._decide(self._settings.unsaved_exit_code)
        self._report(Phase.FAILED, message=reason, **known)

    def _report(self, phase: Phase, **changes: Any) -> None:
        progress = dataclasses.replace(self._progress, **{"stages": self._stages.own(), **changes})
        self._progress = progress
        self._reporter.report(phase, progress)


def call_everybody(agreement: Agreement) -> Callable[[Disruption], None]:
    """What the mailbox does with a notice: it rings the bell, in the thread that brought the notice."""

    def called(disruption: Disruption) -> None:
        try:
            agreement.call(disruption.to_json())
        except GracepointError as error:
            log.error("the other processes could not be told of the notice error=%s", error)

    return called
