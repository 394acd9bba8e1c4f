"""The entries of the bell, the log that all processes read in the same order.

An entry is written once, by one process, and never changes. Its meaning depends only on the entries before it, so every
process comes to the same result (``ledger``).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from gracepoint.wire.frames import same_revision


@dataclasses.dataclass(frozen=True)
class NoticeEntry:
    """Something is going to end a pod of this job, or its deadline has moved.

    Attributes:
        by: The process that was told.
        origin: Where the notice comes from. A later notice of the same origin replaces it.
        remaining_s: Seconds until the deadline, when this was written.
        text: What else is known. The agreement does not read it.
        drill: True if the disruption is only rehearsed, and training goes on.
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
        """Returns True if this repeats ``other``. None if only the deadlines can tell, as one has no revision."""
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
    found: dict[str, Any] = json.loads(text)
    entry: Entry = _KINDS[found.pop("kind")](**found)
    return entry
