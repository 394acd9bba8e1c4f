"""The steps of the agreement on one sync point: no threads, no clock.

Every process passes the same sequence of sync points, numbered from 1, at its own pace (hosts run ahead of each other
and of their devices). When an epoch opens, all processes must stop at the same sync point, and no process may have
passed it.

Two threads of each process take part, and the protocol depends on the order of their steps:

    training thread, at each sync point          reading thread, when the bell says "start"
    1. ``ordinal += 1``                           1. ``open_epoch`` (now the training thread is held)
    2. is an epoch open? no: train on             2. read ``ordinal``, publish it
       yes: wait for ``agreed``, then             3. when every process has published:
       ``verdict``                                   ``agreed = max(published) + 1``

Each thread first writes its own value and then reads the value of the other. So if the reading thread did not see an
ordinal, the training thread sees the epoch and waits at that sync point. No process can pass the ordinal that it
published before ``agreed`` is known. Hence ``agreed`` is the point at which a process is held, or a later one. It comes
from one entry of the bell, which the last process to publish writes. There is no leader: if that process died, any
other can write the entry (``look``). The first such entry counts.

To publish takes one request, and nobody reads what all have published. The entry that opens the epoch has the ordinal
of its writer, and the writer itself publishes that one or a later one. So each process publishes only how far it is
ahead of that ordinal: with the mark of its arrival in a tree of counters (``barriers.Arrivals``), which hands the
largest one on to the last to arrive. A process that is further ahead than a mark can express first writes its ordinal
under a separate key, ``ahead/<ordinal>``.

The mark also says whether the processes must **meet** at the agreed point before they save. They need not if each of
them would save the agreed step in any case, and if they are at the same step. A process asks for a meeting if it has a
snapshot that could be saved instead, or if its step and its ordinal are not as far apart as those of the writer of the
entry. Where they count steps differently, or pass only every k-th as a sync point, they meet and compare their steps:
each sends its step and a text, and the process that comes last compares the steps, merges the texts, and writes the
answer for all (``compare``).

If the training of a process **breaks off** after a notice, it passes no further sync point, and the others, which may
need it in each step, get no further either. The state that it handed to its last sync point may still be there. So it
writes a ``Stop`` with that ordinal, and that is the agreed point from then on. A process that is not there yet trains
on to it. One that is there, or has begun the next one, saves what it had handed at that point, if it still has it
(``Verdict.BEFORE``); if not, nobody saves. They always meet before they save.

Training ends with one more sync point, ``finish``. If an epoch was opened before a process got there, and the agreed
point comes after ``finish``, that is so in every process, because all pass the same sync points. Then there is nothing
to save (no sync point was given such a state), and the epoch ends as Retracted.

The steps of ``Member`` are generators. Each ``yield`` marks a place where the steps of another thread in between make a
difference. Threads run the generators to the end. A test may stop at each ``yield`` and check every order.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Callable, Iterable, Iterator, Sequence

from gracepoint.errors import AgreementError
from gracepoint.multihost.barriers import Arrivals
from gracepoint.multihost.bell import Bell
from gracepoint.multihost.ledger import (
    Agreed,
    Broken,
    Ended,
    Entry,
    Epoch,
    Event,
    Failed,
    Finished,
    Ledger,
    Opened,
    Settled,
    StartEntry,
    Stop,
)
from gracepoint.multihost.store import KeyExists, KeyValueStore, Pods, named


class Verdict(enum.Enum):
    """What a process does at a sync point of an open epoch."""

    WAIT = "wait"  # the agreed point is not known yet
    GO_ON = "go on"  # the agreed point comes later, or no epoch is open
    SAVE = "save"  # this is the agreed point
    BEFORE = "before"  # a process broke off: what was handed at the agreed point, before this one, is to be saved
    OVER = "over"  # training is finished, so this epoch has nothing to save


class Seat:
    """The state of one process in the agreement, which its two threads share.

    There is no lock. The training thread writes ``ordinal`` and ``finished``; the reading thread writes ``epoch`` and
    ``agreed``. The exception is ``end_epoch``: the training thread calls it at the agreed point, and the reading thread
    calls it if a drill failed before a point was agreed.
    """

    __slots__ = ("agreed", "epoch", "finished", "meets", "ordinal", "stopped")

    def __init__(self) -> None:
        self.ordinal = 0  # number of the latest sync point
        self.epoch: int | None = None  # number of the open epoch; None if no epoch is open
        self.agreed: int | None = None  # agreed sync point of the open epoch; None if it is not known
        self.meets = True  # whether all must meet there before they save; known with ``agreed``
        self.stopped = False  # whether a process broke off, which decided ``agreed``; known with it
        self.finished = False  # True if ``ordinal`` is the last sync point

    # The reading thread's steps.

    def open_epoch(self, epoch: int) -> None:
        """Holds the training thread from its next sync point on."""
        if self.epoch is not None:
            raise RuntimeError(f"epoch {epoch} was opened while epoch {self.epoch} is open")
        self.epoch = epoch

    def settle(self, agreed: int, *, meets: bool, stopped: bool = False) -> None:
        """Lets the training thread continue to the agreed sync point."""
        self.meets, self.stopped = meets, stopped  # before ``agreed``, which the training thread waits for
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
        agreed = self.agreed  # read once: it may be decided again meanwhile
        if agreed is None:
            return Verdict.WAIT
        if self.ordinal > agreed:
            if self.stopped:
                return Verdict.BEFORE
            raise RuntimeError(f"passed sync point {self.ordinal}, beyond the agreed {agreed}")
        if self.finished:
            return Verdict.OVER
        return Verdict.SAVE if self.ordinal == agreed else Verdict.GO_ON

    # Both threads.

    def end_epoch(self) -> None:
        """Ends the epoch. Training continues, and the next epoch may be opened."""
        # ``agreed`` first: once ``epoch`` is None, the reading thread may open the next epoch and write ``agreed``.
        self.agreed = None
        self.epoch = None


def join_marks(marks: Iterable[int]) -> int:
    """Returns the largest distance of some marks, and whether one asks for a meeting."""
    values = list(marks)
    return max(mark >> 1 for mark in values) << 1 | any(mark & 1 for mark in values)


class Member:
    """One process in the agreement: its seat, the entries that it has read, and the entries that it writes.

    Args:
        store: The key-value store that the gang shares.
        bell: The bell on the same store.
        process_index: The index of this process.
        process_count: The number of processes.
        tell: Called in the reading thread with each event that follows from an entry, before the next step.
        position: Returns the step that training has reached, and whether this process asks for a meeting. Called in the
            reading and in the timing thread.
        pods: Names of the pods by process index, for messages.

    Attributes:
        frozen: How ordinals are published. The upper bits of a mark are 1 plus the sync points by which a process is
            ahead of the epoch's ordinal. If they are all set, the process's ordinal is a key in the folder ``ahead``.
            The lowest bit says that the process asks for a meeting.
    """

    frozen = Arrivals(4, 7, join_marks)

    def __init__(
        self,
        store: KeyValueStore,
        bell: Bell,
        process_index: int,
        process_count: int,
        tell: Callable[[Event], None],
        position: Callable[[], tuple[int, bool]],
        pods: Pods = (),
    ) -> None:
        self.seat = Seat()
        self.ledger = Ledger()  # never changed, only replaced, by the reading thread
        self._store = store
        self._bell = bell
        self._process_index = process_index
        self._process_count = process_count
        self._tell = tell
        self._position = position
        self._pods = pods

    # The reading thread.

    def hear(self, number: int, entry: Entry) -> Iterator[None]:
        """Handles one entry of the bell."""
        self.ledger, events = self.ledger.hear(number, entry)
        for event in events:
            self._be_seated(event)
        yield
        opened = any(isinstance(event, Opened) for event in events)
        # The ordinal is read only now, after the epoch was opened: the protocol depends on this order (see the top).
        frozen, position = self.seat.ordinal, self._position() if opened else (0, False)
        for event in events:
            self._tell(event)
        if opened and (epoch := self._undecided()) is not None:
            yield from self._publish(epoch, frozen, *position)

    def _be_seated(self, event: Event) -> None:
        match event:
            case Opened(epoch):
                self.seat.open_epoch(epoch.number)
            case Settled(epoch) if self.seat.epoch == epoch.number and epoch.agreed is not None:
                self.seat.settle(epoch.agreed, meets=epoch.meets, stopped=epoch.stop is not None)
            case Broken(epoch) if self.seat.epoch == epoch.number and epoch.drill:
                self.seat.end_epoch()

    def _publish(self, epoch: Epoch, frozen: int, step: int, asks: bool) -> Iterator[None]:
        folder = self.folder(epoch.number)
        distance = min(1 + max(0, frozen - epoch.ordinal), self._far)
        mark = distance << 1 | (asks or step - frozen != epoch.step - epoch.ordinal)
        if distance == self._far:
            with contextlib.suppress(KeyExists):  # another process is as far
                self._store.set(f"{folder}/ahead/{frozen}", "")
            yield
        joined = self.frozen.arrive(self._store, f"{folder}/frozen", self._process_index, self._process_count, mark)
        yield
        if joined is not None:
            self._agree(epoch, joined)

    # The timing thread.

    def look(self, start_in_s: float, time_left_s: float) -> None:
        """Does what is due: starts an epoch, completes it in place of a process that died, or gives it up.

        In an open epoch this reads the store.

        Args:
            start_in_s: Seconds until the freeze must begin.
            time_left_s: Seconds until the open epoch must be over.
        """
        ledger = self.ledger
        if ledger.epoch is None:
            if ledger.standing and not ledger.finished and start_in_s <= 0:
                start = StartEntry(self._process_index, ledger.changed, self.seat.ordinal, self._position()[0])
                self._bell.ring(
                    start, unless=lambda there: isinstance(there, StartEntry) and there.heard == start.heard
                )
        elif (epoch := self._undecided()) is not None:
            self._complete(epoch, in_time=time_left_s > 0)

    def _complete(self, epoch: Epoch, *, in_time: bool) -> None:
        """Writes the agreed point of ``epoch`` to the bell if every process has published its ordinal.

        The last process to publish may have died before it did so. If ``in_time`` is False, the epoch fails instead of
        waiting for processes that have not published.
        """
        marks = self.frozen.marks(self._store.list(f"{self.folder(epoch.number)}/frozen"), self._process_count)
        if all(marks):
            self._agree(epoch, self.frozen.join(marks))
        elif not in_time:
            missing = named((i for i, mark in enumerate(marks) if not mark), self._pods)
            reason = f"waited until the time was over for {missing} of {len(marks)} to say at which sync point they are"
            self._decide(Failed(epoch.number, self._process_index, reason))

    def _agree(self, epoch: Epoch, mark: int) -> None:
        distance = mark >> 1
        latest = epoch.ordinal + distance - 1
        if distance == self._far:
            latest = max(map(int, self._store.list(f"{self.folder(epoch.number)}/ahead")))
        self._decide(Agreed(epoch.number, self.point(latest), bool(mark & 1)))

    def give_up(self, epoch: Epoch, reason: str) -> None:
        """Ends an epoch in which a process broke off: this process cannot save at that sync point."""
        failed = Failed(epoch.number, self._process_index, f"{named([self._process_index], self._pods)}: {reason}")
        self._bell.ring(failed, unless=lambda there: isinstance(there, Failed) and there.epoch == failed.epoch)

    @property
    def _far(self) -> int:
        """The distance that stands for itself and all larger ones. The exact ordinals are in the folder ``ahead``."""
        return self.frozen.most >> 1

    def _decide(self, decision: Agreed | Failed) -> None:
        self._bell.ring(
            decision, unless=lambda there: isinstance(there, Agreed | Failed) and there.epoch == decision.epoch
        )

    @staticmethod
    def point(latest: int) -> int:
        """Returns the first sync point that no process has begun, given the latest that any process has begun."""
        return latest + 1

    # The training thread.

    def stop(self, reason: str) -> Iterator[None]:
        """Says that this process broke off, and that what it handed to its last sync point is to be saved by all."""
        stop = Stop(self._process_index, self.seat.ordinal, self._position()[0], reason)
        self._bell.ring(stop, unless=lambda there: isinstance(there, Stop) and there.ordinal == stop.ordinal)
        yield

    def leave(self) -> Iterator[None]:
        """Leaves a drill, at the agreed point or because it failed here. The last process to leave ends it for all."""
        epoch = self.seat.epoch
        if epoch is None:
            return
        self.seat.end_epoch()
        yield
        if self._store.increment(f"{self.folder(epoch)}/left") == self._process_count:
            self._bell.ring(Ended(epoch))

    def finish(self) -> Iterator[None]:
        """Passes the last sync point, and writes that to the bell if no process has done so before."""
        ordinal, step = self.seat.ordinal, self._position()[0]
        self.seat.finish()
        yield
        if not self.ledger.finished:
            finished = Finished(self._process_index, ordinal, step)
            self._bell.ring(finished, unless=lambda there: isinstance(there, Finished))

    def folder(self, epoch: int) -> str:
        """Returns the folder of an epoch's keys. Each epoch has its own, because keys are written once."""
        return f"epoch/{epoch}"

    def _undecided(self) -> Epoch | None:
        ledger = self.ledger
        epoch = ledger.epoch
        return None if ledger.failed is not None or epoch is None or epoch.agreed is not None else epoch


def message(step: int, text: str) -> str:
    """Returns what a process sends to the others: its step, and a text."""
    return f"{step} {text}"


def compare(messages: Sequence[str], sync_point: int, merge: Callable[[list[str]], str]) -> str:
    """Returns the answer for all processes, which ``result`` reads.

    Args:
        messages: The messages of all processes, in the order of their indices.
        sync_point: Number of the sync point at which they are.
        merge: Called with the texts of the messages, if all steps are equal. An ``AgreementError`` that it raises is
            raised in all processes.
    """
    parts = [each.split(" ", 1) for each in messages]
    first = parts[0][0]
    for process, (step, _) in enumerate(parts):
        if step != first:
            wrong = (
                f"at sync point {sync_point} process 0 is at step {first} and process {process} at step {step}: every "
                "process must call step() once for each step, with the same number"
            )
            return json.dumps({"wrong": wrong})
    try:
        return json.dumps({"merged": merge([text for _, text in parts])})
    except AgreementError as error:
        return json.dumps({"wrong": str(error)})


def result(answer: str) -> str:
    """Returns what ``merge`` returned.

    Raises:
        AgreementError: Two processes are at different steps, or ``merge`` raised this error.
    """
    value: dict[str, str] = json.loads(answer)
    if "wrong" in value:
        raise AgreementError(value["wrong"])
    return value["merged"]
