"""The words of the bell: what a process may write into the log that all processes read in the same order.

An entry is written once, by one process, and never changes. What it means depends on what stands before it alone,
so every process takes it in the same way (``ledger``).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from gracepoint.wire.messages import same_revision


@dataclasses.dataclass(frozen=True)
class NoticeEntry:
    """Something is going to end this gang; or the newest word on what was told before, as when a deadline moves.

    Attributes:
        by: The process that was told.
        origin: Whose word this is; a later notice of the same origin takes its place.
        remaining_s: Until the deadline, when this was written.
        text: What else is known; nothing here looks into it.
        drill: True: to be rehearsed, and training goes on.
        once: True: the origin is a name that is never used again once its notice is dealt with.
        revision: Which deadline this speaks of, as ``wire.messages.Notice`` has it; None: that was not told.
    """

    by: int
    origin: str
    remaining_s: float
    text: str
    drill: bool
    once: bool
    revision: int | None = None

    def repeats(self, other: NoticeEntry) -> bool | None:
        """True if this says what ``other`` says; None if only the deadlines can tell, as one has no revision."""
        if (self.origin, self.drill) != (other.origin, other.drill):
            return False
        return same_revision(self.revision, other.revision)


@dataclasses.dataclass(frozen=True)
class Retract:
    """The signal of a notice went away. Counts only if no ``Start`` stands before it."""

    by: int
    origin: str
    reason: str


@dataclasses.dataclass(frozen=True)
class StartEntry:
    """It is time: the freeze begins, and the entry's number becomes the epoch's.

    Attributes:
        by: The process that found so.
        heard: Number of the newest notice or retraction it had read. If there is another one by now, the start
            was decided on old news and is void.
    """

    by: int
    heard: int


@dataclasses.dataclass(frozen=True)
class Agreed:
    """Every process has published its ordinal in this epoch, and these are they, by process index."""

    epoch: int
    ordinals: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Failed:
    """There will be no agreement in this epoch."""

    epoch: int
    by: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """Every process has left the agreed point of this epoch (a drill) and trains on."""

    epoch: int


@dataclasses.dataclass(frozen=True)
class Finished:
    """The first process has passed its last sync point: nothing will be saved any more."""

    by: int


@dataclasses.dataclass(frozen=True)
class Gone:
    """The first process has broken off training: there is no agreement without it."""

    by: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Closing:
    """The first process stops to listen. Says nothing of training."""

    by: int


Entry = NoticeEntry | Retract | StartEntry | Agreed | Failed | Ended | Finished | Gone | Closing
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (NoticeEntry, Retract, StartEntry, Agreed, Failed, Ended, Finished, Gone, Closing)
}


def to_json(entry: Entry) -> str:
    """One entry as it stands in the log."""
    return json.dumps({"kind": type(entry).__name__, **vars(entry)})


def from_json(text: str) -> Entry:
    """Reads what ``to_json`` of another process (of this same library) wrote."""
    found: dict[str, Any] = json.loads(text)
    entry: Entry = _KINDS[found.pop("kind")](**found)
    return entry
