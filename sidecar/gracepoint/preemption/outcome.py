"""How a preemption, or a drill, ends in this process if the agreed step is not saved; and who decides the exit code.

Three threads call this, each in its own section. The agreement's reading thread opens epochs (``begin``) and reports
that one is broken (``fail``). The training thread reports that a step was not saved (``failed``). The watchdog calls
``overdue`` if neither comes to an end in time. They share the mailbox, the time budget and ``epoch``, which is
replaced when the next epoch opens. The first reported outcome wins.

A background save that was under way goes on meanwhile. If the current step is not saved in the end, and that save was
committed after the freeze began, all processes exit with its step (``_committed_instead``). A separate thread asks the
other processes about that; it ends with their answer, or with the process.

How much time is left until the deadline of a preemption, and whether it is enough.

The deadline is the time at which the pod is killed. A **reserve** before it is kept for exiting with the right code. So
every wait is bounded by ``time_left_s``, which is zero two reserves before the deadline: one reserve for the report of
a failure, one for the exit. If the deadline is very near or has passed, the save is tried all the same, for
``_LEAST_S``: operators round, and clouds are late.

The freeze begins as late as possible: when the time that is left is what drain and save are predicted to take in the
worst case, times the margin; but no later than the head start before the deadline. As long as there are no predictions,
the freeze begins at once.

Any thread may call the methods, but ``begin`` and ``end``, which belong to the agreement's reading thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence

from gracepoint.deadline import Deadline
from gracepoint.errors import GracepointError, Preempted
from gracepoint.preemption.exit import ProcessExit
from gracepoint.preemption.forecast import Figures
from gracepoint.preemption.reporter import EpochProgress, Reporter, Stages
from gracepoint.preemption.stall_watch import StragglerSearch
from gracepoint.preemption.substitute import Substitute
from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.settings import Settings
from gracepoint.wire.messages import Phase

_LEAST_S = 3.0
_RESERVE_S = 1.0
_RESERVE_PART = 0.1


class TimeBudget:
    """See the module.

    Args:
        mailbox: The notices, with their deadlines.
        settings: ``margin`` and ``head_start_s``.
        figures: Returns what an emergency save would take now. None while that is not known.
        clock: Returns monotonic seconds; the mailbox's clock.

    Attributes:
        reserve_s: Seconds before the deadline that are kept for the report of a failure, and again for the exit.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        settings: Settings,
        figures: Callable[[], Figures | None],
        clock: Callable[[], float],
    ) -> None:
        self._mailbox = mailbox
        self._settings = settings
        self._figures = figures
        self._clock = clock
        self._floor_s = math.inf  # training may be held before ``begin`` was called
        self.reserve_s = _RESERVE_S

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        """Returns the seconds until the freeze must begin. 0 or less means now.

        Args:
            remaining_s: Seconds until the deadline of a notice that is not in the mailbox yet. Infinite if there is
                none.
        """
        figures = self._figures()
        if figures is None:
            return 0.0
        needed_s = self._settings.margin * figures.needed_at_worst_s + 2 * _RESERVE_S
        return min(remaining_s, self._mailbox.remaining_s()) - max(self._settings.head_start_s, needed_s)

    def begin(self) -> None:
        """Notes that an epoch opens."""
        self._floor_s = self._clock() + _LEAST_S
        self.reserve_s = min(_RESERVE_S, _RESERVE_PART * self.until_deadline_s())

    def end(self) -> None:
        """Notes that the epoch has ended and training goes on."""
        self._floor_s = math.inf

    def until_deadline_s(self) -> float:
        """Returns the seconds until the process must have exited."""
        return max(self._mailbox.remaining_s(), self._floor_s - self._clock())

    def time_left_s(self) -> float:
        """Returns the seconds that are left for work, without the two reserves. Negative when they are in use."""
        return self.until_deadline_s() - 2 * self.reserve_s

    def deadline(self) -> Deadline:
        """Returns the point in time after which work must stop. It moves to an earlier time with the notices."""
        return Deadline.following(self.time_left_s, self._clock)

    def doubt(self, *, drained: bool) -> str:
        """Returns why the save will probably not be done in time. Empty if nothing says so.

        Args:
            drained: True if the devices are done with the steps in flight, so that only the save is left.
        """
        figures = self._figures()
        left_s = self.until_deadline_s() - self.reserve_s
        if figures is None:
            return ""
        needed_s = figures.save_s if drained else figures.needed_s
        if needed_s <= left_s:
            return ""
        what = "the save is" if drained else f"a step takes {figures.step_s:.1f} s, drain and save are"
        return (
            f"the deadline cannot be met by what is known: {what} predicted to take {needed_s:.1f} s, and "
            f"{max(left_s, 0.0):.1f} s are left"
        )


logger = logging.getLogger(__name__)

_FLUSH_S = 3.0
#: How long the other processes have to say with which step they exit; the watchdog has a second for all of its work.
_ASK_S = 0.3
FINISHED = "training finished"


class Outcome:
    """See the module.

    Args:
        group: The processes that train together.
        settings: The exit codes.
        mailbox: The notices, with their deadlines.
        budget: How much time is left.
        reporter: Sends the reports.
        process_exit: Ends the process once the exit code is decided.
        committed_step: Returns the newest step that this process knows to be committed. None if there is none.
        current_step: Returns the step that training has reached.
        clock: Returns monotonic seconds; the mailbox's clock.
        stragglers: Finds out which process holds up the others when the time is over. None: that is not asked.
        substitute: Has the end reported if process 0 does not run. None: there are no other processes.

    Attributes:
        epoch: What is known about the open epoch, or about the last one.
    """

    def __init__(
        self,
        group: ProcessGroup,
        settings: Settings,
        mailbox: Mailbox,
        budget: TimeBudget,
        reporter: Reporter,
        process_exit: ProcessExit,
        *,
        committed_step: Callable[[], int | None],
        current_step: Callable[[], int],
        clock: Callable[[], float],
        stragglers: StragglerSearch | None = None,
        substitute: Substitute | None = None,
    ) -> None:
        self._group = group
        self._settings = settings
        self._mailbox = mailbox
        self._budget = budget
        self._reporter = reporter
        self._exit = process_exit
        self._committed_step = committed_step
        self._current_step = current_step
        self._clock = clock
        self._stragglers = stragglers
        self._substitute = substitute
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
        self.epoch.told()
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
        answer = None if self._stragglers is None else self._stragglers.ask(self.epoch.number, most_s)
        last = self.epoch.stages.last or "noticed"
        step, reason = self._current_step(), f"not saved: the time was over; the last stage reached was {last}"
        instead = self._committed_instead()
        if answer is not None and (held_up := answer()):
            reason = f"{reason}; {held_up}"
        if instead is not None:
            self._exit_with_older_step(instead, step, self.epoch.with_doubt(reason))
        else:
            self.fail(self.epoch.with_doubt(reason), step=step)
        self._flush(most_s)

    def _flush(self, timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        if self._substitute is not None:
            self._substitute.wait(timeout_s)
        self._reporter.flush(max(0.0, until_s - time.monotonic()))

    # Any of these threads.

    def fail(self, reason: str, error: Exception | None = None, **known: int | None) -> None:
        """Reports a failure at once and decides the exit code, unless an outcome was reported before.

        Args:
            reason: What happened.
            error: The exception, for the log. None if there is none.
            **known: Fields of ``Progress``.
        """
        if not self.epoch.fail_first():
            return
        committed = self._committed_step()
        if known.get("steps_lost") is None and committed is not None:
            known["steps_lost"] = self._current_step() - committed
        logger.error("preempted saved=False drill=%s reason=%s", self.epoch.drill, reason, exc_info=error)
        self.exit_with(self._settings.unsaved_exit_code)
        self.epoch.report(Phase.FAILED, message=f"drill: {reason}" if self.epoch.drill else reason, **known)

    def _committed_instead(self) -> int | None:
        """Returns the step that a background save has committed since the freeze began. None if there is none.

        All processes get the same answer: what the first process that asks knows.
        """
        known = self._committed_step()
        found = "" if known is None or known == self._committed_before else str(known)
        key = f"epoch/{self.epoch.number}/instead"
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(self._group.decide(key, found))
            except GracepointError:
                answers.put(found)

        # In a thread of its own: a coordination service that is stopped neither answers nor fails, and little time is
        # left.
        with contextlib.suppress(RuntimeError, queue.Empty):  # nobody can be asked: this process's knowledge counts
            threading.Thread(target=ask, name="gracepoint-asks", daemon=True).start()
            found = answers.get(timeout=_ASK_S)
        return int(found) if found else None

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
