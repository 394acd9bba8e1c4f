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


class Timekeeper:
    """Knows when the next action of this process is due, and acts.

    Args:
        member: This process's part of the protocol.
        observer: Knows the times.
        process_index: Index of this process in the gang.
    """

    def __init__(self, member: Member, observer: Observer, process_index: int) -> None:
        self._member = member
        self._observer = observer
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
        left_s = self._observer.time_left_s() + self._turn_s
        if left_s <= 0 or rank_delays.polls(self._me, self._looks):
            self._member.look(0.0, left_s)
