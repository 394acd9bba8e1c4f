"""What a process does when it hears of notices and epochs. Runs in the agreement's two background threads.

The reading thread calls ``heard``: it starts the watchdog and reports Frozen, Agreed and Retracted. The timing thread
asks when the freeze must begin (``start_in_s``), and checks while an epoch is open whether the time will be enough
(``looked``).
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable

from gracepoint.errors import GracepointError
from gracepoint.multihost.sync_point.entries import NoticeEntry
from gracepoint.multihost.sync_point.ledger import (
    Broken,
    Closed,
    Epoch,
    Event,
    Moot,
    Noticed,
    Opened,
    Retracted,
    Settled,
)
from gracepoint.preemption.notice_relay import NoticeReader
from gracepoint.preemption.outcome import FINISHED, Outcome
from gracepoint.preemption.process_exit import ProcessExit
from gracepoint.preemption.reporting.reporter import Progress, Reporter
from gracepoint.preemption.time_budget import TimeBudget
from gracepoint.process_group import ProcessGroup
from gracepoint.settings import Settings
from gracepoint.wire.messages import Phase

log = logging.getLogger(__name__)


class PreemptionObserver:
    """Implements ``multihost.Observer``.

    Args:
        group: The processes that train together.
        settings: The exit codes.
        notices: Keeps the mailbox in line with the bell.
        budget: How much time is left.
        outcome: Holds the open epoch and reports how it ends.
        reporter: Sends the reports.
        process_exit: Its watchdog ends the process in time.
        on_freeze: Called in process 0 when a freeze begins that is no drill.
        position: As ``multihost.Observer.position``.
    """

    def __init__(
        self,
        group: ProcessGroup,
        settings: Settings,
        notices: NoticeReader,
        budget: TimeBudget,
        outcome: Outcome,
        reporter: Reporter,
        process_exit: ProcessExit,
        on_freeze: Callable[[], None],
        position: Callable[[], tuple[int, bool]],
    ) -> None:
        self._group = group
        self._settings = settings
        self._notices = notices
        self._budget = budget
        self._outcome = outcome
        self._reporter = reporter
        self._exit = process_exit
        self._on_freeze = on_freeze
        self._position = position

    # The reading thread.

    def heard(self, event: Event) -> None:
        """As ``multihost.Observer``."""
        match event:
            case Noticed(notice):
                disruption = self._notices.received(notice)
                if notice.by != self._group.process_index:
                    log.warning("another process has a notice process=%d notice=%s", notice.by, disruption)
            case Retracted(notice, _, reason):
                self._retracted(notice, reason)
            case Moot(notices, by):
                for notice in notices:
                    self._retracted(notice, FINISHED, alone=by == self._group.process_index)
            case Opened(epoch):
                self._opened(epoch)
            case Settled(epoch):
                progress = self._outcome.epoch
                if not progress.stages.has("agreed"):  # else it is decided anew, as a process broke off
                    progress.stages.mark("frozen")
                    progress.report(Phase.FROZEN)
                progress.stages.mark("agreed")
                progress.report(Phase.AGREED, ordinal=epoch.agreed)
            case Broken(epoch, reason):
                # Decides the exit code here, as training may be stuck in a step without its peers.
                self._outcome.fail(f"not saved: {reason}")
                if epoch.drill:
                    self._closed(epoch)
            case Closed(epoch):
                self._closed(epoch)

    def _opened(self, epoch: Epoch) -> None:
        self._outcome.begin(epoch.number, drill=epoch.drill)
        self._budget.begin()
        if not epoch.drill:
            self._exit.watch(
                lambda: self._budget.until_deadline_s() - self._budget.reserve_s,
                self._settings.unsaved_exit_code,
                on_overdue=self._outcome.overdue,
            )
        self._outcome.begun()  # only now: it writes to the store, which may not answer
        log.warning("the freeze begins drill=%s left_s=%.1f", epoch.drill, self.time_left_s())
        self.looked()
        if not epoch.drill and self._group.process_index == 0:
            self._on_freeze()

    def _closed(self, epoch: Epoch) -> None:
        self._budget.end()
        for origin in epoch.origins:
            self._notices.removed(origin)

    def _retracted(self, notice: NoticeEntry, reason: str, *, alone: bool = False) -> None:
        disruption = self._notices.removed(notice.origin)
        log.warning("a notice was taken back origin=%s reason=%s", notice.origin, reason)
        if disruption is not None and disruption.preemption:  # the operator knows nothing of notices without a name
            self._reporter.report(Phase.RETRACTED, Progress(message=reason), disruption, alone=alone)

    def position(self) -> tuple[int, bool]:
        """As ``multihost.Observer``."""
        return self._position()

    # The timing thread.

    def looked(self) -> None:
        """As ``multihost.Observer``: reports at once if the time will probably not be enough.

        Also ends a wait for other processes that goes beyond the deadline, which may have moved since the wait began.
        """
        epoch = self._outcome.epoch
        waits_at = epoch.waits_at
        if waits_at is not None and self.time_left_s() <= 0:
            with contextlib.suppress(GracepointError):  # the watchdog ends the process then
                self._group.cancel(waits_at, "the time was over")
        if epoch.doubt or epoch.ended or epoch.stages.has("written"):
            return
        if epoch.plan is not None and epoch.plan.steps_lost > 0:
            return  # that there is too little time is known and reported, and an older step is committed
        doubt = self._budget.doubt(drained=epoch.stages.has("drained"))
        if doubt:
            log.error("%s; tried all the same", doubt)
            epoch.has_doubt(doubt)

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        """As ``multihost.Observer``."""
        return self._budget.start_in_s(remaining_s)

    def time_left_s(self) -> float:
        """As ``multihost.Observer``."""
        return self._budget.time_left_s()
