"""How a preemption, or a drill, ends in this process if the agreed step is not saved; and who decides the exit code.

Three threads call this, each in its own section. The agreement's reading thread opens epochs (``begin``) and reports
that one is broken (``fail``). The training thread reports that a step was not saved (``failed``). The watchdog calls
``overdue`` if neither comes to an end in time. They share the mailbox, the time budget and ``epoch``, which is
replaced when the next epoch opens. The first reported outcome wins.

A background save that was in progress continues meanwhile. If the current step is not saved in the end, and that save
was committed after the freeze began, all processes exit with its step (``_committed_instead``). A separate thread asks
the other processes about that; it ends with their answer, or with the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence

from gracepoint.errors import Preempted
from gracepoint.preemption.exit import ProcessExit
from gracepoint.preemption.forecast import TimeBudget
from gracepoint.preemption.reporter import EpochProgress, Reporter, Stages
from gracepoint.preemption.stall_watch import StragglerSearch
from gracepoint.preemption.substitute import Substitute
from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.settings import Settings
from gracepoint.threads import ask_in_thread
from gracepoint.wire.messages import Phase

logger = logging.getLogger(__name__)

_FLUSH_S = 3.0
#: How long the other processes have to say with which step they exit; the watchdog has a second for all of its work.
_ASK_S = 0.3
FINISHED = "training finished"


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the parts of a preemption share in one process.

    Attributes:
        gang: The processes that train together.
        settings: This process's settings.
        clock: Returns monotonic seconds; the mailbox's clock.
        mailbox: The notices, with their deadlines.
        budget: How much time is left.
        reporter: Sends the reports.
        process_exit: Ends the process once the exit code is decided, or the time is over.
    """

    gang: ProcessGroup
    settings: Settings
    clock: Callable[[], float]
    mailbox: Mailbox
    budget: TimeBudget
    reporter: Reporter
    process_exit: ProcessExit


class Outcome:
    """How a preemption, or a drill, ends in this process if the agreed step is not saved.

    Args:
        shared: What the parts of a preemption share.
        committed_step: Returns the newest step that this process knows to be committed. None if there is none.
        current_step: Returns the step that training has reached.
        substitute: Has the end reported if process 0 does not run. None: there are no other processes.

    Attributes:
        epoch: What is known about the open epoch, or about the last one.
        stragglers: Finds out which process holds up the others when the time is over. None: that is not asked.
    """

    def __init__(
        self,
        shared: Shared,
        *,
        committed_step: Callable[[], int | None],
        current_step: Callable[[], int],
        substitute: Substitute | None = None,
    ) -> None:
        self._gang = shared.gang
        self._settings = shared.settings
        self._mailbox = shared.mailbox
        self._budget = shared.budget
        self._reporter = shared.reporter
        self._exit = shared.process_exit
        self._clock = shared.clock
        self._committed_step = committed_step
        self._current_step = current_step
        self._substitute = substitute
        self.stragglers: StragglerSearch | None = None
        self.begin(-1, drill=False)

    # The agreement's reading thread; the training thread, if a peer is gone before any epoch was opened.

    def begin(self, number: int, *, drill: bool) -> None:
        """Opens an epoch. Its number is -1 if the preemption ends before the processes could agree."""
        first_s = self._mailbox.first_at_s if number >= 0 else None
        stages = Stages(self._clock() if first_s is None else first_s, self._clock)
        self.epoch = EpochProgress(number, drill, stages, self._mailbox, self._reporter, self._substitute)
        self._committed_before = self._committed_step()

    def begun(self) -> None:
        """Has process 0 answer the others from now on. To be called when the time budget has begun, too."""
        if self._substitute is not None:
            self._substitute.opened(self.epoch.number)

    # The training thread.

    def failed(self, step: int, error: Exception, steps_lost: int | None = None) -> Preempted | None:
        """Reports that this step was not saved.

        Args:
            step: The step that was to be saved.
            error: Why it was not.
            steps_lost: Steps since the last committed one. None if the caller does not know.

        Returns:
            What to raise. None after a drill.
        """
        reason = self.epoch.with_doubt(f"not saved at step {step}: {error}")
        instead = self._committed_instead()
        if instead is not None:
            reason = self._exit_with_older_step(instead, step, reason)
        else:
            self.fail(reason, error, step=step, steps_lost=steps_lost)
        if self.epoch.drill:
            return None
        left_s = self._budget.time_left_s() + self._budget.reserve_s
        self._flush(min(_FLUSH_S, max(0.0, left_s)))
        if instead is None:
            preempted = Preempted(self._settings.unsaved_exit_code, saved=False, step=step, reason=reason)
        else:
            code, lost = self._settings.saved_exit_code, step - instead
            preempted = Preempted(code, saved=True, step=instead, reason=reason, steps_lost=lost)
        preempted.__cause__ = error
        return preempted

    def finished(self) -> None:
        """Reports that training had ended before the agreed sync point: there is nothing to save."""
        self._exit.cancel()
        self.epoch.nothing_to_save()
        progress = dataclasses.replace(self.epoch.progress, message=FINISHED)
        about: Sequence[Disruption | None] = self._mailbox.named() or [self._mailbox.current]
        for disruption in about:
            self._reporter.report(Phase.RETRACTED, progress, disruption)

    def exit_with(self, code: int) -> None:
        """Decides the exit code of the process. Does nothing in a drill."""
        if not self.epoch.drill:
            self._exit.decide(code)

    def close(self, timeout_s: float) -> None:
        """Waits until the operator has all reports, for ``timeout_s`` at most, and ends the substitute's threads."""
        self._flush(timeout_s)
        if self._substitute is not None:
            self._substitute.close()

    # The watchdog.

    def overdue(self) -> None:
        """Reports that the time is over while the training thread is stuck, and which process holds it up."""
        # Half of the reserve is for this question, and half for the report: a near deadline leaves little time.
        most_s = self._budget.reserve_s / 2
        if self._substitute is not None:
            self._substitute.ask(self.epoch.number)
        answer = None if self.stragglers is None else self.stragglers.ask(self.epoch.number, most_s)
        last_stage = self.epoch.stages.last or "noticed"
        step, reason = self._current_step(), f"not saved: the time was over; the last stage reached was {last_stage}"
        instead = self._committed_instead()
        if answer is not None and (held_up := answer()):
            reason = f"{reason}; {held_up}"
        if instead is not None:
            self._exit_with_older_step(instead, step, self.epoch.with_doubt(reason))
        else:
            self.fail(self.epoch.with_doubt(reason), step=step)
        self._flush(most_s)

    def unheard(self) -> None:
        """The same if no epoch was opened, as process 0, through which all agree and which reports, does not answer."""
        self.begin(-1, drill=False)
        self.epoch.alone = self._substitute is not None and self._substitute.asks
        self.overdue()

    def _flush(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        if self._substitute is not None:
            self._substitute.wait(timeout_s)
        self._reporter.flush(max(0.0, until_s - time.monotonic()))

    # Any of these threads.

    def fail(self, reason: str, error: Exception | None = None, **details: int | None) -> None:
        """Reports a failure at once and decides the exit code, unless an outcome was reported before.

        Args:
            reason: What happened.
            error: The exception, for the log. None if there is none.
            **details: Fields of ``Progress``.
        """
        if not self.epoch.fail_first():
            return
        committed = self._committed_step()
        if details.get("steps_lost") is None and committed is not None:
            details["steps_lost"] = self._current_step() - committed
        logger.error("preempted saved=False drill=%s reason=%s", self.epoch.drill, reason, exc_info=error)
        self.exit_with(self._settings.unsaved_exit_code)
        self.epoch.report(Phase.FAILED, message=f"drill: {reason}" if self.epoch.drill else reason, **details)

    def _committed_instead(self) -> int | None:
        """Returns the step that a background save has committed since the freeze began. None if there is none.

        All processes get the same answer: what the first process that asks knows.
        """
        committed = self._committed_step()
        answer = "" if committed is None or committed == self._committed_before else str(committed)
        key = f"epoch/{self.epoch.number}/instead"
        # In a separate thread: a coordination service that is stopped neither answers nor fails, and little time is
        # left. If nobody can be asked, this process's knowledge counts.
        with contextlib.suppress(Exception):
            answer = ask_in_thread(functools.partial(self._gang.decide, key, answer), "gracepoint-asks", _ASK_S)
        return int(answer) if answer else None

    def _exit_with_older_step(self, instead: int, step: int, reason: str) -> str:
        """Ends the epoch with a committed step that is older than the one that was to be saved; returns the reason."""
        lost = step - instead
        reason = f"step {instead} is committed, {lost} steps before step {step}, which was {reason}"
        if self.epoch.drill:
            reason = f"drill: {reason}"
        if self.epoch.fail_first():
            logger.error("preempted saved=True drill=%s reason=%s", self.epoch.drill, reason)
            self.exit_with(self._settings.saved_exit_code)
            self.epoch.report(Phase.PROMOTED, step=instead, steps_lost=lost, message=reason)
        return reason
