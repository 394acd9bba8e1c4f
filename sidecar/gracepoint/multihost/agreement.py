"""The agreement at work: ``protocol.Seat`` between the training thread and one background thread.

* The **training thread** calls ``arrive`` at every sync point. While nothing is wrong that is a counter and one
  attribute test. In an open epoch it waits here, bounded by the time left, until the agreed point is known.
* The **background thread** ("gracepoint-agreement", one a process, daemon) is parked on the bell. A notice
  opens an epoch: it freezes the seat, publishes the ordinal, and learns the agreed one: from the key that the
  last process to publish writes at once, or by computing it from all published numbers where that process died
  in between. Then it waits for the epoch's end before it listens to the bell again.
* **Any thread** may call ``call`` to tell every process of a notice.

State between the two threads: the seat (see there), and ``_failure``, written by the background thread and
read by training under ``_changed``. ``close`` and ``abandon`` end the thread; both return within about a
second. What a process leaves behind in the store speaks for it later: ``finished/<process>`` (its last
ordinal, which counts in every later epoch) or ``gone/<process>`` (it broke off: nobody need wait for it).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from typing import Protocol

from gracepoint.errors import AgreementError, BarrierFailed, BarrierTimeout, GracepointError
from gracepoint.gang import Gang
from gracepoint.multihost.barriers import named
from gracepoint.multihost.bell import Bell
from gracepoint.multihost.protocol import Seat, Verdict
from gracepoint.multihost.store import KeyExists, KeyTimeout, KeyValueStore, StoreUnavailable

log = logging.getLogger(__name__)

_JOIN_S = 1.0
_FIRST_WAIT_S = 0.5
_LOOK_EVERY_S = 0.5
_RING_ATTEMPTS = 5


class Observer(Protocol):
    """Whom the background thread tells, in that thread."""

    def epoch_opened(self, epoch: int, by: int, notice: str) -> None:
        """A notice has come, from this process or another (``by``)."""

    def epoch_settled(self, epoch: int, agreed: int) -> None:
        """Every process has published; the agreed ordinal is known."""

    def epoch_failed(self, epoch: int, error: Exception) -> None:
        """There will be no agreement; training learns of it at its next sync point, if it ever comes there."""

    def time_left_s(self) -> float:
        """Seconds in which the agreement must be reached."""


class Agreement:
    """Brings all processes to one sync point.

    Args:
        store: Shared by the gang.
        gang: The processes.
        observer: Told of epochs; knows the time left.
    """

    def __init__(self, store: KeyValueStore, gang: Gang, observer: Observer) -> None:
        self.seat = Seat()
        self._store = store
        self._gang = gang
        self._observer = observer
        self._bell = Bell(store, gang.process_index)
        self._changed = threading.Condition()
        self._failure: Exception | None = None
        self._leaving = False  # close or abandon was called: nothing is waited for any more
        self._thread = threading.Thread(target=self._run, name="gracepoint-agreement", daemon=True)
        self._thread.start()

    def call(self, notice: str) -> None:
        """Tells every process of a notice. Without effect in an open epoch: it joins that one.

        Raises:
            StoreUnavailable: The store could not be reached, also when tried again.
        """
        for attempt in range(1, _RING_ATTEMPTS + 1):
            if self.seat.epoch is not None:
                return
            try:
                return self._bell.ring(notice)
            except StoreUnavailable:
                if attempt == _RING_ATTEMPTS:
                    raise
                time.sleep(0.1 * attempt)

    @property
    def in_epoch(self) -> bool:
        """True while a notice is being dealt with."""
        return self.seat.epoch is not None

    def arrive(self) -> bool:
        """Passes the next sync point.

        Returns:
            True at the agreed one: ``confirm`` it, save, then ``end_epoch`` or leave.

        Raises:
            AgreementError: The others did not say where they are in the time left, or one broke off.
        """
        seat = self.seat
        seat.ordinal += 1  # begin(), spelt out: this line and the next are all that a quiet step costs
        if seat.epoch is None:
            return False
        return self._held() is Verdict.SAVE

    def confirm(self, step: int, *, timeout_s: float) -> None:
        """Brings all processes together at the agreed sync point and compares their steps.

        Raises:
            AgreementError: Two processes carry different steps; names both.
            BarrierTimeout: A process did not get here in time; names it.
            BarrierFailed: A process broke off.
        """
        steps = [int(s) for s in self._gang.gather(self._steps_key(), str(step), timeout_s=timeout_s)]
        for other, found in enumerate(steps):
            if found != steps[0]:
                raise AgreementError(
                    f"at sync point {self.seat.ordinal} process 0 is at step {steps[0]} and process {other} at step "
                    f"{found}: every process must call step() once for each step, with the same number"
                )

    def end_epoch(self) -> None:
        """Closes the epoch at the agreed sync point; every process does so, and training goes on."""
        with self._changed:
            self.seat.end_epoch()
            self._changed.notify_all()

    def finish(self) -> bool:
        """Passes the last sync point: this process is done with training.

        Returns:
            True if that ended an open epoch, whose agreed point lies beyond the end.

        Raises:
            AgreementError: As ``arrive``.
        """
        ordinal = self.seat.finish()
        try:
            return self.seat.epoch is not None and self._held() is Verdict.OVER
        finally:
            self._leave_word(f"finished/{self._gang.process_index}", str(ordinal))

    def abandon(self, reason: str) -> None:
        """This process breaks off training: it tells so, and its thread ends. Never raises."""
        if not self._leaving:
            self.tell_gone(reason)
            self.close()

    def tell_gone(self, reason: str) -> None:
        """Lets those that wait for this process, or will, wait no longer, and tells them why. Never raises."""
        self._leave_word(f"gone/{self._gang.process_index}", reason)
        if self.seat.epoch is not None:
            try:
                self._gang.fail(self._steps_key(), AgreementError(reason))
            except GracepointError as error:
                log.warning("could not tell the others that this process breaks off error=%s", error)

    def close(self) -> None:
        """Ends the background thread. Never raises; safe to repeat."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        try:
            self._bell.close()
        except StoreUnavailable as error:
            log.warning("could not wake the agreement's thread error=%s", error)
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            log.warning("the agreement's thread did not end waited_s=%g", _JOIN_S)

    def _steps_key(self) -> str:
        return f"epoch/{self.seat.epoch}/steps"

    def _leave_word(self, key: str, value: str) -> None:
        try:
            self._store.set(key, value)
        except (KeyExists, StoreUnavailable) as error:
            log.warning("could not leave word for the others key=%s error=%s", key, error)

    # Training thread.

    def _held(self) -> Verdict:
        with self._changed:
            while True:
                if self._failure is not None:
                    raise AgreementError(str(self._failure)) from self._failure
                verdict = self.seat.verdict()
                if verdict is not Verdict.WAIT:
                    return verdict
                left_s = self._observer.time_left_s()
                if left_s <= 0:
                    raise AgreementError(
                        f"held at sync point {self.seat.ordinal} until the time was over: not every process "
                        f"said where it is"
                    )
                self._changed.wait(min(left_s, _LOOK_EVERY_S))  # the deadline may move meanwhile

    # Background thread.

    def _run(self) -> None:
        while (found := self._bell.next_notice()) is not None:
            epoch, by, notice = found
            try:
                self.seat.open_epoch(epoch)
                frozen = self.seat.ordinal
                self._observer.epoch_opened(epoch, by, notice)
                agreed = self._settle(epoch, frozen)
                if agreed is not None:
                    self._observer.epoch_settled(epoch, agreed)
            except Exception as error:  # noqa: BLE001 - raised in the training thread, which waits for it
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                self._observer.epoch_failed(epoch, error)
            with self._changed:  # parked until training says so, like on the bell: there is nothing to time
                self._changed.wait_for(lambda: self.seat.epoch is None or self._leaving)

    def _settle(self, epoch: int, frozen: int) -> int | None:
        """Publishes this process's ordinal and learns the agreed one; None if this process leaves."""
        folder = f"epoch/{epoch}"
        self._store.set(f"{folder}/frozen/{self._gang.process_index}", str(frozen))
        last = self._store.increment(f"{folder}/count") == self._gang.process_count
        published = self._published(epoch) if last else None
        if published is None:
            published = self._wait_for_all(epoch)
        if published is None:
            return None
        with self._changed:
            agreed = self.seat.settle(published)
            self._changed.notify_all()
        return agreed

    def _wait_for_all(self, epoch: int) -> dict[int, int] | None:
        """Published ordinals of all, as soon as they are complete; None if this process leaves."""
        try:
            return _ordinals(self._store.get(f"epoch/{epoch}/all", timeout_s=_FIRST_WAIT_S))
        except KeyTimeout:
            pass
        while (published := self._published(epoch)) is None:
            with self._changed:
                if self._changed.wait_for(lambda: self._leaving, _LOOK_EVERY_S):
                    return None
            if self._observer.time_left_s() <= 0:
                missing = self._missing(epoch)
                raise BarrierTimeout(
                    f"waited until the time was over for {named(missing)} of {self._gang.process_count} to say "
                    f"at which sync point they are",
                    tuple(missing),
                )
        return published

    def _published(self, epoch: int) -> dict[int, int] | None:
        """All ordinals, of frozen and of finished processes, once complete; then hands them to those that wait.

        Raises:
            BarrierFailed: A process has broken off.
        """
        gone = self._store.list("gone")
        if gone:
            process, reason = min(gone.items())
            raise BarrierFailed(f"process {process} broke off: {reason}")
        found = {**self._store.list("finished"), **self._store.list(f"epoch/{epoch}/frozen")}
        if len(found) < self._gang.process_count:
            return None
        try:
            self._store.set(f"epoch/{epoch}/all", json.dumps(found))
        except KeyExists:
            return _ordinals(self._store.get(f"epoch/{epoch}/all", timeout_s=_FIRST_WAIT_S))
        return {int(process): int(ordinal) for process, ordinal in found.items()}

    def _missing(self, epoch: int) -> list[int]:
        found = {**self._store.list("finished"), **self._store.list(f"epoch/{epoch}/frozen")}
        return [i for i in range(self._gang.process_count) if str(i) not in found]


def _ordinals(text: str) -> dict[int, int]:
    return {int(process): int(ordinal) for process, ordinal in json.loads(text).items()}
