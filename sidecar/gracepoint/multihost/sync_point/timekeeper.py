"""Acts for the agreement when its time has come: starts the freeze, and looks after an open epoch.

It computes when the freeze must begin from this process's own figures, and writes the start when it is time. The first
process that does so starts the epoch for all. In an open epoch it takes over for a process that died in the middle of
the protocol, and gives the epoch up for all when the time is over. Both read the store, so the processes take turns
(``rank_delays``): the more there are, the less often does each of them look.

It has no thread. The timing thread of the ``agreement`` makes all calls.
"""

from __future__ import annotations

import math
from typing import Protocol

from gracepoint.multihost.coordination import rank_delays
from gracepoint.multihost.sync_point.ledger import Event
from gracepoint.multihost.sync_point.protocol import Member

_LOOK_EVERY_S = 0.5


class Observer(Protocol):
    """Gets the events from the background threads, and tells them the times."""

    def heard(self, event: Event) -> None:
        """Called in the reading thread when an entry of the bell has an effect. Must not block."""

    def start_in_s(self, remaining_s: float = math.inf) -> float:
        """Returns the seconds until the freeze must begin, so that the save is done in time. 0 or less means now.

        Args:
            remaining_s: Seconds until the deadline of one more notice, which this process is about to tell.
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
        self._turn_s = rank_delays.after_s(process_index)
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
            if why := self._handed.lost(ledger.epoch.agreed):
                self._member.give_up(ledger.epoch, why)
            return
        left_s = self._observer.time_left_s() + self._turn_s
        if left_s <= 0 or rank_delays.polls(self._me, self._looks):
            self._member.look(0.0, left_s)
