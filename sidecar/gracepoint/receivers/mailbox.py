"""Where the notices and hints of all receivers arrive.

``Mailbox``: any thread may post, be it the subscription's, the SIGTERM reader's or a metadata watcher's. The listener
passes what receivers post and retract to the other processes. What all processes go by comes back through ``take`` and
``drop`` (``preemption.observer``). If there are several notices, the latest of each origin counts, and of those the
earliest deadline. One lock guards every field. Listeners are called in the poster's thread, outside the lock.

``Hints``: signs that a disruption may be near. Training continues, and the session prepares for a save. The
subscription's thread calls ``take`` and the training thread calls ``due``; they share one event.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from gracepoint.errors import WireError
from gracepoint.wire.frames import Hint, same_revision

SIGTERM, SIGHUP = "SIGTERM", "SIGHUP"
#: The cause of a notice about a node that is gone, as in the operator's ``gracepoint_operator.signals.Cause``.
NODE_LOST = "NodeLost"

#: If a notice has no revision, a deadline that moves by this or less counts as the same one, repeated.
SAME_DEADLINE_S = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disruption:
    """Something is going to end a pod of this job.

    Attributes:
        preemption: Name of the operator's Preemption object. Empty if the operator does not know of the disruption.
        cause: Why, as in ``wire.frames.Notice``.
        signal: What was seen.
        remaining_s: Seconds until the deadline, at the moment of posting.
        drill: True if the disruption is only rehearsed.
        revision: Identifies the deadline, as in ``wire.frames.Notice``. None if it is not known.
        nodes: Names of the nodes that are concerned. Empty if they are not known.
    """

    preemption: str
    cause: str
    signal: str
    remaining_s: float
    drill: bool = False
    revision: int | None = None
    nodes: tuple[str, ...] = ()

    @property
    def origin(self) -> str:
        """Where the notice comes from. A later notice of the same origin replaces it."""
        return self.preemption or self.signal

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Disruption:
        """Reads what ``to_json`` returned in another process, which has the same version of this library.

        Raises:
            WireError: The text is something else.
        """
        try:
            fields = json.loads(text)
            disruption = cls(**fields | {"nodes": tuple(fields["nodes"])})
        except (TypeError, ValueError, LookupError) as error:
            raise WireError(f"expected a disruption, found {text[:80]!r}: {error}") from error
        return disruption


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
    told_deadline_s: float  # the one that the other processes know, on the clock
    told_revision: int | None  # the one that the other processes know; None if they know none
    first_at_s: float  # when the origin's first notice came, on the clock


class Mailbox:
    """Holds the notices of all receivers. Thread-safe.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._posts: dict[str, _Post] = {}  # by origin
        self._over: set[str] = set()  # names of preemptions that are over; they are not used again
        self._on_posted: Callable[[Disruption], None] | None = None
        self._on_retracted: Callable[[str, str], None] | None = None

    def listen(self, on_posted: Callable[[Disruption], None], on_retracted: Callable[[str, str], None]) -> None:
        """Has what is in the mailbox already, and from now on what comes, passed on, in the receiver's thread.

        Args:
            on_posted: Called when a notice has come, or its deadline has moved.
            on_retracted: Called with the origin and the reason when the signal of a notice went away.
        """
        with self._lock:
            self._on_posted, self._on_retracted = on_posted, on_retracted
            now_s = self._clock()
            here = [
                dataclasses.replace(post.disruption, remaining_s=post.deadline_s - now_s)
                for post in self._posts.values()
            ]
        for disruption in here:
            on_posted(disruption)

    # Receivers.

    def post(self, disruption: Disruption) -> None:
        """Takes a notice, which replaces an earlier one of the same origin."""
        with self._lock:
            if disruption.origin in self._over or not self._keep(disruption.origin, disruption):
                return
            on_posted = self._on_posted
        if on_posted is not None:
            on_posted(disruption)

    def retract(self, origin: str, reason: str = "the signal went away") -> None:
        """Asks to remove a notice. It is removed unless the freeze has begun.

        Args:
            origin: Name of the preemption, or the signal if the notice has no name.
            reason: Why, as text.
        """
        with self._lock:
            on_retracted = self._on_retracted
            if on_retracted is None:
                self._posts.pop(origin, None)
        if on_retracted is not None:
            on_retracted(origin, reason)

    # What all processes go by.

    def take(self, origin: str, disruption: Disruption) -> None:
        """Takes a notice that all processes go by."""
        with self._lock:
            self._keep(origin, disruption)

    def drop(self, origin: str) -> Disruption | None:
        """Removes a notice that is dealt with, and returns it. None if there is none.

        If the notice has a name, that preemption is over: receivers' later posts of the name are ignored.
        """
        with self._lock:
            post = self._posts.pop(origin, None)
            if post is not None and post.disruption.preemption:
                self._over.add(origin)
        return None if post is None else post.disruption

    # Readers.

    def find(self, origin: str) -> Disruption | None:
        """Returns the notice of this origin. None if there is none."""
        with self._lock:
            post = self._posts.get(origin)
        return None if post is None else post.disruption

    @property
    def is_signalled(self) -> bool:
        """True if a process of the job got SIGTERM or SIGHUP. Other processes of its pod may have got it, too."""
        with self._lock:
            return any(post.disruption.signal in (SIGTERM, SIGHUP) for post in self._posts.values())

    def leaving(self, own_node: str | None) -> frozenset[str]:
        """Returns the names of the nodes that may go away: a notice that names none may be about the own node."""
        own = () if own_node is None else (own_node,)
        with self._lock:
            return frozenset(node for post in self._posts.values() for node in post.disruption.nodes or own)

    def named(self) -> list[Disruption]:
        """Returns all notices that have a name."""
        with self._lock:
            return [post.disruption for post in self._posts.values() if post.disruption.preemption]

    @property
    def current(self) -> Disruption | None:
        """The notice to report on: one with a name if there is one, and of those the most urgent. No drill."""
        return self._foremost(drill=False)

    @property
    def current_drill(self) -> Disruption | None:
        """The same for drills."""
        return self._foremost(drill=True)

    @property
    def first_at_s(self) -> float | None:
        """When the first of the current notices came, on the clock. None if there is none."""
        with self._lock:
            return min((post.first_at_s for post in self._posts.values()), default=None)

    def remaining_s(self) -> float:
        """Returns the seconds until the earliest deadline: negative after it, infinite without a notice."""
        with self._lock:
            earliest_s = min((post.deadline_s for post in self._posts.values()), default=math.inf)
        return earliest_s - self._clock()

    def standing(self, retracted: Collection[str]) -> dict[str, tuple[Disruption, float]]:
        """Returns, by origin, the notices that are no drills and not retracted, with their deadlines on the clock."""
        with self._lock:
            return {
                origin: (post.disruption, post.deadline_s)
                for origin, post in self._posts.items()
                if origin not in retracted and not post.disruption.drill
            }

    def _foremost(self, *, drill: bool) -> Disruption | None:
        with self._lock:
            posts = [post for post in self._posts.values() if post.disruption.drill is drill]
        first = min(posts, key=lambda post: (not post.disruption.preemption, post.deadline_s), default=None)
        return None if first is None else first.disruption

    def _keep(self, origin: str, disruption: Disruption) -> bool:
        """Keeps the origin's newest notice. Returns False if it is no news to the other processes."""
        now_s = self._clock()
        deadline_s = now_s + disruption.remaining_s
        before = self._posts.get(origin)
        if before is None:
            self._posts[origin] = _Post(disruption, deadline_s, deadline_s, disruption.revision, now_s)
            return True
        same = same_revision(before.told_revision, disruption.revision)
        if same:
            # The same notice again, perhaps delayed: the earlier deadline is the more exact one.
            deadline_s = min(deadline_s, before.deadline_s)
        elif same is None:
            same = abs(before.told_deadline_s - deadline_s) <= SAME_DEADLINE_S
        repeated = same and before.disruption.drill is disruption.drill
        previous = before if repeated else None
        self._posts[origin] = _Post(
            disruption,
            deadline_s,
            deadline_s if previous is None else previous.told_deadline_s,
            disruption.revision if previous is None or previous.told_revision is None else previous.told_revision,
            before.first_at_s,
        )
        return not repeated


logger = logging.getLogger(__name__)

#: The session prepares no more often than this, so an autoscaler that often changes its mind costs little.
LEAST_PAUSE_S = 300.0
#: A hint that comes again after this time counts as new: a node may be cordoned for a second time.
SAME_S = 3600.0


class Hints:
    """Has the session prepare for a save when a disruption may be near. Training continues.

    A hint that comes while the session prepares for another one is covered by that. ``due`` costs nothing at a step
    without a hint.

    Args:
        clock: Returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # when each hint came last, by name
        self._last_s: float | None = None
        self._due = threading.Event()

    def take(self, hint: Hint) -> None:
        """Takes a hint. A hint that came before, or soon after another one, is ignored.

        All replicas of the operator use the same names, so a name does not say how often a sign has come and gone.
        After a stream was lost, the new one repeats the hints that still hold.
        """
        now_s = self._clock()
        self._heard_s = {name: at_s for name, at_s in self._heard_s.items() if now_s - at_s < SAME_S}
        is_new = not set(hint.hints) <= self._heard_s.keys()
        self._heard_s.update(dict.fromkeys(hint.hints, now_s))
        if not is_new:
            return
        too_soon = self._last_s is not None and now_s - self._last_s < LEAST_PAUSE_S
        logger.warning(
            "received a hint, training continues cause=%s signal=%s nodes=%s prepares=%s",
            hint.cause,
            hint.signal,
            ",".join(hint.nodes),
            not too_soon,
        )
        if not too_soon:
            self._last_s = now_s
            self._due.set()

    def due(self) -> bool:
        """Returns True, once, if the session is to prepare now."""
        if not self._due.is_set():
            return False
        self._due.clear()
        return True
