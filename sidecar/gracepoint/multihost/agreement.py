"""Runs the agreement on one sync point: ``protocol.Member`` with the training thread and two background threads.

* The **training thread** calls ``arrive`` at every sync point. Without a preemption that is a counter and one
  attribute test. In an open epoch it waits here, for the time that is left at most, until the agreed point is known.
* The **reading thread** ("gracepoint-agreement", one per process, daemon) waits on the bell. It reads every
  entry: notices, which change nothing yet, and the start of an epoch, at which it freezes the seat and publishes
  the ordinal. The last process to publish writes what was agreed.
* The **timing thread** ("gracepoint-agreement-time", one per process, daemon) runs the ``Timekeeper``. It sleeps until
  there is a notice, computes from this process's figures when the freeze must begin, and writes the start then; the
  first process to do so starts the epoch for all. In an open epoch it takes over for a process that died in the middle
  of the protocol, and gives the epoch up for all when the time is over. The processes take turns with these looks at
  the store (``barriers.polls``): the more there are, the less often does each of them look. It also logs, once, that
  another process has left the training while this one has not.
* **Any thread** may call ``tell`` and ``take_back``.

The threads share the seat, the ledger and ``_failure``. ``protocol`` says which thread writes the seat and the ledger.
``_changed`` is notified after every change that a thread may wait for. ``close`` and ``abandon`` end the threads; both
return within about two seconds.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

from gracepoint.deadline import Backoff, Deadline
from gracepoint.errors import AgreementError, GracepointError
from gracepoint.multihost import barriers, protocol
from gracepoint.multihost.bell import Bell
from gracepoint.multihost.ledger import Broken, Closed, Entry, Event, Gone, Noticed, NoticeEntry, Opened, Retract
from gracepoint.multihost.protocol import Member, Verdict
from gracepoint.multihost.store import KeyValueStore, Pods, StoreUnavailable, named
from gracepoint.process_group import ProcessGroup

_LOOK_EVERY_S = 0.5


class Observer(Protocol):
    """Gets the events from the background threads, and gives them the times."""

    def heard(self, event: Event) -> None:
        """Called in the reading thread when an entry of the bell has an effect. Must not block."""

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        """Returns the seconds until the freeze must begin, so that the save is done in time. 0 or less means now.

        Args:
            remaining_s: Seconds until the deadline of one more notice, which this process is about to spread.
        """

    def time_left_s(self) -> float:
        """Returns the seconds in which all work of the open epoch must be done."""

    def position(self) -> tuple[int, bool]:
        """Returns the step that training has reached, and whether all must meet at the agreed point before they save.

        They must if this process has a snapshot that could be saved in place of the agreed step. Any thread may call.
        """

    def looked(self) -> None:
        """Called in the timing thread about twice a second while an epoch is open."""


class Handed:
    """What training handed to its last sync point. This one is of a process that keeps nothing of it."""

    def hold(self) -> None:
        """Called when there is a notice: that state may have to be saved.

        Called in the reading thread, and in the main thread between two bytecodes.
        """

    def linger_s(self) -> float:
        """Returns how long a process that is held waits for another one to break off, before it trains on or saves.

        Called in the training thread, once in an epoch. What follows may take the state away that is to be saved then.
        """
        return 0.0

    def lost(self, point: int) -> str:
        """Returns why what was handed at a sync point cannot be saved any more. Empty if it can, or may come yet.

        Called in the timing thread if a process broke off after that sync point.
        """
        return ""


class Timekeeper:
    """Knows when the next action of this process is due, and acts.

    Args:
        member: This process's part of the protocol.
        observer: Knows the times.
        process_index: Index of this process in the gang.
        handed: What training handed to its last sync point.
    """

    def __init__(
        self,
        member: Member,
        observer: Observer,
        process_index: int,
        handed: Handed | None = None,
    ) -> None:
        self._member = member
        self._observer = observer
        self._handed = handed or Handed()
        self._me = process_index
        # The first processes do for all what is due, and the others only if these have not.
        self._turn_s = barriers.after_s(process_index)
        self._started_for: int | None = None  # the ledger's ``changed`` when this process last wrote a start
        self._looks = 0  # number of looks at an open epoch

    def sleep_s(self) -> float | None:
        """Returns the seconds until the next look is due. None: there is nothing to do until something changes."""
        ledger = self._member.ledger
        if ledger.failed is not None or (not ledger.standing and ledger.epoch is None):
            return None
        if ledger.epoch is not None:
            undecided = ledger.epoch.agreed is None
            return max(_LOOK_EVERY_S / 10, min(self._observer.time_left_s() if undecided else 1.0, _LOOK_EVERY_S))
        if ledger.finished:
            return None
        if self._started_for == ledger.changed:  # the start was written and has not been read yet
            return _LOOK_EVERY_S
        return min(self._observer.start_in_s() + self._turn_s, _LOOK_EVERY_S)

    def look(self) -> None:
        """Writes the start if it is time. In an open epoch, does what a process that died has left undone.

        Raises:
            GracepointError: The store could not be reached.
        """
        ledger = self._member.ledger
        if ledger.epoch is None:
            start_in_s = self._observer.start_in_s() + self._turn_s
            if start_in_s <= 0:
                self._started_for = ledger.changed
            self._member.look(start_in_s, self._observer.time_left_s())
            return
        self._observer.looked()
        self._looks += 1
        if ledger.epoch.stop is not None and ledger.epoch.agreed is not None:
            if reason := self._handed.lost(ledger.epoch.agreed):
                self._member.give_up(ledger.epoch, reason)
            return
        left_s = self._observer.time_left_s() + self._turn_s
        if left_s <= 0 or barriers.polls(self._me, self._looks):
            self._member.look(0.0, left_s)


logger = logging.getLogger(__name__)

_JOIN_S = 1.0
#: How long training waits after the deadline for the timing thread, which can name the missing processes.
_PATIENCE_S = 1.0
#: For how many seconds a store that is away is told of a notice, at least and at most.
_RING_FOR_S = 1.0, 600.0
#: Upper limits of the first pause between two attempts, and of all.
_RING_PAUSES_S = 0.25, 0.7
#: If a notice has no revision, two that differ by this or less count as the same, and are written once.
_SAME_S = 0.5


class Agreement:
    """Brings all processes to one sync point.

    Args:
        store: The key-value store that all processes share.
        gang: The processes that train together.
        observer: Gets the events, and knows the times.
        pods: Names of the pods by process index, for messages.
        handed: What training handed to its last sync point. None: nothing is known of it.
        heard_s: How many seconds a process waits to read its own last entry.
        named_after_s: How many seconds after a process has left the training another one that has not says so.
    """

    def __init__(
        self,
        store: KeyValueStore,
        gang: ProcessGroup,
        observer: Observer,
        pods: Pods = (),
        handed: Handed | None = None,
        heard_s: float = 5.0,
        named_after_s: float = 2.0,
    ) -> None:
        self._heard_s = heard_s
        self._named_after_s = named_after_s
        self._gang = gang
        self._observer = observer
        self._bell = Bell(store, gang.process_count)
        self._me = gang.process_index
        self._handed = handed or Handed()
        self._pods = pods
        self._member = Member(store, self._bell, self._me, gang.process_count, self._heard, observer.position, pods)
        self._epochs: list[int] = []  # opened epochs whose keys are still in the store; only for the reading thread
        self._timekeeper = Timekeeper(self._member, observer, gang.process_index, handed)
        self.seat = self._member.seat
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._failure: Exception | None = None  # of this process alone; a failure of all processes is in the ledger
        self._lingered: int | None = None  # the epoch in which training has lingered; only for the training thread
        self._leaving = False  # close or abandon was called, so no thread waits any more
        self._left_at_s: float | None = None  # when another process left, by this one's clock; inf once that is said
        self._threads = [
            threading.Thread(target=self._read, name="gracepoint-agreement", daemon=True),
            threading.Thread(target=self._keep_time, name="gracepoint-agreement-time", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # Any thread.

    def tell(
        self,
        origin: str,
        text: str,
        *,
        remaining_s: float,
        drill: bool = False,
        once: bool = False,
        revision: int | None = None,
    ) -> None:
        """Notifies every process of a notice, or of a change of one. Training continues until the freeze must begin.

        Args:
            origin: Where the notice comes from; see ``ledger.NoticeEntry`` for all arguments.
            text: Passed to every observer.
            remaining_s: Seconds until the deadline.
            drill: True if the disruption is only rehearsed.
            once: True if the origin is a name that is not used again. Other processes get such a notice, too.
                Another one is known to this process alone, so a store that is away is tried until the deadline.
            revision: Identifies the deadline. None if it is not known; then ``remaining_s`` is compared.

        Raises:
            StoreUnavailable: The store could not be reached, in several attempts.
        """
        # If the freeze begins at once, one entry says both: each entry takes a request of every process.
        came_s, passed_s = time.monotonic(), 0.0

        def ring() -> None:
            left_s = remaining_s - passed_s  # the store may have been away for long
            starts_at = self.seat.ordinal if self._observer.start_in_s(left_s) <= 0 else None
            step, _ = self._observer.position()
            notice = NoticeEntry(self._me, origin, left_s, text, drill, once, revision, starts_at, step)

            def said(there: Entry) -> bool:
                if not isinstance(there, NoticeEntry):
                    return False
                repeats = notice.repeats(there)
                return abs(there.remaining_s - left_s) <= _SAME_S if repeats is None else repeats

            self._bell.ring(notice, unless=said)

        backoff, (least_s, most_s) = Backoff(*_RING_PAUSES_S, jitter=0.4), _RING_FOR_S
        for_s = least_s if once else min(max(remaining_s, least_s), most_s)
        level = logging.WARNING
        while passed_s < for_s and not self._leaving:
            try:
                return ring()
            except StoreUnavailable as error:
                logger.log(level, "could not notify the other processes of a notice, trying again error=%s", error)
                level = logging.DEBUG
            time.sleep(backoff.next_s())
            passed_s = time.monotonic() - came_s
        return ring()

    def take_back(self, origin: str, reason: str) -> None:
        """Tells every process that the signal of a notice went away. Has no effect once the freeze has begun.

        Raises:
            StoreUnavailable: The store could not be reached.
        """
        retract = Retract(self._me, origin, reason)
        self._bell.ring(retract, unless=lambda there: isinstance(there, Retract) and there.origin == origin)

    def tell_gone(self, reason: str) -> None:
        """Ends all waits for this process, now and later, and gives the other processes the reason. Never raises."""
        try:
            gone = Gone(self._me, reason, self.seat.ordinal, self._observer.position()[0])
            self._bell.ring(gone, unless=lambda there: isinstance(there, Gone))
            if self.seat.epoch is not None:
                self._gang.fail(self.steps_key, AgreementError(reason))
        except GracepointError as error:
            logger.warning("could not notify the other processes that this one stops training error=%s", error)

    @property
    def in_epoch(self) -> bool:
        """True from the freeze on, until training continues."""
        return self.seat.epoch is not None

    @property
    def noticed(self) -> bool:
        """True while a notice stands or an epoch is open."""
        ledger = self._member.ledger
        return bool(ledger.standing) or ledger.epoch is not None

    @property
    def point(self) -> int | None:
        """The agreed sync point of the open epoch. None if there is none."""
        return self.seat.agreed

    @property
    def is_beyond(self) -> bool:
        """True if this process has passed the agreed sync point, after which another one broke off."""
        return self.seat.verdict() is Verdict.BEFORE

    @property
    def stopped(self) -> str:
        """Which process broke off after the agreed sync point, as text. Empty if all train on to it."""
        epoch = self._member.ledger.epoch
        if epoch is None or epoch.stop is None:
            return ""
        return f"the training of {named([epoch.stop.by], self._pods)} broke off after it: {epoch.stop.reason}"

    def wait_noticed(self, timeout_s: float) -> bool:
        """Waits for a notice. Returns True if one stands or an epoch is open."""
        with self._lock:
            return self._changed.wait_for(lambda: self.noticed, timeout_s)

    @property
    def sync_point(self) -> int:
        """Number of the latest sync point, from 1. 0 before the first. For the training thread."""
        return self.seat.ordinal

    @property
    def steps_key(self) -> str:
        """Key of the meeting in ``confirm``. Cancelling it ends the wait of all processes."""
        return f"epoch/{self.seat.epoch}/steps"

    # The training thread.

    def arrive(self) -> bool:
        """Passes the next sync point.

        Returns:
            True at the agreed sync point, or beyond it if a process broke off after it (see ``point``). Then call
            ``confirm``, save what was handed at that point, and call ``end_epoch`` or exit.

        Raises:
            AgreementError: The other processes did not publish where they are in the time left, or one broke off.
        """
        seat = self.seat
        seat.ordinal += 1  # not begin(): without a preemption, a step runs only this line and the next
        if seat.epoch is None:
            return False
        return self._held() in (Verdict.SAVE, Verdict.BEFORE)

    def pass_on(self) -> None:
        """Passes a sync point at which the training was interrupted, so that ``stop`` is about it."""
        self.seat.ordinal += 1

    def stop(self, reason: str) -> None:
        """Has all processes save what they handed at the sync point that this one passed last: it breaks off there.

        Raises:
            AgreementError: They cannot: there is no notice, training has ended, or a process is too far.
            StoreUnavailable: The others could not be notified.
        """
        for _ in self._member.stop(reason):
            pass
        with self._lock:
            self._changed.wait_for(self._is_stopped, self._heard_s)
            failed = self._member.ledger.failed or self._failure
            if failed is not None or self.seat.agreed != self.seat.ordinal or not self.seat.stopped:
                raise AgreementError(str(failed or "the processes did not agree to save where this one broke off"))

    def _is_stopped(self) -> bool:
        ledger = self._member.ledger
        return ledger.failed is not None or ledger.finished or self._failure is not None or self.seat.stopped

    def confirm(
        self, step: int, word: str = "", merge: Callable[[list[str]], str] = lambda words: "", *, deadline: Deadline
    ) -> str | None:
        """Brings all processes together at the agreed sync point and compares their steps, if they must meet there.

        Args:
            step: This process's step.
            word: A text for ``merge``.
            merge: Called in the process that comes last, with the texts of all in the order of their indices.
            deadline: The time by which all processes must be here.

        Returns:
            What ``merge`` returned, in all processes. None if they need not meet: their steps are equal, and no process
            has anything to choose.

        Raises:
            AgreementError: Two processes are at different steps, which the message names. Or ``merge`` raised this
                error. Raised in all processes.
            BarrierTimeout: A process did not arrive in time. The message names it.
            BarrierFailed: A process broke off.
        """
        if not self.seat.meets:
            return None

        def compared(messages: list[str]) -> str:
            return protocol.compare(messages, self.seat.ordinal, merge)

        message = protocol.message(step, word)
        return protocol.result(self._gang.reduce(self.steps_key, message, compared, timeout_s=deadline.remaining_s()))

    def end_epoch(self) -> None:
        """Ends the epoch of a drill, at the agreed point or before it. Every process calls it and trains on.

        Raises:
            StoreUnavailable: The others could not be notified.
        """
        with self._lock:
            self._failure = None
        for _ in self._member.leave():
            pass

    def finish(self) -> bool:
        """Passes the last sync point: this process has finished training.

        When it returns, every notice that came before has been handled.

        Returns:
            True if this ends an open epoch whose agreed point would come after the end of training.

        Raises:
            AgreementError: See ``arrive``.
        """
        try:
            for _ in self._member.finish():
                pass
        except StoreUnavailable as error:
            logger.warning("could not notify the other processes that training has finished error=%s", error)
        else:
            with self._lock:
                if not self._changed.wait_for(lambda: self._member.ledger.finished, self._heard_s):
                    logger.warning("did not read the end of training in the key-value store waited_s=%g", self._heard_s)
        return self.seat.epoch is not None and self._held() is Verdict.OVER

    def abandon(self, reason: str) -> None:
        """Tells the other processes that this one breaks off training, and ends the threads. Never raises."""
        if not self._leaving:
            self.tell_gone(reason)
            self.close()

    def close(self) -> None:
        """Ends the background threads. Never raises; safe to repeat."""
        with self._lock:
            self._leaving = True
            self._changed.notify_all()
        try:
            self._bell.close(self._me)
        except StoreUnavailable as error:
            logger.warning("could not wake the agreement's thread error=%s", error)
        for thread in self._threads:
            thread.join(_JOIN_S)
            if thread.is_alive():
                logger.warning("a thread did not end in time name=%s waited_s=%g", thread.name, _JOIN_S)

    def _held(self) -> Verdict:
        with self._lock:
            while True:
                failed = self._member.ledger.failed or self._failure
                if failed is not None and self.seat.epoch is not None:
                    raise AgreementError(str(failed)) from self._failure
                verdict = self.seat.verdict()
                if verdict in (Verdict.GO_ON, Verdict.SAVE) and self._lingered != self.seat.epoch:
                    self._lingered = self.seat.epoch
                    self._changed.wait_for(self._is_stopped, self._handed.linger_s())
                    continue
                if verdict is not Verdict.WAIT:
                    return verdict
                left_s = self._observer.time_left_s()
                if left_s <= -_PATIENCE_S:
                    where = f"held at sync point {self.seat.ordinal} until the time was over"
                    raise AgreementError(f"{where}: not every process said where it is")
                # When the deadline moves, the reading thread has heard of it, and notifies.
                self._changed.wait(min(left_s + _PATIENCE_S, threading.TIMEOUT_MAX))

    # The reading thread.

    def _read(self) -> None:
        while (entry := self._bell.next()) is not None:
            try:
                for _ in self._member.hear(*entry):
                    pass
            except Exception as error:  # noqa: BLE001 - raised in the training thread, which waits for it
                self._fail_here(error)
            departure = self._member.ledger.left
            if departure is not None and departure.by != self._me and self._left_at_s is None:
                self._left_at_s = time.monotonic()
            self._notify()

    def _heard(self, event: Event) -> None:
        match event:
            case Opened(epoch):
                self._epochs.append(epoch.number)
            case Closed(epoch):
                self._retire(epoch.number)
            case Noticed():
                self._handed.hold()
            case _:
                pass
        self._observer.heard(event)

    def _retire(self, epoch: int) -> None:
        """Removes the keys of this epoch and of all earlier ones, because all processes have left them."""
        over = [number for number in self._epochs if number <= epoch]
        self._epochs = [number for number in self._epochs if number > epoch]
        try:
            for number in over:
                self._gang.retire(self._member.folder(number))
        except GracepointError as error:
            logger.warning("could not remove the keys of a finished preemption error=%s", error)

    def _fail_here(self, error: Exception) -> None:
        logger.error("the agreement failed in this process error=%s", error, exc_info=error)
        epoch = self._member.ledger.epoch
        if epoch is not None:
            with self._lock:
                self._failure = error
            with contextlib.suppress(Exception):  # the observer may be what has failed
                self._observer.heard(Broken(epoch, str(error)))

    def _notify(self) -> None:
        with self._lock:
            self._changed.notify_all()

    # The timing thread.

    def _keep_time(self) -> None:
        while True:
            with self._lock:
                if self._leaving:
                    return
                look_in_s, tell_in_s = self._timekeeper.sleep_s(), self._tells_of_left_in_s()
                sleep_s = min((s for s in (look_in_s, tell_in_s) if s is not None), default=None)
                if (sleep_s is None or sleep_s > 0) and self._changed.wait(sleep_s):
                    continue  # something has changed: compute the time again
            if tell_in_s == sleep_s:
                self._tell_of_left()
            if look_in_s == sleep_s:
                self._look()

    def _look(self) -> None:
        try:
            self._timekeeper.look()
        except GracepointError as error:
            logger.warning("could not check whether a notice is due, trying again error=%s", error)

    def _tells_of_left_in_s(self) -> float | None:
        """Returns when it may be time to say that another process has left. None if there is nothing to say."""
        left_at_s = self._left_at_s
        if left_at_s is None or self.seat.finished or self._member.ledger.failed is not None:
            return None
        wait_s = left_at_s + self._named_after_s - time.monotonic()
        return None if wait_s == math.inf else max(0.0, wait_s)

    def _tell_of_left(self) -> None:
        departure, step = self._member.ledger.left, self._observer.position()[0]
        assert departure is not None
        if self.seat.ordinal < departure.ordinal:  # this process is not yet where that one has left
            self._left_at_s = time.monotonic()
            return
        self._left_at_s = math.inf
        if self.seat.finished or self._leaving:  # meanwhile
            return
        logger.error(
            "%s left the training after step %d, sync point %d: %s. This process is at step %d, sync point %d: a step, "
            "save or barrier that needs the other does not end, and no preemption is saved. All processes must pass "
            "the same steps",
            named([departure.by], self._pods),
            departure.step,
            departure.ordinal,
            departure.reason if isinstance(departure, Gone) else "close() said that it has ended",
            step,
            self.seat.ordinal,
        )
