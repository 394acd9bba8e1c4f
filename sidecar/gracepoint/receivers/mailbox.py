"""The one place where notices arrive, whoever brought them.

Any thread may post: the subscription's, the SIGTERM reader's, the agreement's (a notice that another process
had). Every field is guarded by one lock; ``on_post`` runs in the poster's thread, outside of the lock.

What counts when several are there: each origin's latest word, and of those the earliest deadline.
"""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Callable

from gracepoint.errors import WireError

SIGTERM = "SIGTERM"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disruption:
    """Something is going to end this gang.

    Attributes:
        preemption: Name of the operator's Preemption; empty where it was learnt without the operator.
        cause: Why, in the operator's words.
        signal: What was seen.
        remaining_s: Until the deadline, at the moment of posting.
    """

    preemption: str
    cause: str
    signal: str
    remaining_s: float

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


class Mailbox:
    """Thread-safe; see the module.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._posts: dict[str, tuple[Disruption, float]] = {}  # by origin: what, and its deadline on the clock
        self._on_post: Callable[[Disruption], None] | None = None
        self._first_at_s: float | None = None

    def listen(self, on_post: Callable[[Disruption], None]) -> None:
        """Has ``on_post`` called for what is here already and for every later post."""
        with self._lock:
            self._on_post = on_post
            here = [disruption for disruption, _ in self._posts.values()]
        for disruption in here:
            on_post(disruption)

    def post(self, disruption: Disruption) -> None:
        """Takes a notice, or the newest word on one that is here."""
        now_s = self._clock()
        with self._lock:
            origin = disruption.preemption or disruption.signal
            self._posts[origin] = (disruption, now_s + disruption.remaining_s)
            if self._first_at_s is None:
                self._first_at_s = now_s
            on_post = self._on_post
        if on_post is not None:
            on_post(disruption)

    @property
    def current(self) -> Disruption | None:
        """What to speak of: the operator's notice before anything without a name, then the most urgent."""
        with self._lock:
            return min(self._posts.values(), key=lambda p: (not p[0].preemption, p[1]))[0] if self._posts else None

    @property
    def first_at_s(self) -> float | None:
        """When the first notice came, on the clock."""
        with self._lock:
            return self._first_at_s

    def remaining_s(self) -> float:
        """Seconds until the earliest deadline, negative after it; infinite while there is no notice."""
        with self._lock:
            earliest_s = min((deadline_s for _, deadline_s in self._posts.values()), default=math.inf)
        return earliest_s - self._clock()
