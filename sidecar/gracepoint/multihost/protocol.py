"""The steps of the agreement on one sync point: no threads, no clock.

Every process passes the same sequence of sync points, numbered from 1, at its own pace (hosts run ahead of each other
and of their devices). When an epoch opens, all processes must stop at the same sync point, and no process may have
passed it.

Two threads of each process take part, and the protocol depends on the order of their steps:

    training thread, at each sync point          reading thread, when the bell says "start"
    1. ``ordinal += 1``                           1. ``open_epoch`` (now the training thread is held)
    2. is an epoch open? no: train on             2. read ``ordinal``, publish it: "frozen"
       yes: wait for ``agreed``, then             3. when every process has published:
       ``verdict``                                   ``agreed = max(published) + 1``

Each thread first writes its own value and then reads the value of the other. So if the reading thread did not see an
ordinal, the training thread sees the epoch and waits at that sync point. No process can pass the ordinal that it
published before ``agreed`` is known. Hence ``agreed`` is the point at which a process is held, or a later one. It comes
from one entry of the bell, which the last process to publish writes. There is no leader: if that process died, any
other can write the entry (``look``). The first such entry counts.

Training ends with one more sync point, ``finish``. If an epoch was opened before a process got there, and the agreed
point comes after ``finish``, that is so in every process, because all pass the same sync points. Then there is nothing
to save (no sync point was given such a state), and the epoch ends as Retracted.

The steps of ``Member`` are generators. Each ``yield`` marks a place where the steps of another thread in between make a
difference. Threads run the generators to the end. A test may stop at each ``yield`` and check every order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

from gracepoint.multihost.bell import Bell
from gracepoint.multihost.entries import Agreed, Ended, Entry, Failed, Finished, StartEntry
from gracepoint.multihost.ledger import Broken, Event, Ledger, Opened, Settled
from gracepoint.multihost.naming import named
from gracepoint.multihost.store import KeyValueStore


class Verdict(enum.Enum):
    """What a process does at a sync point of an open epoch."""

    WAIT = "wait"  # the agreed point is not known yet
    GO_ON = "go on"  # the agreed point comes later, or no epoch is open
    SAVE = "save"  # this is the agreed point
    OVER = "over"  # training is finished, so this epoch has nothing to save


class Seat:
    """The state of one process in the agreement, which its two threads share.

    There is no lock. The training thread writes ``ordinal`` and ``finished``; the reading thread writes ``epoch`` and
    ``agreed``. The exception is ``end_epoch``: the training thread calls it at the agreed point, and the reading thread
    calls it if a drill failed before a point was agreed.
    """

    __slots__ = ("agreed", "epoch", "finished", "ordinal")

    def __init__(self) -> None:
        self.ordinal = 0  # number of the latest sync point
        self.epoch: int | None = None  # number of the open epoch; None if no epoch is open
        self.agreed: int | None = None  # agreed sync point of the open epoch; None if it is not known
        self.finished = False  # True if ``ordinal`` is the last sync point

    # The reading thread's steps.

    def open_epoch(self, epoch: int) -> None:
        """Holds the training thread from its next sync point on."""
        if self.epoch is not None:
            raise RuntimeError(f"epoch {epoch} was opened while epoch {self.epoch} is open")
        self.epoch = epoch

    def settle(self, agreed: int) -> None:
        """Lets the training thread go on to the agreed sync point."""
        self.agreed = agreed

    # The training thread's steps.

    def begin(self) -> int:
        """Arrives at the next sync point."""
        self.ordinal += 1
        return self.ordinal

    def finish(self) -> int:
        """Arrives at the last sync point."""
        self.finished = True
        return self.begin()

    def verdict(self) -> Verdict:
        """Returns what to do at the current sync point while an epoch is open."""
        if self.epoch is None:
            return Verdict.GO_ON
        if self.agreed is None:
            return Verdict.WAIT
        if self.ordinal > self.agreed:
            raise RuntimeError(f"passed sync point {self.ordinal}, beyond the agreed {self.agreed}")
        if self.finished:
            return Verdict.OVER
        return Verdict.SAVE if self.ordinal == self.agreed else Verdict.GO_ON

    # Both threads.

    def end_epoch(self) -> None:
        """Ends the epoch. Training goes on, and the next epoch may be opened."""
        self.agreed = None
        self.epoch = None


class Member:
    """One process in the agreement: its seat, the entries that it has read, and the entries that it writes.

    Args:
        store: The key-value store that the gang shares.
        bell: The bell on the same store.
        process_index: The index of this process.
        process_count: The number of processes.
        tell: Called in the reading thread with each event that follows from an entry, before the next step.
    """

    def __init__(
        self, store: KeyValueStore, bell: Bell, process_index: int, process_count: int, tell: Callable[[Event], None]
    ) -> None:
        self.seat = Seat()
        self.ledger = Ledger()  # never changed, only replaced, by the reading thread
        self._store = store
        self._bell = bell
        self._process_index = process_index
        self._process_count = process_count
        self._tell = tell

    # The reading thread.

    def hear(self, number: int, entry: Entry) -> Iterator[None]:
        """Handles one entry of the bell."""
        self.ledger, events = self.ledger.hear(number, entry)
        for event in events:
            self._be_seated(event)
        yield
        frozen = self.seat.ordinal
        for event in events:
            self._tell(event)
        if any(isinstance(event, Opened) for event in events) and (epoch := self._undecided()) is not None:
            yield from self._publish(epoch, frozen)

    def _be_seated(self, event: Event) -> None:
        match event:
            case Opened(epoch):
                self.seat.open_epoch(epoch.number)
            case Settled(epoch) if self.seat.epoch == epoch.number and epoch.agreed is not None:
                self.seat.settle(epoch.agreed)
            case Broken(epoch) if self.seat.epoch == epoch.number and epoch.drill:
                self.seat.end_epoch()

    def _publish(self, epoch: int, frozen: int) -> Iterator[None]:
        self._store.set(f"{self.folder(epoch)}/frozen/{self._process_index}", str(frozen))
        yield
        last = self._store.increment(f"{self.folder(epoch)}/count") == self._process_count
        yield
        if last:
            self._complete()

    # The timing thread.

    def look(self, start_in_s: float, time_left_s: float) -> None:
        """Does what is due: starts an epoch, completes it in place of a process that died, or gives it up.

        Args:
            start_in_s: Seconds until the freeze must begin.
            time_left_s: Seconds until the open epoch must be over.
        """
        ledger = self.ledger
        if ledger.epoch is None:
            if ledger.standing and not ledger.finished and start_in_s <= 0:
                start = StartEntry(self._process_index, ledger.changed)
                self._bell.ring(
                    start, unless=lambda there: isinstance(there, StartEntry) and there.heard == start.heard
                )
        elif self._undecided() is not None:
            self._complete(in_time=time_left_s > 0)

    def _complete(self, *, in_time: bool = True) -> None:
        """Writes all ordinals to the bell once every process has published its own.

        The last process to publish may have died before it wrote them. If ``in_time`` is False, the epoch fails instead
        of waiting for processes that have not published.
        """
        epoch = self._undecided()
        if epoch is None:
            return
        published = {int(i): int(text) for i, text in self._store.list(f"{self.folder(epoch)}/frozen").items()}
        decision: Agreed | Failed
        if len(published) == self._process_count:
            decision = Agreed(epoch, {str(i): ordinal for i, ordinal in published.items()})
        elif in_time:
            return
        else:
            missing = named(i for i in range(self._process_count) if i not in published)
            decision = Failed(
                epoch,
                self._process_index,
                f"waited until the time was over for {missing} of {self._process_count} to say at which sync point "
                f"they are",
            )
        self._bell.ring(decision, unless=lambda there: isinstance(there, Agreed | Failed) and there.epoch == epoch)

    # The training thread.

    def leave(self) -> Iterator[None]:
        """Leaves a drill, at the agreed point or because it failed in this process. The last one ends it for all."""
        epoch = self.seat.epoch
        if epoch is None:
            return
        self.seat.end_epoch()
        yield
        if self._store.increment(f"{self.folder(epoch)}/left") == self._process_count:
            self._bell.ring(Ended(epoch))

    def finish(self) -> Iterator[None]:
        """Passes the last sync point, and writes that to the bell if no process has done so before."""
        self.seat.finish()
        yield
        if not self.ledger.finished:
            self._bell.ring(Finished(self._process_index), unless=lambda there: isinstance(there, Finished))

    def folder(self, epoch: int) -> str:
        """Returns the folder of an epoch's keys. Each epoch has its own, because keys are written once."""
        return f"epoch/{epoch}"

    def _undecided(self) -> int | None:
        ledger = self.ledger
        epoch = ledger.epoch
        if ledger.failed is not None or epoch is None or epoch.agreed is not None:
            return None
        return epoch.number
