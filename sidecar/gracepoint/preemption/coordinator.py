"""What stands by for a preemption while a session trains, wired together: who hears of it, agrees, saves and leaves.

Owns all threads but the checkpoint engine's; each module says what its own do. Made and ended by the training thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from gracepoint.multihost import Agreement, Meeting, raise_jax_notice
from gracepoint.preemption.emergency import Emergency
from gracepoint.preemption.emergency_save import EmergencySave
from gracepoint.preemption.forecast import Forecaster
from gracepoint.preemption.notice_relay import NoticeRelay
from gracepoint.preemption.process_exit import ProcessExit
from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.time_budget import TimeBudget
from gracepoint.receivers import Hints, Mailbox
from gracepoint.receivers.receiver_set import ReceiverSet
from gracepoint.settings import Settings

_FLUSH_S = 3.0


class Coordinator:
    """See the module.

    Args:
        settings: Of this process.
        meeting: The processes.
        nonce: The session's.
        forecaster: What an emergency would take now.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        settings: Settings,
        meeting: Meeting,
        nonce: str,
        forecaster: Forecaster,
        clock: Callable[[], float],
    ) -> None:
        gang = meeting.gang
        self._alone = gang.process_count == 1
        self.mailbox = Mailbox(clock)
        self.hints = Hints(clock)
        self._receivers = ReceiverSet(settings, self.mailbox, self.hints, clock)
        self.reporter = Reporter(self._receivers.sender, settings, nonce, gang, self.mailbox)
        notices = NoticeRelay(self.mailbox, gang.process_index, clock)
        self.outlook = TimeBudget(self.mailbox, settings, forecaster.figures, clock)
        self.emergency = Emergency(gang, settings, self.mailbox, notices, self.outlook, self.reporter, clock)
        self.leaving = ProcessExit(
            meeting.store,
            meeting.me.service_id,
            gang.process_count,
            clock=clock,
            on_overdue=self.emergency.overdue,
        )
        self.leaving.start()
        self.emergency.leave_by(self.leaving)
        self.agreement = Agreement(meeting.store, gang, self.emergency)
        self.saving = EmergencySave(
            gang, settings, self.mailbox, self.reporter, self.emergency, self.agreement, forecaster
        )
        notices.connect(self.agreement)
        # A SIGTERM would have raised JAX's notice without us, at once; any other notice does when it is time.
        tell_jax = functools.partial(raise_jax_notice, meeting.client)
        self.emergency.call_when_it_freezes(tell_jax)
        self._receivers.listen(nonce, gang, tell_jax)

    def end(self, *, well: bool) -> bool:
        """Ends the threads.

        Args:
            well: Training ended as it should.

        Returns:
            False if the process is still to be watched until its very end: it leaves for a preemption, or breaks
            off while others may hold up JAX's shutdown. Then the watchdog stays.
        """
        self.agreement.close()
        self._receivers.stop_listening()
        leaves = self.leaving.decided
        if not leaves:
            self.leaving.cancel()
        self.reporter.flush(_FLUSH_S)
        self._receivers.close()
        all_done = well or (self._alone and not leaves)
        if all_done:
            self.leaving.stop()
        return all_done
