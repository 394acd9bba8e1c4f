"""What a process does with notices and epochs that arrive: between its mailbox and the bell, and in the agreement.

The bell is the log of notices that all processes read in the same order. ``NoticePublisher`` writes on it what a
receiver posts or retracts, in the receiver's thread. ``NoticeReader`` keeps the mailbox in line with what the bell
says, in the agreement's reading thread, so all mailboxes agree. The name of a preemption means the same in all
processes. A notice without a name (SIGTERM, the cloud's metadata) is about one pod: on the bell its origin has the
process index in front, so that one pod's SIGTERM does not replace another's.

Process 0 has the bell. If it has died without a word, a publisher waits for it, perhaps for ever, and no epoch opens.
So before a publisher writes, it sets a bound to the life of this process, and passes on that a node is said to be lost
(``LifeBound``). The reader does so for what another process wrote first: process 0 may die between that and the epoch.

``PreemptionObserver`` runs in the agreement's two background threads. The reading thread calls ``heard``: it starts the
watchdog and reports Frozen, Agreed and Retracted. The timing thread asks when the freeze must begin (``start_in_s``),
and checks while an epoch is open whether the time will be enough (``looked``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import threading
from collections.abc import Callable

from gracepoint.errors import GracepointError
from gracepoint.multihost import Agreement
from gracepoint.multihost.ledger import (
    Broken,
    Closed,
    Epoch,
    Event,
    Moot,
    Noticed,
    NoticeEntry,
    Opened,
    Retracted,
    Settled,
)
from gracepoint.preemption.outcome import FINISHED, Outcome, Shared
from gracepoint.preemption.reporter import Progress
from gracepoint.receivers.mailbox import NODE_LOST, SAME_DEADLINE_S, Disruption, Mailbox
from gracepoint.wire.messages import Phase

logger = logging.getLogger(__name__)

#: Seconds that process 0 has to answer after a notice, if the process is to end before the deadline.
ENOUGH_S = 10.0
#: Seconds that a process has after a notice with less time than that: its deadline may be over, and process 0 slow.
LEAST_LIFE_S = 30.0


class LifeBound:
    """How long this process may live without an epoch, and whether a node is said to be lost. Thread-safe.

    Args:
        mailbox: This process's mailbox.
        clock: Returns monotonic seconds; the mailbox's clock.
        reserve_s: Seconds before the deadline of a notice that the end of the process takes.
        bound: Called with a function when there is a notice that is no drill. Has the process end when the function
            returns 0 or less and there is no epoch.
        suspect: Called with whether a node is said to be lost, when that changes.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        clock: Callable[[], float],
        reserve_s: float = 0.0,
        bound: Callable[[Callable[[], float]], None] = lambda left_s: None,
        suspect: Callable[[bool], None] = lambda suspects: None,
    ) -> None:
        self._mailbox = mailbox
        self._clock = clock
        self._reserve_s = reserve_s
        self._bound, self._suspect = bound, suspect
        self._lock = threading.Lock()  # of what follows; the watchdog takes it while it holds its own
        self._suspects = False
        self._ends_s: dict[str, tuple[float, float]] = {}  # by origin: a deadline, and what follows from it, by clock
        self._retracted: set[str] = set()  # origins; the others may not know it yet, but here they count no more

    def posted(self, origin: str) -> None:
        """To be called when a receiver of this process has posted a notice."""
        with self._lock:
            self._retracted.discard(origin)
        self.changed()

    def retracted(self, origin: str) -> None:
        """To be called when a receiver of this process has retracted a notice, which may still be in the mailbox."""
        with self._lock:
            self._retracted.add(origin)
        self.changed()

    def changed(self) -> None:
        """To be called when the mailbox has changed. Safe to repeat."""
        with self._lock:
            standing = self._judged()
            suspects = any(disruption.cause == NODE_LOST for disruption, _ in standing.values())
            if suspects is not self._suspects:
                self._suspects = suspects
                self._suspect(suspects)
        if standing:
            self._bound(self._left_s)

    def _left_s(self) -> float:
        with self._lock:
            self._judged()
            return min((end_s for _, end_s in self._ends_s.values()), default=math.inf) - self._clock()

    def _judged(self) -> dict[str, tuple[Disruption, float]]:
        """Returns the notices that count, after it is known when the process must end for each of them."""
        standing = self._mailbox.standing(self._retracted)
        self._ends_s = {
            origin: self._judge(deadline_s, self._ends_s.get(origin)) for origin, (_, deadline_s) in standing.items()
        }
        return standing

    def _judge(self, deadline_s: float, known: tuple[float, float] | None) -> tuple[float, float]:
        if known is not None and abs(known[0] - deadline_s) <= SAME_DEADLINE_S:
            return known
        now_s, end_s = self._clock(), deadline_s - self._reserve_s
        return deadline_s, end_s if end_s - now_s >= ENOUGH_S else now_s + LEAST_LIFE_S


class NoticePublisher:
    """Notifies the other processes of what a receiver of this process posts or retracts.

    Args:
        mailbox: This process's mailbox.
        agreement: Writes the notices on the bell.
        process_index: This process.
        clock: Returns monotonic seconds; the mailbox's clock.
        node: The node of this process. None: it is not known.
        life: Learns of a notice or a retraction before it is written. None: that is not needed.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        agreement: Agreement,
        process_index: int,
        clock: Callable[[], float],
        node: str | None = None,
        life: LifeBound | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._agreement = agreement
        self._nodes = () if node is None else (node,)
        self._own = f"{process_index}/"
        self._clock = clock
        self._life = life or LifeBound(mailbox, clock)

    def posted(self, disruption: Disruption) -> None:
        """Called when a notice has come, or its deadline has moved."""
        self._life.posted(disruption.origin)
        if not (disruption.preemption or disruption.nodes):  # the others would take it for one about their own nodes
            disruption = dataclasses.replace(disruption, nodes=self._nodes)
        try:
            self._agreement.tell(
                disruption.origin if disruption.preemption else self._own + disruption.origin,
                json.dumps({"disruption": disruption.to_json(), "at_s": self._clock()}),
                remaining_s=disruption.remaining_s,
                drill=disruption.drill,
                once=bool(disruption.preemption),
                revision=disruption.revision,
            )
        except GracepointError as error:
            logger.error("could not notify the other processes of the notice error=%s", error)

    def retracted(self, origin: str, reason: str) -> None:
        """Called when the signal of a notice went away."""
        self._life.retracted(origin)
        disruption = self._mailbox.find(origin)
        unnamed = disruption is not None and not disruption.preemption
        try:
            self._agreement.take_back(self._own + origin if unnamed else origin, reason)
        except GracepointError as error:
            logger.error("could not notify the other processes of the retraction error=%s", error)


class NoticeReader:
    """Keeps the mailbox in line with the bell.

    Args:
        mailbox: This process's mailbox.
        process_index: This process.
        clock: Returns monotonic seconds; the mailbox's clock.
        life: Learns what has changed in the mailbox. None: that is not needed.
    """

    def __init__(
        self, mailbox: Mailbox, process_index: int, clock: Callable[[], float], life: LifeBound | None = None
    ) -> None:
        self._mailbox = mailbox
        self._process_index = process_index
        self._own = f"{process_index}/"
        self._clock = clock
        self._life = life or LifeBound(mailbox, clock)

    def received(self, notice: NoticeEntry) -> Disruption:
        """Puts a notice of the bell into the mailbox: it replaces an earlier one of the same origin."""
        text = json.loads(notice.text)
        disruption = Disruption.from_json(text["disruption"])
        if notice.by == self._process_index:  # written here, so it is known how long ago that was
            remaining_s = disruption.remaining_s - (self._clock() - text["at_s"])
        else:  # it may have been written long after it came, as process 0 did not answer
            remaining_s = notice.remaining_s
        disruption = dataclasses.replace(disruption, remaining_s=remaining_s)
        self._mailbox.take(self._here(notice.origin), disruption)
        self._life.changed()
        return disruption

    def removed(self, origin: str) -> Disruption | None:
        """Removes a notice that is dealt with or was retracted, and returns it. None if it was not in the mailbox."""
        disruption = self._mailbox.drop(self._here(origin))
        self._life.changed()
        return disruption

    def _here(self, origin: str) -> str:
        return origin.removeprefix(self._own)


class PreemptionObserver:
    """Implements ``multihost.Observer``.

    Args:
        shared: What the parts of a preemption share.
        outcome: Holds the open epoch and reports how it ends.
        on_freeze: Called in process 0 when a freeze begins that is no drill.
        position: As ``multihost.Observer.position``.
        life: As ``NoticeReader``.
    """

    def __init__(
        self,
        shared: Shared,
        outcome: Outcome,
        on_freeze: Callable[[], None],
        position: Callable[[], tuple[int, bool]],
        life: LifeBound | None = None,
    ) -> None:
        self._gang = shared.gang
        self._settings = shared.settings
        self._budget = shared.budget
        self._reporter = shared.reporter
        self._exit = shared.process_exit
        self._notices = NoticeReader(shared.mailbox, shared.gang.process_index, shared.clock, life)
        self._outcome = outcome
        self._on_freeze = on_freeze
        self._position = position

    # The reading thread.

    def heard(self, event: Event) -> None:
        """As ``multihost.Observer``."""
        match event:
            case Noticed(notice):
                disruption = self._notices.received(notice)
                if notice.by != self._gang.process_index:
                    logger.warning("another process has a notice process=%d notice=%s", notice.by, disruption)
            case Retracted(notice, _, reason):
                self._retracted(notice, reason)
            case Moot(notices, by):
                for notice in notices:
                    self._retracted(notice, FINISHED, alone=by == self._gang.process_index)
            case Opened(epoch):
                self._opened(epoch)
            case Settled(epoch):
                progress = self._outcome.epoch
                if not progress.stages.has("agreed"):  # else it is decided again, as a process broke off
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
        logger.warning("the freeze begins drill=%s left_s=%.1f", epoch.drill, self.time_left_s())
        self.looked()
        if not epoch.drill and self._gang.process_index == 0:
            self._on_freeze()

    def _closed(self, epoch: Epoch) -> None:
        self._budget.end()
        for origin in epoch.origins:
            self._notices.removed(origin)

    def _retracted(self, notice: NoticeEntry, reason: str, *, alone: bool = False) -> None:
        disruption = self._notices.removed(notice.origin)
        logger.warning("a notice was taken back origin=%s reason=%s", notice.origin, reason)
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
                self._gang.cancel(waits_at, "the time was over")
        if epoch.doubt or epoch.ended or epoch.stages.has("written"):
            return
        if epoch.plan is not None and epoch.plan.steps_lost > 0:
            return  # that there is too little time is known and reported, and an older step is committed
        doubt = self._budget.doubt(drained=epoch.stages.has("drained"))
        if doubt:
            logger.error("%s; tried anyway", doubt)
            epoch.has_doubt(doubt)

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        """As ``multihost.Observer``."""
        return self._budget.start_in_s(remaining_s)

    def time_left_s(self) -> float:
        """As ``multihost.Observer``."""
        return self._budget.time_left_s()
