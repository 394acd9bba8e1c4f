"""The agreement on one sync point, step by step: no threads, no clock.

Every process passes the same sequence of sync points, numbered from 1, at its own pace (hosts run ahead of each
other and of their devices). When an epoch opens, all must stop at the same one, and none may have passed it.

Two threads of a process take part, and the whole protocol rests on the order of their steps:

    training thread, at each sync point          reading thread, when the bell says "start"
    1. ``ordinal += 1``                           1. ``open_epoch`` (now the training thread is held)
    2. is an epoch open? no: train on             2. read ``ordinal``, publish it: "frozen"
       yes: wait for ``agreed``, then             3. when every process has published:
       ``verdict``                                   ``agreed = max(published) + 1``

Each side first writes its own word and then reads the other's. So if the reading thread did not see an
ordinal, the training thread sees the epoch and waits there: no process can be past what it published before
``agreed`` is known. Hence ``agreed`` lies ahead of, or is, the point where each process is held. It comes from
one entry of the bell, which the last to publish writes: there is no leader, and any process can write it in place
of one that died (``look``); the first one counts.

Training ends with one more sync point, ``finish``. An epoch that was opened before the first process was there
is agreed at a point beyond it in every process, as all pass the same ones: there is nothing to save (state that
no sync point was given), and it ends as Retracted.

The steps of ``Member`` are generators: each ``yield`` is a place where another thread may come in between and it
matters. Threads run them to the end; a test may stop them there and look at every order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

from gracepoint.multihost.barriers import named
from gracepoint.multihost.bell import Bell
from gracepoint.multihost.entries import Agreed, Ended, Entry, Failed, Finished, StartEntry
from gracepoint.multihost.ledger import Broken, Event, Ledger, Opened, Settled
from gracepoint.multihost.store import KeyValueStore


class Verdict(enum.Enum):
    """What a process does at a sync point of an open epoch."""

    WAIT = "wait"  # the agreed point is not known: go nowhere
    GO_ON = "go on"  # it lies ahead, or there is none
    SAVE = "save"  # this is it
    OVER = "over"  # training is finished: this epoch has nothing to save


class Seat:
    """One process's place in the agreement: what its two threads say to each other.

    The attributes are plain and written by one thread each (``ordinal`` and ``finished`` by training, ``epoch``
    and ``agreed`` by reading), but for ``end_epoch``: training calls it at the agreed point, reading when a drill
    came to nothing before there was one.
    """

    __slots__ = ("agreed", "epoch", "finished", "ordinal")

    def __init__(self) -> None:
        self.ordinal = 0  # the sync point begun last
        self.epoch: int | None = None  # the open epoch; None: nothing is wrong
        self.agreed: int | None = None  # the open epoch's agreed sync point
        self.finished = False  # ``ordinal`` is the last there will be

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
        """What to do at the current sync point while an epoch is open."""
        if self.epoch is None:
            return Verdict.GO_ON
        if self.agreed is None:
            return Verdict.WAIT
        if self.ordinal > self.agreed:
            raise RuntimeError(f"passed sync point {self.ordinal}, beyond the agreed {self.agreed}")
        if self.finished:
            return Verdict.OVER
        return Verdict.SAVE if self.ordinal == self.agreed else Verdict.GO_ON

    # Either's.

    def end_epoch(self) -> None:
        """Training goes on: the seat is ready for the next epoch."""
        self.agreed = None
        self.epoch = None


class Member:
    """One process in the agreement: its seat, what it has read, and what it writes for the others.

    Args:
        store: Shared by the gang.
        bell: On the same store.
        process_index: This process.
        process_count: How many there are.
        tell: Told what has come of each entry, in the reading thread, before the next step.
    """

    def __init__(
        self, store: KeyValueStore, bell: Bell, process_index: int, process_count: int, tell: Callable[[Event], None]
    ) -> None:
        self.seat = Seat()
        self.ledger = Ledger()  # replaced as a whole, by the reading thread
        self._store = store
        self._bell = bell
        self._process_index = process_index
        self._process_count = process_count
        self._tell = tell

    # The reading thread.

    def hear(self, number: int, entry: Entry) -> Iterator[None]:
        """Takes one entry of the bell."""
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
        """Does what is due: starts an epoch, steps in for one that died, or gives the epoch up.

        Args:
            start_in_s: Until the freeze must begin.
            time_left_s: Until the open epoch must be over.
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
        """Tells all ordinals once every process has published; the last to do so may have died before it did."""
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
        """Leaves a drill, at the agreed point or because it came to nothing here; the last one ends it for all."""
        epoch = self.seat.epoch
        if epoch is None:
            return
        self.seat.end_epoch()
        yield
        if self._store.increment(f"{self.folder(epoch)}/left") == self._process_count:
            self._bell.ring(Ended(epoch))

    def finish(self) -> Iterator[None]:
        """Passes the last sync point, and says so if no process did before."""
        self.seat.finish()
        yield
        if not self.ledger.finished:
            self._bell.ring(Finished(self._process_index), unless=lambda there: isinstance(there, Finished))

    def folder(self, epoch: int) -> str:
        """Where the keys of an epoch are: its own, as keys are written once."""
        return f"epoch/{epoch}"

    def _undecided(self) -> int | None:
        ledger = self.ledger
        epoch = ledger.epoch
        if ledger.failed is not None or epoch is None or epoch.agreed is not None:
            return None
        return epoch.number
