"""What a session does about preemptions, from the notice to the exit of the process.

``Coordinator`` owns all threads that a preemption needs, except those of the checkpoint engine: the receivers', the
agreement's, the watchdog's, the stall watch's, the substitute's. Each module says what its own threads do, and what
state they own. All methods belong to the training thread; ``end`` ends the threads.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from gracepoint import deadline
from gracepoint.errors import AgreementError, Preempted
from gracepoint.multihost import Agreement, Meeting, raise_jax_notice
from gracepoint.multihost.agreement import Handed
from gracepoint.multihost.distributed import lost_process, need_nobody, suspect_loss, watch_lost
from gracepoint.multihost.membership import PodNames
from gracepoint.multihost.stalls import StallBoard
from gracepoint.preemption.emergency_save import EmergencySave
from gracepoint.preemption.exit import ENDS_WITHIN_S, ProcessExit
from gracepoint.preemption.forecast import Figures, Forecaster, TimeBudget
from gracepoint.preemption.observer import LifeBound, NoticePublisher, PreemptionObserver
from gracepoint.preemption.outcome import Outcome, Shared
from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.stall_detector import Activities
from gracepoint.preemption.stall_watch import StallReports, StragglerSearch
from gracepoint.preemption.substitute import Substitute
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.receivers import Hints, Mailbox, Receiver
from gracepoint.receivers.operator import ReceiverSet
from gracepoint.settings import Settings

if TYPE_CHECKING:
    from gracepoint.checkpoint.engine import StepCheckpointer

logger = logging.getLogger(__name__)

_FLUSH_S = 3.0
#: How long after the end of a training loop the notice of what ended it may come.
_NOTICE_LAGS_S = 0.5
#: How the text of an error of JAX's runtime begins.
_STATUS = re.compile(
    r"(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DATA_LOSS|DEADLINE_EXCEEDED|FAILED_PRECONDITION): "
)
#: An error of the devices may be here so long before the news of the death that caused it.
_LOST_WITHIN_S = 1.0
#: The exit code of Python after an exception that nobody caught.
_UNCAUGHT_CODE = 1
#: A save in the background of which nothing was written for so many seconds waits for a process that may be dead.
_RESTS_S = 10.0


@dataclasses.dataclass(frozen=True)
class ActiveNotice:
    """A preemption that this process has been notified of.

    Attributes:
        cause: Why, such as ``SpotTermination``.
        signal: What was seen, such as ``taint``.
        deadline_s: Seconds that are left until the process must have exited.
    """

    cause: str
    signal: str
    deadline_s: float


class Coordinator:
    """Owns what a session does about preemptions. Starts to listen for notices when it is made.

    Args:
        settings: This process's settings.
        meeting: The processes that train together.
        checkpointer: The checkpoint engine.
        handed: What training handed to its last sync point.
        clock: Returns monotonic seconds.
        time_spent: What the time of this process goes into.
        receiver: Brings notices from one more source. None if there is none.

    Attributes:
        step: The step that training has reached. The session sets it; all threads read it.
        arrive: Passes the next sync point, as ``Agreement.arrive``. It is that method itself: a quiet sync point costs
            one call.
        look: To be called before that, as ``ReceiverSet.look``.
        reporter: Sends reports. The session reports what is not about a preemption.
        activities: What the process does, for the stall watch. The session names the stages.
        forecaster: Predicts what an emergency save would take now. The session says what it has measured.
        hints: The hints that receivers bring. The session prepares for a save when one is due.
    """

    def __init__(
        self,
        settings: Settings,
        meeting: Meeting,
        checkpointer: StepCheckpointer,
        handed: Handed,
        *,
        clock: Callable[[], float],
        time_spent: TimeSpent,
        receiver: Receiver | None = None,
    ) -> None:
        gang, store, pods = meeting.gang, meeting.store, PodNames(meeting.members)
        me, count = gang.process_index, gang.process_count
        self.step = 0
        self._checkpointer = checkpointer
        self._not_joined_exit_code = settings.not_joined_exit_code
        self._unsaved_exit_code = settings.unsaved_exit_code
        self._clock = clock
        self._saved: object = (None, None)  # what ``_has_stalled``, which one thread calls, has seen of saves
        self._saved_at_s = 0.0
        self._handed = handed
        self._alone = count == 1
        self._caught = False  # whether this process got such a signal; the mailbox knows a little later

        # What brings notices, and what is predicted from measurements.
        mailbox = Mailbox(clock)
        self._mailbox = mailbox
        self.hints = Hints(clock)
        self._receivers = ReceiverSet(settings, mailbox, self.hints, clock, receiver)
        self.look = self._receivers.look
        self.forecaster = Forecaster(count, checkpointer.throughput, settings.margin, clock, self._send_s)
        self._budget = TimeBudget(mailbox, settings, self.forecaster.figures, clock)

        # What reports and ends the process.
        session = secrets.token_hex(8)
        sender, stalled_s = self._receivers.sender, self.forecaster.stalled_s
        self.reporter = Reporter(sender, settings, session, gang, mailbox, time_spent, stalled_s)
        self._exit = ProcessExit(store, meeting.me.service_id, count, clock=clock)
        self._exit.start()
        shared = Shared(gang, settings, clock, mailbox, self._budget, self.reporter, self._exit)
        substitute = None if self._alone else Substitute(store, me, count, pods, self._budget)
        self._outcome = Outcome(
            shared,
            committed_step=lambda: checkpointer.committed_step,
            current_step=self._current_step,
            substitute=substitute,
        )

        # The agreement: from here on, notices of other processes come in.
        # Without this library a SIGTERM raises JAX's own notice at once, so it does that here, too. All other notices
        # raise it when the freeze begins.
        notify_jax = functools.partial(raise_jax_notice, meeting.client)
        life = LifeBound(mailbox, clock, self._budget.reserve_s + ENDS_WITHIN_S, self._bound_life, suspect_loss)
        observer = PreemptionObserver(shared, self._outcome, notify_jax, self._position, life)
        self._agreement = Agreement(store, gang, observer, pods, handed)
        self.arrive = self._agreement.arrive
        self._emergency_save = EmergencySave(shared, checkpointer, self._outcome, self._agreement, self.forecaster)

        # What looks whether this process makes progress.
        executor = checkpointer.executor
        self.activities = Activities(
            self._place,
            saving=lambda: executor.progress,
            written=lambda: executor.written_bytes,
            waits=lambda: checkpointer.access.waits,
        )
        board = StallBoard(store, gang, meeting.host, pods)
        if substitute is not None:
            self._outcome.stragglers = StragglerSearch(board, self.activities, substitute)
        reports = StallReports(settings, self.reporter, self._exit, board, self._current_step)
        self._stall_watch = reports.watch(executor, me, self.activities, clock)

        # Last, what this process itself is notified of: all that it may set off is there.
        publisher = NoticePublisher(mailbox, self._agreement, me, clock, settings.node_name, life)
        mailbox.listen(publisher.posted, publisher.retracted)
        memory = checkpointer.memory
        place = None if memory is None else memory.servers.take
        try:
            self._receivers.listen(
                session, gang, notify_jax, self._on_caught, time_spent.spent, self.forecaster.stalled_s, place
            )
        except BaseException:
            self.end(well=True)  # else a SIGTERM would go into a mailbox that nobody reads
            raise
        self._asked_at = self.sync_point
        watch_lost(self._goes_on, self._has_stalled)

    # What other threads ask.

    def _current_step(self) -> int:
        return self.step

    def _send_s(self) -> float | None:
        """Predicts how long this process sends its part to snapshot servers. None: there are none."""
        memory = self._checkpointer.memory
        evacuation = None if memory is None else memory.evacuation(())
        return None if evacuation is None else evacuation.send_s

    def _goes_on(self) -> bool:
        """Returns whether a sync point was passed since the last call, or a preemption ends this process."""
        before, self._asked_at = self._asked_at, self.sync_point
        return self._asked_at != before or self._exit.decided or self._exit.watches

    def _has_stalled(self) -> bool:
        """Returns whether a step takes far longer than usual, and nothing was written of the saves beside it lately."""
        memory, progress = self._checkpointer.memory, self._checkpointer.executor.progress
        written = None if progress is None else (progress.stage, progress.done_bytes)
        saved = (written, None if memory is None else memory.sent_bytes)
        if saved != self._saved:
            self._saved, self._saved_at_s = saved, self._clock()
        rests = saved == (None, None) or self._clock() - self._saved_at_s >= _RESTS_S
        return rests and self.forecaster.stalled_s() is not None

    def _bound_life(self, left_s: Callable[[], float]) -> None:
        self._exit.bound(left_s, self._unsaved_exit_code, on_overdue=self._unheard)

    def _unheard(self) -> None:
        """In the watchdog's thread: the deadline of a notice is over, and no epoch was opened for it."""
        logger.error("the deadline of a notice is over, and process 0, through which all agree, does not answer")
        self._outcome.unheard()

    def _position(self) -> tuple[int, bool]:
        checkpointer = self._checkpointer
        return self.step, checkpointer.memory is not None or deadline.must_choose(checkpointer.newest_snapshot)

    def _place(self) -> tuple[int, int, bool]:
        return self._agreement.sync_point, self.step, self._agreement.in_epoch

    def _on_caught(self) -> None:
        self._caught = True
        self._handed.hold()

    # What is in progress.

    @property
    def notice(self) -> ActiveNotice | None:
        """The most urgent notice that this process knows of. None if there is none, or only drills."""
        disruption = self._mailbox.current
        if disruption is None:
            return None
        return ActiveNotice(disruption.cause, disruption.signal, max(0.0, self._mailbox.remaining_s()))

    @property
    def noticed(self) -> bool:
        """True while a notice or an epoch is open, in all processes."""
        return self._agreement.noticed

    @property
    def in_epoch(self) -> bool:
        """True from the freeze on, until training continues."""
        return self._agreement.in_epoch

    @property
    def sync_point(self) -> int:
        """Number of the latest sync point, from 1. 0 before the first."""
        return self._agreement.sync_point

    @property
    def is_pressing(self) -> bool:
        """True if the end is near: after a SIGTERM or SIGHUP, and from the freeze on. A notice may be hours early."""
        return self._agreement.in_epoch or self.is_signalled

    @property
    def is_signalled(self) -> bool:
        """True after a SIGTERM or SIGHUP to a process of the job: what training loops depend on may have ended."""
        return self._caught or self._mailbox.is_signalled

    def time_left_s(self) -> float:
        """Returns the seconds that are left for work, as ``TimeBudget``."""
        return self._budget.time_left_s()

    def time_to_spare_s(self) -> float:
        """Returns the seconds that are left next to what the save is predicted to take; of little time, a half."""
        left_s, figures = max(0.0, self._budget.time_left_s()), self.forecaster.figures()
        needed_s = left_s if figures is None else self.forecaster.margin * figures.save_s
        return max(left_s - needed_s, left_s / 2)

    def doubt(self) -> str:
        """Returns why there is probably no time to save the current step. Empty if nothing says so."""
        return self._budget.doubt(drained=False)

    # At the agreed sync point.

    @property
    def point(self) -> int | None:
        """The agreed sync point, as ``Agreement.point``."""
        return self._agreement.point

    def save(self, state: Any, host_state: Callable[[], Mapping[str, Any]]) -> Preempted | None:
        """Saves what there is time for and ends the epoch. Returns what to raise; None after a drill."""
        with self.activities.at("emergency save", saves=True):
            return self._ended(self._emergency_save.save(self.step, state, host_state, self._agreement.stopped))

    def is_of_devices(self, error: BaseException) -> bool:
        """Returns True if the devices, or the runtime, have failed with this error."""
        import jax

        # Collectives on CPUs fail with a ValueError that has the status of a remote call.
        return isinstance(error, jax.errors.JaxRuntimeError) or _STATUS.match(str(error)) is not None

    def is_of_peers(self, error: BaseException | None) -> bool:
        """Returns True if an error of the devices may be the death of another process, so that nothing can be saved."""
        return not self._alone and error is not None and self.is_of_devices(error)

    def pass_on(self) -> None:
        """As ``Agreement.pass_on``."""
        self._agreement.pass_on()

    def stop(self, reason: str) -> bool:
        """To be called when training breaks off: has all processes save what they handed where this one is now.

        Returns:
            True if they do; then call ``save``. False if there is no preemption, or the save has begun already.

        Raises:
            GracepointError: The processes cannot save that.
        """
        # What ended the loop, such as the end of a worker process, may be here before the notice of the same signal.
        if not self._agreement.wait_noticed(_NOTICE_LAGS_S) or self._mailbox.current is None:
            return False
        if self._agreement.in_epoch and self._outcome.epoch.drill:
            return False
        self._agreement.stop(reason)
        return True

    def meet(self) -> None:
        """Waits for the other processes, before the training loop saves by its own means.

        Raises:
            AgreementError: Two processes are at different steps.
            BarrierError: A process did not come in time, or broke off.
        """
        self._emergency_save.meet(self.step)

    def saved(self) -> Preempted | None:
        """Ends an epoch in which the training loop has saved. Returns what to raise; None after a drill."""
        return self._ended(self._emergency_save.saved(self.step))

    def not_saved(self, error: Exception, steps_lost: int | None) -> Preempted | None:
        """Ends an epoch, or a preemption before its epoch, without a save.

        Args:
            error: Why nothing was saved.
            steps_lost: Steps since the last committed one. None if that is not known.

        Returns:
            What to raise. None after a drill.
        """
        outcome = self._outcome.failed(self.step, error, steps_lost)
        if outcome is not None:
            self._agreement.tell_gone(str(error))
        return self._ended(outcome)

    def peer_lost(self) -> bool:
        """To be called when a step fails on the devices, as it does when a peer is killed.

        Returns:
            True if a preemption is the cause. The caller then ends the preemption by ``not_saved``. The processes may
            not have agreed on a sync point yet.
        """
        if self._mailbox.current is None:
            return False
        if not self._agreement.in_epoch or self._outcome.epoch.drill:
            self._outcome.begin(-1, drill=False)
        return True

    def _ended(self, outcome: Preempted | None) -> Preempted | None:
        if outcome is None:
            self._agreement.end_epoch()
        return outcome

    def report_forecast(self, figures: Figures, saved_step: int | None) -> None:
        """Reports what an emergency save would take now, and the newest step that is committed, if one is known."""
        self.reporter.forecast(figures, self.forecaster.margin, self.step, saved_step)

    # The end of the session.

    def finish(self) -> bool:
        """Passes the last sync point: training has finished.

        Returns:
            True if another process broke off, and what was handed at the agreed sync point is to be saved.
        """
        try:
            over = self._agreement.finish()
        except AgreementError as error:
            # A process is gone in the middle of a preemption. This one has nothing left to save.
            logger.warning("training finished during a preemption without agreement error=%s", error)
            over = True
        if over:
            self._outcome.finished()
        return not over and self._agreement.is_beyond

    def abandon(self, reason: str, not_saved: Exception | None = None, steps_lost: int | None = None) -> None:
        """Notifies the other processes that this one breaks off training.

        Args:
            reason: Why.
            not_saved: Why the training loop did not save the step that it was asked to save. None if it was not asked
                to.
            steps_lost: Steps since the last committed one, for the report of ``not_saved``. None if that is not known.
        """
        if not_saved is not None:
            self._outcome.failed(self.step, not_saved, steps_lost)
        self._agreement.abandon(reason)

    def end(self, *, well: bool) -> bool:
        """Ends the threads.

        Args:
            well: True if training has finished.

        Returns:
            False if the watchdog stays until the process has exited: the process exits for a preemption, or it
            breaks off while others may hold up JAX's shutdown.
        """
        watch_lost(None)
        if well:  # by the other code its pod alone would be made anew, and wait for processes that have succeeded
            need_nobody()
        if self._stall_watch is not None:
            self._stall_watch.stop()
        self._agreement.close()
        self._receivers.stop_listening()
        # Read only now, after the agreement's reading thread has ended: that thread may have decided the exit code.
        exits = self._exit.decided
        if not exits:
            self._exit.cancel()
        self._outcome.close(_FLUSH_S)  # before the receivers' end, which drops the reports that were not sent
        self._receivers.close()
        all_done = well or (self._alone and not exits)
        if all_done:
            self._exit.stop()
        return all_done

    def exit_process(self, error: BaseException | None) -> None:
        """Ends the process after a preemption, or for the death of another one; returns otherwise.

        Called at the interpreter's exit, after ``end``.

        Args:
            error: The exception that nobody caught, for which the process exits. Then it has a few seconds to do so.
        """
        self._receivers.call_handlers()
        if self.is_of_peers(error) and not self._exit.decided and (lost := lost_process(_LOST_WITHIN_S)):
            code = self._not_joined_exit_code
            logger.error("%s, and this process cannot go on without it: it has not failed itself code=%d", lost, code)
            self._exit.decide(code)
        self._exit.leave()
        if error is not None:
            self._exit.hurry(_UNCAUGHT_CODE)
