"""The entries of the bell, and the state that follows from them: plain data, no threads, no clock, no network.

An entry is written once, by one process, and never changes. Its meaning depends only on the entries before it. Every
process reads the same entries in the same order and so comes to the same result: which notices stand, whether
an epoch is open, and what was agreed. The processes do not negotiate. A process that wants to change something writes
an entry, and the order of the log decides:

* A ``StartEntry`` opens an epoch if a notice stands, no epoch is open, and its writer had read the newest notice or
  retraction. Otherwise it has no effect, and a process that finds that the freeze must still begin writes another one.
* A ``NoticeEntry`` that ``starts_at`` an ordinal is a notice and a start in one, which has read everything before it.
* A ``NoticeEntry`` that repeats a standing notice, by its revision, has no effect. Two processes that are notified at
  the same time may both write it, and a ``StartEntry`` between the two entries stays valid.
* A ``Retract`` before the ``StartEntry`` removes the notice. After the ``StartEntry`` it has no effect, and the epoch
  continues.
* The first ``Agreed`` or ``Failed`` decides the epoch.
* A ``Stop`` after a notice decides it again, also if a later sync point was agreed: nobody gets there without the
  process that wrote it. It opens an epoch if none is open. After it, a process that cannot save at that sync point any
  more breaks the epoch by ``Failed``, and so does a ``Stop`` at another sync point.
* After the first ``Finished`` no epoch is opened. All processes pass the same sync points, so the agreed point would be
  after the end of training in all of them. Notices that stand then, or come later, are moot.
* After the first ``Gone`` an epoch fails as soon as it is opened.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from gracepoint.wire.frames import same_revision


@dataclasses.dataclass(frozen=True)
class NoticeEntry:
    """Something is going to end a pod of this job, or its deadline has moved.

    Attributes:
        by: The process that was notified.
        origin: Where the notice comes from. A later notice of the same origin replaces it.
        remaining_s: Seconds until the deadline, when this was written.
        text: What else is known. The agreement does not read it.
        drill: True if the disruption is only rehearsed, and training continues.
        once: True if the origin is a name that is never used again once its notice is dealt with.
        revision: Identifies the deadline, as in ``wire.frames.Notice``. None if it is not known.
        starts_at: If the freeze begins with this entry, the ordinal of its writer, as in ``StartEntry``. None if it
            begins later.
        step: The step of its writer then.
    """

    by: int
    origin: str
    remaining_s: float
    text: str
    drill: bool
    once: bool
    revision: int | None = None
    starts_at: int | None = None
    step: int = 0

    def repeats(self, other: NoticeEntry) -> bool | None:
        """Returns True if this repeats ``other``. None if only the deadlines can show that, as one has no revision."""
        if (self.origin, self.drill) != (other.origin, other.drill):
            return False
        return same_revision(self.revision, other.revision)


@dataclasses.dataclass(frozen=True)
class Retract:
    """The signal of a notice went away. Has no effect after a ``StartEntry``."""

    by: int
    origin: str
    reason: str


@dataclasses.dataclass(frozen=True)
class StartEntry:
    """The freeze begins. The entry's number becomes the epoch's number.

    Attributes:
        by: The process that started it.
        heard: Number of the newest notice or retraction that it had read. If there is a newer one, this entry has no
            effect.
        ordinal: The latest sync point that it had begun. The others publish only how far they are ahead of it.
        step: The step that it had reached then.
    """

    by: int
    heard: int
    ordinal: int
    step: int


@dataclasses.dataclass(frozen=True)
class Agreed:
    """Every process has published its ordinal in this epoch.

    Attributes:
        epoch: The epoch.
        point: The sync point at which all save.
        meets: Whether they must meet there before they save.
    """

    epoch: int
    point: int
    meets: bool


@dataclasses.dataclass(frozen=True)
class Failed:
    """There is no agreement in this epoch."""

    epoch: int
    by: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Stop:
    """The training of a process broke off after a notice, and the state of its last sync point is still there.

    All processes save at that sync point. It opens an epoch if none is open.

    Attributes:
        by: The process.
        ordinal: The latest sync point that it had begun. It begins no other one.
        step: The step that it had reached then.
        reason: Why it broke off.
    """

    by: int
    ordinal: int
    step: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """Every process has left the agreed point of this epoch, a drill, and trains on."""

    epoch: int


@dataclasses.dataclass(frozen=True)
class Finished:
    """A process has passed its last sync point: nothing is saved any more. Written by the first one.

    Attributes:
        by: The process.
        ordinal: The latest sync point before that one.
        step: The step that it had reached then.
    """

    by: int
    ordinal: int = 0
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Gone:
    """A process has broken off training: there is no agreement without it. Written by the first one.

    Attributes:
        by: The process.
        reason: Why.
        ordinal: As ``Finished``.
        step: As ``Finished``.
    """

    by: int
    reason: str
    ordinal: int = 0
    step: int = 0


@dataclasses.dataclass(frozen=True)
class Closing:
    """A process stops listening. Says nothing about training. Written by the first one."""

    by: int


Entry = NoticeEntry | Retract | StartEntry | Agreed | Failed | Stop | Ended | Finished | Gone | Closing
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (NoticeEntry, Retract, StartEntry, Agreed, Failed, Stop, Ended, Finished, Gone, Closing)
}


def to_json(entry: Entry) -> str:
    """Returns an entry as it is written in the log."""
    return json.dumps({"kind": type(entry).__name__, **vars(entry)})


def from_json(text: str) -> Entry:
    """Reads what ``to_json`` returned in another process, which has the same version of this library."""
    fields: dict[str, Any] = json.loads(text)
    entry: Entry = _KINDS[fields.pop("kind")](**fields)
    return entry


@dataclasses.dataclass(frozen=True)
class Epoch:
    """An epoch. It begins with an entry that starts it.

    Attributes:
        number: The number of that entry in the log.
        drill: True if the disruption is only rehearsed. Then training continues after the epoch.
        origins: The origins of the notices for which the epoch was opened.
        ordinal: A sync point that the process which wrote that entry had begun.
        step: The step that this process had reached then.
        agreed: The agreed sync point. None while it is not known.
        meets: Whether the processes must meet there before they save.
        stop: What decided ``agreed``, if a process broke off. None if all processes train on to it.
    """

    number: int
    drill: bool
    origins: frozenset[str]
    ordinal: int
    step: int
    agreed: int | None = None
    meets: bool = True
    stop: Stop | None = None


@dataclasses.dataclass(frozen=True)
class Noticed:
    """A notice stands, or its deadline has moved."""

    notice: NoticeEntry


@dataclasses.dataclass(frozen=True)
class Retracted:
    """A notice was retracted."""

    notice: NoticeEntry
    by: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Moot:
    """Notices that have no effect because training has ended. ``by`` is the process that wrote the entry."""

    notices: tuple[NoticeEntry, ...]
    by: int


@dataclasses.dataclass(frozen=True)
class Opened:
    """The freeze begins."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class Settled:
    """The agreed sync point is known."""

    epoch: Epoch


@dataclasses.dataclass(frozen=True)
class Broken:
    """The epoch failed. If it is a drill, training continues."""

    epoch: Epoch
    reason: str


@dataclasses.dataclass(frozen=True)
class Closed:
    """All processes have left the epoch, a drill. Its notices are removed."""

    epoch: Epoch


Event = Noticed | Retracted | Moot | Opened | Settled | Broken | Closed


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The state after a number of entries.

    Attributes:
        standing: Notices that stand, by origin.
        changed: Number of the newest entry that changed ``standing``. -1 if there is none.
        epoch: The open epoch. None if no epoch is open.
        finished: True if a process has passed its last sync point.
        gone: The first process that broke off, and why. None if no process has.
        left: The first entry which says that a process trains no more. None if there is none.
        failed: Why an epoch that is not a drill failed. All processes leave then. None if none failed.
    """

    standing: Mapping[str, NoticeEntry] = dataclasses.field(default_factory=dict)
    changed: int = -1
    epoch: Epoch | None = None
    finished: bool = False
    gone: Gone | None = None
    left: Finished | Gone | None = None
    failed: str | None = None
    _dealt_with: frozenset[str] = frozenset()  # origins that are never used again

    def hear(self, number: int, entry: Entry) -> tuple[Ledger, tuple[Event, ...]]:
        """Returns the state after one more entry, and the events that follow. No events if it has no effect."""
        match entry:
            case NoticeEntry():
                return self._noticed(number, entry)
            case Retract():
                return self._retracted(number, entry)
            case StartEntry():
                return self._started(number, entry)
            case Agreed() if self._undecided(entry.epoch):
                assert self.epoch is not None
                epoch = dataclasses.replace(self.epoch, agreed=entry.point, meets=entry.meets)
                return dataclasses.replace(self, epoch=epoch), (Settled(epoch),)
            case Failed() if self._undecided(entry.epoch) or self._stops(entry.epoch):
                return self._broken(entry.reason)
            case Stop():
                return self._stopped(number, entry)
            case Ended() if self.epoch is not None and self.epoch.number == entry.epoch:
                return self._without(self.epoch), (Closed(self.epoch),)
            case Finished() if not self.finished:
                return self._finished(number, entry)
            case Gone() if self.gone is None:
                after = dataclasses.replace(self, gone=entry, left=self.left or entry)
                return after._after_gone(entry)  # noqa: SLF001  of this class
            case Agreed() | Failed() | Ended() | Finished() | Gone() | Closing():
                return self, ()

    def _undecided(self, epoch: int) -> bool:
        current = self.epoch
        return self.failed is None and current is not None and (current.number, current.agreed) == (epoch, None)

    def _stops(self, epoch: int) -> bool:
        current = self.epoch
        return self.failed is None and current is not None and current.number == epoch and current.stop is not None

    def _noticed(self, number: int, notice: NoticeEntry) -> tuple[Ledger, tuple[Event, ...]]:
        if notice.origin in self._dealt_with:
            return self, ()
        before = self.standing.get(notice.origin)
        if before is not None and notice.repeats(before):
            return self, ()
        if self.finished and self.epoch is None:
            return self._dropping([notice]), (Moot((notice,), notice.by),)
        standing = {**self.standing, notice.origin: notice}
        after = dataclasses.replace(self, standing=standing, changed=number)
        if notice.starts_at is None:
            return after, (Noticed(notice),)
        after, events = after._opened(number, notice.starts_at, notice.step)  # noqa: SLF001  of this class
        return after, (Noticed(notice), *events)

    def _retracted(self, number: int, entry: Retract) -> tuple[Ledger, tuple[Event, ...]]:
        notice = self.standing.get(entry.origin)
        if notice is None or (self.epoch is not None and entry.origin in self.epoch.origins):
            return self, ()
        after = dataclasses.replace(self._dropping([notice]), changed=number)
        return after, (Retracted(notice, entry.by, entry.reason),)

    def _started(self, number: int, entry: StartEntry) -> tuple[Ledger, tuple[Event, ...]]:
        if not self.standing or entry.heard != self.changed:
            return self, ()
        return self._opened(number, entry.ordinal, entry.step)

    def _opened(self, number: int, ordinal: int, step: int) -> tuple[Ledger, tuple[Event, ...]]:
        if self.epoch is not None or self.finished or self.failed is not None:
            return self, ()
        epoch = Epoch(number, all(n.drill for n in self.standing.values()), frozenset(self.standing), ordinal, step)
        after = dataclasses.replace(self, epoch=epoch)
        if self.gone is None:
            return after, (Opened(epoch),)
        after, events = after._after_gone(self.gone)  # noqa: SLF001  of this class
        return after, (Opened(epoch), *events)

    def _stopped(self, number: int, entry: Stop) -> tuple[Ledger, tuple[Event, ...]]:
        after: Ledger = self
        events: tuple[Event, ...] = ()
        if self.epoch is None and any(not notice.drill for notice in self.standing.values()):
            after, events = self._opened(number, entry.ordinal, entry.step)
        epoch = after.epoch
        if epoch is None or epoch.drill or after.failed is not None:
            return after, events
        if epoch.stop is None:
            # If all were to save there anyway, some may have begun without a meeting.
            meets = epoch.meets or epoch.agreed != entry.ordinal
            settled = dataclasses.replace(epoch, agreed=entry.ordinal, meets=meets, stop=entry)
            return dataclasses.replace(after, epoch=settled), (*events, Settled(settled))
        if epoch.agreed == entry.ordinal:
            return after, events
        return after._broken(  # noqa: SLF001  of this class
            f"process {epoch.stop.by} broke off after sync point {epoch.agreed} ({epoch.stop.reason}), and process "
            f"{entry.by} after sync point {entry.ordinal} ({entry.reason}): no state is left in all processes"
        )

    def _finished(self, number: int, entry: Finished) -> tuple[Ledger, tuple[Event, ...]]:
        after = dataclasses.replace(self, finished=True, left=self.left or entry)
        if self.epoch is not None or not self.standing:
            return after, ()
        notices = tuple(self.standing.values())
        remaining = after._dropping(notices)  # noqa: SLF001  of this class
        return dataclasses.replace(remaining, changed=number), (Moot(notices, entry.by),)

    def _after_gone(self, gone: Gone) -> tuple[Ledger, tuple[Event, ...]]:
        """Breaks the open epoch, because an agreed point is not reached without this process.

        A drill whose point is agreed is not broken here. It fails at the agreed point, and training continues.
        """
        if self.failed is not None or self.epoch is None or (self.epoch.drill and self.epoch.agreed is not None):
            return self, ()
        return self._broken(f"process {gone.by} broke off: {gone.reason}")

    def _broken(self, reason: str) -> tuple[Ledger, tuple[Event, ...]]:
        epoch = self.epoch
        assert epoch is not None
        after = self._without(epoch) if epoch.drill else dataclasses.replace(self, failed=reason)
        return after, (Broken(epoch, reason),)

    def _without(self, epoch: Epoch) -> Ledger:
        dealt_with = [n for n in self.standing.values() if n.origin in epoch.origins]
        return dataclasses.replace(self._dropping(dealt_with), epoch=None)

    def _dropping(self, notices: list[NoticeEntry] | tuple[NoticeEntry, ...]) -> Ledger:
        origins = {n.origin for n in notices}
        return dataclasses.replace(
            self,
            standing={o: n for o, n in self.standing.items() if o not in origins},
            _dealt_with=self._dealt_with | {n.origin for n in notices if n.once},
        )
