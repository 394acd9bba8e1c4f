"""What beats in a subscription's stream: a ping where nothing else is to be said, and an end to a write that is stuck.

One timer for each stream, which goes on by itself until ``stop``, and is not touched by the frames: a timer for each
write, and one for each wait for a frame, were a third of what it cost to tell a gang. Lives on the stream's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gracepoint.wire.messages import Ping
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber

INTERVAL_S = 5.0
#: A write that is not through at its third beat was given ten seconds at least.
_BEATS_OF_A_WRITE = 3


class Heartbeat:
    """One stream's. Made on the event loop.

    Args:
        subscriber: Gets a ping at each beat that finds it with nothing to be written.
        give_up: Called once if a write is stuck.

    Attributes:
        writing: The stream's task sets it while it writes a frame.
    """

    def __init__(self, subscriber: Subscriber, give_up: Callable[[], None]) -> None:
        self.writing = False
        self._subscriber = subscriber
        self._give_up = give_up
        self._held_up = 0  # beats in a row that found the stream at a write
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._go_on)

    def beat(self) -> None:
        """Looks once."""
        self._held_up = self._held_up + 1 if self.writing else 0
        if self._held_up == _BEATS_OF_A_WRITE:
            self._give_up()
        elif self._subscriber.is_idle and not self.writing:
            self._subscriber.send(Outgoing(Ping))

    def stop(self) -> None:
        """No beat follows."""
        self._timer.cancel()

    def _go_on(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(INTERVAL_S, self._go_on)
        self.beat()
