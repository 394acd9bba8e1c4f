"""The heartbeat of a subscription's stream: a ping when there is nothing else to send, and the end of a stuck write.

Each stream has one timer, which repeats until ``stop``. The frames do not touch it: a timer for each write, and one for
each wait for a frame, took a third of the time that it takes to tell a gang. It runs on the stream's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gracepoint.wire.frames import Ping
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber

INTERVAL_S = 5.0
#: A write that has not ended at the third beat has had at least ten seconds.
_BEATS_OF_A_WRITE = 3


class Heartbeat:
    """The heartbeat of one stream. It must be created on the stream's event loop.

    Args:
        subscriber: Gets a ping at each beat at which no frame waits and none is written.
        give_up: Called once, if a write is stuck.

    Attributes:
        writing: True while the stream's task writes a frame. The task sets it.
    """

    def __init__(self, subscriber: Subscriber, give_up: Callable[[], None]) -> None:
        self.writing = False
        self._subscriber = subscriber
        self._give_up = give_up
        self._held_up = 0  # how many beats in a row found a write in progress
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._go_on)

    def beat(self) -> None:
        """Handles one beat."""
        self._held_up = self._held_up + 1 if self.writing else 0
        if self._held_up == _BEATS_OF_A_WRITE:
            self._give_up()
        elif self._subscriber.is_idle and not self.writing:
            self._subscriber.send(Outgoing(Ping))

    def stop(self) -> None:
        """Stops the timer."""
        self._timer.cancel()

    def _go_on(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._go_on)
        self.beat()
