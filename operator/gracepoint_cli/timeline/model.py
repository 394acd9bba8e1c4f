"""What a timeline contains. Times are seconds since the signal. Pure data."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any


class SpanKind(StrEnum):
    """What happens in a span. Each kind has a colour."""

    TRAINING = "training"
    NOTICE = "notice"
    FREEZE = "freeze and agree"
    DRAIN = "drain"
    SAVE = "save"
    COMMIT = "commit"
    EXIT = "exit"
    PODS = "pods start"
    IMPORTS = "imports"
    JOIN = "join"
    RESTORE = "restore"
    COMPILE = "compile"


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that takes time."""

    lane: str
    start_s: float
    end_s: float
    kind: SpanKind
    text: str


@dataclasses.dataclass(frozen=True)
class TimelineMoment:
    """Something that happens at one time."""

    lane: str
    at_s: float
    text: str


@dataclasses.dataclass(frozen=True)
class Loss:
    """The loss of one training step of one run."""

    run: str
    step: int
    value: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """One preemption.

    Attributes:
        title: Title of the picture.
        facts: What came out, in short sentences.
        lanes: Names of the lanes, from the top.
        deadline_s: When the first pod is expected to be killed. None if it is not known.
        losses: Losses of one run or of several, to be drawn over each other. Empty if they are not known.
        saved_step: The training step that was saved. None if none was.
    """

    title: str
    facts: tuple[str, ...]
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]
    moments: tuple[TimelineMoment, ...]
    deadline_s: float | None
    losses: tuple[Loss, ...] = ()
    saved_step: int | None = None

    @property
    def bounds(self) -> tuple[float, float]:
        """Begin and end of everything, with a little room at both sides."""
        times = [0.0, *(span.start_s for span in self.spans), *(span.end_s for span in self.spans)]
        times += [moment.at_s for moment in self.moments]
        times += [] if self.deadline_s is None else [self.deadline_s]
        first, last = min(times), max(times)
        room = max(last - first, 0.1) * 0.03
        return first - room, last + room

    @property
    def events(self) -> list[TimelineMoment]:
        """Returns what happened, in order: moments, ends of spans with how long they took, the deadline."""
        found = list(self.moments)
        found += [TimelineMoment(s.lane, s.end_s, f"{s.text} ({s.end_s - s.start_s:.3f} s)") for s in self.spans]
        if self.deadline_s is not None:
            found.append(TimelineMoment("", self.deadline_s, "deadline"))
        return sorted(found, key=lambda event: event.at_s)

    def to_json(self) -> dict[str, Any]:
        """Returns the timeline as JSON."""
        return {
            "title": self.title,
            "facts": list(self.facts),
            "lanes": list(self.lanes),
            "deadlineSeconds": self.deadline_s,
            "spans": [
                {"lane": s.lane, "start": s.start_s, "end": s.end_s, "kind": str(s.kind), "text": s.text}
                for s in self.spans
            ],
            "moments": [{"lane": m.lane, "at": m.at_s, "text": m.text} for m in self.moments],
        }
