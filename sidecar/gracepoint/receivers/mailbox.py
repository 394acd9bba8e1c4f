"""The one place where notices arrive, whoever brought them.

Any thread may post: the subscription's, the SIGTERM reader's, a metadata watcher's. What is posted or retracted
is a receiver's word; the listener hands it to the other processes, and tells by ``take`` and ``drop`` what all
of them go by (``notices``). Every field is guarded by one lock; listeners are called in the poster's thread,
outside of the lock.

What counts when several are there: each origin's latest word, and of those the earliest deadline.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable
from typing import Protocol

from gracepoint.errors import WireError
from gracepoint.wire.messages import same_revision

SIGTERM = "SIGTERM"

#: A deadline that moves by less is the same one, told again, where the notice has no revision.
SAME_DEADLINE_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disruption:
    """Something is going to end this gang.

    Attributes:
        preemption: Name of the operator's Preemption; empty where it was learnt without the operator.
        cause: Why, in the operator's words.
        signal: What was seen.
        remaining_s: Until the deadline, at the moment of posting.
        drill: True: nothing will end, it is to be rehearsed.
        revision: Which deadline this speaks of, as ``wire.messages.Notice`` has it; None: that was not told.
    """

    preemption: str
    cause: str
    signal: str
    remaining_s: float
    drill: bool = False
    revision: int | None = None

    @property
    def origin(self) -> str:
        """Whose word this is: a later one of the same origin takes its place."""
        return self.preemption or self.signal

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Disruption:
        """Reads what ``to_json`` of another process (of this same library) wrote.

        Raises:
            WireError: It did not.
        """
        try:
            found = cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise WireError(f"expected a disruption, found {text[:80]!r}: {error}") from error
        return found


class Listener:
    """Whom the mailbox tells of what receivers bring; each call in the receiver's thread."""

    def posted(self, disruption: Disruption) -> None:
        """A notice has come, or its deadline has moved."""

    def retracted(self, origin: str, reason: str) -> None:
        """The signal of a notice went away."""


class Receiver(Protocol):
    """Brings notices from a source that ``attach`` is given, such as a test or another scheduler."""

    def start(self, mailbox: Mailbox) -> None:
        """Starts to listen. From now on any thread may ``post`` notices into the mailbox and ``retract`` them."""

    def close(self) -> None:
        """Ends all threads. Safe to repeat."""


@dataclasses.dataclass(frozen=True)
class _Post:
    disruption: Disruption
    deadline_s: float  # on the clock
    told_deadline_s: float  # as the others have it
    told_revision: int | None  # likewise
    first_at_s: float


class Mailbox:
    """Thread-safe; see the module.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._posts: dict[str, _Post] = {}  # by origin
        self._over: set[str] = set()  # preemptions that have been dealt with: their names do not come back
        self._listener: Listener | None = None

    def listen(self, listener: Listener) -> None:
        """Has ``listener`` told of what is here already and of everything later."""
        with self._lock:
            self._listener = listener
            now_s = self._clock()
            here = [
                dataclasses.replace(post.disruption, remaining_s=post.deadline_s - now_s)
                for post in self._posts.values()
            ]
        for disruption in here:
            listener.posted(disruption)

    # Receivers.

    def post(self, disruption: Disruption) -> None:
        """Takes a notice, or the newest word on one that is here."""
        with self._lock:
            if disruption.origin in self._over or not self._keep(disruption.origin, disruption):
                return
            listener = self._listener
        if listener is not None:
            listener.posted(disruption)

    def retract(self, origin: str, reason: str = "the signal went away") -> None:
        """Asks to take back what an origin has posted: a preemption's name, or the signal of one without a name.

        It is done unless the freeze has begun.
        """
        with self._lock:
            listener = self._listener
            if listener is None:
                self._posts.pop(origin, None)
        if listener is not None:
            listener.retracted(origin, reason)

    # What all processes go by.

    def take(self, origin: str, disruption: Disruption) -> None:
        """Notes what another process was told."""
        with self._lock:
            self._keep(origin, disruption)

    def drop(self, origin: str) -> Disruption | None:
        """Removes a notice that is dealt with and returns it. The preemption of that name is over; None if unknown."""
        with self._lock:
            post = self._posts.pop(origin, None)
            if post is not None and post.disruption.preemption:
                self._over.add(origin)
        return None if post is None else post.disruption

    # Readers.

    def find(self, origin: str) -> Disruption | None:
        """The notice of this origin that is here."""
        with self._lock:
            post = self._posts.get(origin)
        return None if post is None else post.disruption

    def named(self) -> list[Disruption]:
        """All that the operator has a name for."""
        with self._lock:
            return [post.disruption for post in self._posts.values() if post.disruption.preemption]

    @property
    def current(self) -> Disruption | None:
        """What to speak of: the operator's notice before anything without a name, then the most urgent; no drill."""
        return self._foremost(drill=False)

    @property
    def current_drill(self) -> Disruption | None:
        """The same among drills."""
        return self._foremost(drill=True)

    @property
    def first_at_s(self) -> float | None:
        """When the first of the notices that are here came, on the clock."""
        with self._lock:
            return min((post.first_at_s for post in self._posts.values()), default=None)

    def remaining_s(self) -> float:
        """Seconds until the earliest deadline, negative after it; infinite while there is no notice."""
        with self._lock:
            earliest_s = min((post.deadline_s for post in self._posts.values()), default=math.inf)
        return earliest_s - self._clock()

    def _foremost(self, *, drill: bool) -> Disruption | None:
        with self._lock:
            found = [post for post in self._posts.values() if post.disruption.drill is drill]
        first = min(found, key=lambda post: (not post.disruption.preemption, post.deadline_s), default=None)
        return None if first is None else first.disruption

    def _keep(self, origin: str, disruption: Disruption) -> bool:
        """Notes the origin's newest word; False if that is no news to the others."""
        now_s = self._clock()
        deadline_s = now_s + disruption.remaining_s
        before = self._posts.get(origin)
        if before is None:
            self._posts[origin] = _Post(disruption, deadline_s, deadline_s, disruption.revision, now_s)
            return True
        same = same_revision(before.told_revision, disruption.revision)
        if same:
            # Told again, perhaps late: what came on the shorter way is nearer to the truth.
            deadline_s = min(deadline_s, before.deadline_s)
        elif same is None:
            same = abs(before.told_deadline_s - deadline_s) <= SAME_DEADLINE_S
        known = same and before.disruption.drill is disruption.drill
        told = before if known else None
        self._posts[origin] = _Post(
            disruption,
            deadline_s,
            deadline_s if told is None else told.told_deadline_s,
            disruption.revision if told is None or told.told_revision is None else told.told_revision,
            before.first_at_s,
        )
        return not known
