"""The mailbox as tests see it: a real one, with a memory of what receivers brought."""

from __future__ import annotations

import threading
import time

from gracepoint.receivers import Disruption, Mailbox

_WAIT_S = 60.0


class Heard(Mailbox):
    """A mailbox that can be waited on.

    Attributes:
        posts: What was posted, in order.
        posted_at_s: When each of them was, on the monotonic clock.
        retracted: Origins that were retracted, in order.
        stuck: Set: whoever posts is held up, as if the other processes could not be told.
    """

    def __init__(self) -> None:
        super().__init__(time.monotonic)
        self.changed = threading.Condition()
        self.posts: list[Disruption] = []
        self.posted_at_s: list[float] = []
        self.retracted: list[str] = []
        self.stuck = threading.Event()

    def post(self, disruption: Disruption) -> None:
        super().post(disruption)
        with self.changed:
            self.posts.append(disruption)
            self.posted_at_s.append(time.monotonic())
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.stuck.is_set(), _WAIT_S)

    def retract(self, origin: str, reason: str = "") -> None:
        super().retract(origin, reason)
        with self.changed:
            self.retracted.append(origin)
            self.changed.notify_all()

    def free(self) -> None:
        """Lets go on who is held up."""
        with self.changed:
            self.stuck.clear()
            self.changed.notify_all()

    def wait_for_posts(self, number: int = 1) -> list[Disruption]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.posts) >= number, _WAIT_S), self.posts
            return list(self.posts)

    def wait_for_retraction(self) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: self.retracted, _WAIT_S), self.posts
            return self.retracted[0]
