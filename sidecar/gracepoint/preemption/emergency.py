"""The emergency: from the notice to the exit; or a drill, from which training goes on.

Four threads meet here, each in its own methods. The agreement's reading thread (``heard``) learns of notices and
epochs, starts the watchdog and reports Frozen, Agreed and Retracted. Its timing thread asks when to start, and looks
whether the time will do (``looked``). The training thread saves (``saving``), or learns that it cannot (``failed``).
The watchdog (``overdue``) has the last word if none of them comes to an end in time. What they share is the mailbox,
the outlook, and the open epoch's ``account``, which is replaced when the next one opens.

A background save that was under way goes on beside all of this. Where the current step is not saved in the end, and
that one was committed since the freeze began, the gang leaves with it (``_committed_instead``). The others are asked
about that by a thread of its own, which ends with their answer or with the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from gracepoint.errors import GracepointError, Preempted
from gracepoint.multihost.entries import NoticeEntry
from gracepoint.multihost.ledger import Broken, Closed, Epoch, Event, Moot, Noticed, Opened, Retracted, Settled
from gracepoint.preemption.epoch_progress import EpochProgress
from gracepoint.preemption.notice_relay import NoticeRelay
from gracepoint.preemption.process_exit import ProcessExit
from gracepoint.preemption.reporter import Progress, Reporter
from gracepoint.preemption.stages import Stages
from gracepoint.preemption.time_budget import TimeBudget
from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.settings import Settings
from gracepoint.wire.messages import Phase

log = logging.getLogger(__name__)

_FLUSH_S = 3.0
#: For the others' word on how it ends; the watchdog has a second for all of its own.
_ASK_S = 0.3
_FINISHED = "training finished"


class Emergency:
    """What a session does about notices; implements ``multihost.Observer``.

    Args:
        gang: The processes.
        settings: Exit codes.
        mailbox: What is coming, and when.
        notices: Between the mailbox and the bell.
        outlook: How much time there is.
        reporter: Whom to tell.
        clock: Monotonic seconds; the mailbox's.

    Attributes:
        epoch: What is known of the open epoch, or of the last one.
    """

    def __init__(
        self,
        gang: ProcessGroup,
        settings: Settings,
        mailbox: Mailbox,
        notices: NoticeRelay,
        outlook: TimeBudget,
        reporter: Reporter,
        clock: Callable[[], float],
    ) -> None:
        self._gang = gang
        self._settings = settings
        self._mailbox = mailbox
        self._notices = notices
        self._outlook = outlook
        self._reporter = reporter
        self._clock = clock
        self._leaving: ProcessExit | None = None
        self._on_freeze: Callable[[], None] | None = None
        self._committed_step: Callable[[], int | None] = lambda: None
        self._current_step: Callable[[], int] = lambda: 0
        self.begin_without_agreement()

    def leave_by(self, leaving: ProcessExit) -> None:
        """Says who ends the process. Before any epoch."""
        self._leaving = leaving

    def call_when_it_freezes(self, on_freeze: Callable[[], None]) -> None:
        """Says what else is to be done when a freeze begins that is no drill; in one process. Before any epoch."""
        self._on_freeze = on_freeze

    def look_for_commits(self, committed_step: Callable[[], int | None], current_step: Callable[[], int]) -> None:
        """Says how to learn what a background save has committed, and where training is. Before any epoch."""
        self._committed_step, self._current_step = committed_step, current_step

    @property
    def drill(self) -> bool:
        """True if the open epoch, or the last one, is a drill."""
        return self.epoch.drill

    # The agreement's reading thread.

    def heard(self, event: Event) -> None:
        """As ``multihost.Observer``."""
        match event:
            case Noticed(notice):
                disruption = self._notices.stands(notice)
                if notice.by != self._gang.process_index:
                    log.warning("another process has a notice process=%d notice=%s", notice.by, disruption)
            case Retracted(notice, _, reason):
                self._retracted(notice, reason)
            case Moot(notices, by):
                for notice in notices:
                    self._retracted(notice, _FINISHED, alone=by == self._gang.process_index)
            case Opened(epoch):
                self._opened(epoch)
            case Settled(epoch):
                self.epoch.stages.mark("frozen")
                self.epoch.report(Phase.FROZEN)
                self.epoch.stages.mark("agreed")
                self.epoch.report(Phase.AGREED, ordinal=epoch.agreed)
            case Broken(epoch, reason):
                # Decides the end, as training may be stuck in a step without its peers.
                self._fail(f"not saved: {reason}")
                if epoch.drill:
                    self._closed(epoch)
            case Closed(epoch):
                self._closed(epoch)

    def _opened(self, epoch: Epoch) -> None:
        first_s = self._mailbox.first_at_s
        stages = Stages(self._clock() if first_s is None else first_s, self._clock)
        self.epoch = EpochProgress(epoch.number, epoch.drill, stages, self._mailbox, self._reporter)
        self._committed_before = self._committed_step()
        self._outlook.begin()
        if self._leaving is not None and not epoch.drill:
            self._leaving.watch(
                lambda: self._outlook.until_deadline_s() - self._outlook.reserve_s, self._settings.unsaved_exit_code
            )
        log.warning("the freeze begins drill=%s left_s=%.1f", epoch.drill, self.time_left_s())
        self.looked()
        if self._on_freeze is not None and not epoch.drill and self._gang.process_index == 0:
            self._on_freeze()

    def _closed(self, epoch: Epoch) -> None:
        self._outlook.end()
        for origin in epoch.origins:
            self._notices.falls(origin)

    def _retracted(self, notice: NoticeEntry, reason: str, *, alone: bool = False) -> None:
        disruption = self._mailbox.find(notice.origin)
        self._notices.falls(notice.origin)
        log.warning("a notice stands no longer origin=%s reason=%s", notice.origin, reason)
        if disruption is not None and disruption.preemption:  # else the operator knows nothing of it
            self._reporter.report(Phase.RETRACTED, Progress(message=reason), disruption, alone=alone)

    # The agreement's timing thread.

    def looked(self) -> None:
        """As ``multihost.Observer``: says so at once when the time will not do, as far as is known.

        Also ends what waits beyond the time, as the deadline has moved since.
        """
        epoch = self.epoch
        waits_at = epoch.waits_at
        if waits_at is not None and self.time_left_s() <= 0:
            with contextlib.suppress(GracepointError):  # the watchdog will see to it
                self._gang.cancel(waits_at, "the time was over")
        if epoch.doubt or epoch.ended or epoch.stages.has("written"):
            return
        if epoch.plan is not None and epoch.plan.steps_lost > 0:
            return  # it is known, and no more is tried
        doubt = self._outlook.doubt(drained=epoch.stages.has("drained"))
        if doubt:
            log.error("%s; tried all the same", doubt)
            epoch.has_doubt(doubt)

    def start_in_s(self) -> float:
        """As ``multihost.Observer``."""
        return self._outlook.start_in_s()

    def time_left_s(self) -> float:
        """As ``multihost.Observer``."""
        return self._outlook.time_left_s()

    # The training thread.

    def failed(self, step: int, error: Exception, steps_lost: int | None = None) -> Preempted | None:
        """Reports that this step was not saved, and returns what to raise; None after a drill."""
        reason = self.epoch.with_doubt(f"not saved at step {step}: {error}")
        instead = self._committed_instead()
        if instead is not None:
            reason = self._left_with(instead, step, reason)
        else:
            self._fail(reason, error, step=step, steps_lost=steps_lost)
        if self.epoch.drill:
            return None
        self._reporter.flush(min(_FLUSH_S, max(0.0, self.time_left_s() + self._outlook.reserve_s)))
        if instead is None:
            preempted = Preempted(self._settings.unsaved_exit_code, saved=False, step=step, reason=reason)
        else:
            code, lost = self._settings.saved_exit_code, step - instead
            preempted = Preempted(code, saved=True, step=instead, reason=reason, steps_lost=lost)
        preempted.__cause__ = error
        return preempted

    def begin_without_agreement(self) -> None:
        """A preemption ends before its freeze began: a peer is gone already."""
        self._committed_before = self._committed_step()
        stages = Stages(self._clock(), self._clock)
        self.epoch = EpochProgress(-1, False, stages, self._mailbox, self._reporter)

    def over(self) -> None:
        """Training had ended before the agreed sync point: there is nothing to save."""
        if self._leaving is not None:
            self._leaving.cancel()
        progress = dataclasses.replace(self.epoch.progress, message=_FINISHED)
        about: Sequence[Disruption | None] = self._mailbox.named() or [self._mailbox.current]
        for disruption in about:
            self._reporter.report(Phase.RETRACTED, progress, disruption)

    # The watchdog.

    def overdue(self) -> None:
        """The time is over and the training thread is stuck somewhere."""
        last = self.epoch.stages.last or "noticed"
        step, reason = self._current_step(), f"not saved: the time was over; the last stage reached was {last}"
        instead = self._committed_instead()
        if instead is not None:
            self._left_with(instead, step, self.epoch.with_doubt(reason))
        else:
            self._fail(self.epoch.with_doubt(reason), step=step)
        self._reporter.flush(self._outlook.reserve_s / 2)

    # Any of them.

    def _fail(self, reason: str, error: Exception | None = None, **known: int | None) -> None:
        """The first word of a failure is the one that counts, and is told at once."""
        if not self.epoch.fail_first():
            return
        committed = self._committed_step()
        if known.get("steps_lost") is None and committed is not None:
            known["steps_lost"] = self._current_step() - committed
        log.error("preempted saved=False drill=%s reason=%s", self.epoch.drill, reason, exc_info=error)
        self.decide(self._settings.unsaved_exit_code)
        self.epoch.report(Phase.FAILED, message=f"drill: {reason}" if self.epoch.drill else reason, **known)

    def _committed_instead(self) -> int | None:
        """The step that a background save has committed since the freeze began, as the first that asks knows it."""
        known = self._committed_step()
        found = "" if known is None or known == self._committed_before else str(known)
        key = f"epoch/{self.epoch.number}/instead"
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._gang.decide(key, found))
            except GracepointError:
                answers.put(found)

        # In a thread of its own, as a service that is stopped neither answers nor fails, and little time is left.
        with contextlib.suppress(RuntimeError, queue.Empty):  # nobody can be asked: then what this process knows
            threading.Thread(target=ask, name="gracepoint-asks", daemon=True).start()
            found = answers.get(timeout=_ASK_S)
        return int(found) if found else None

    def _left_with(self, instead: int, step: int, reason: str) -> str:
        """Ends the epoch with a step that is older than the one that was to be saved."""
        lost = step - instead
        reason = f"step {instead} is committed, {lost} steps before step {step}, which was {reason}"
        if self.epoch.drill:
            reason = f"drill: {reason}"
        if self.epoch.fail_first():
            log.error("preempted saved=True drill=%s reason=%s", self.epoch.drill, reason)
            self.decide(self._settings.saved_exit_code)
            self.epoch.report(Phase.PROMOTED, step=instead, steps_lost=lost, message=reason)
        return reason

    def decide(self, code: int) -> None:
        """The process ends with this code; in a drill it does not."""
        if self._leaving is not None and not self.epoch.drill:
            self._leaving.decide(code)
