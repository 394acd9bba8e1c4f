"""Hints: signs that a disruption may be near. Training goes on; the session prepares for a save.

The subscription's thread brings them (``take``), the training thread asks for them (``due``). What they share is one
event, so that asking costs nothing at a step without a hint, and a hint that comes while one is acted upon is a part of
that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gracepoint.wire.messages import Hint

log = logging.getLogger(__name__)

#: Hints are acted upon no more often than that: an autoscaler that cannot make up its mind costs little.
LEAST_PAUSE_S = 300.0


class Hints:
    """See the module.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: set[str] = set()
        self._last_s: float | None = None
        self._due = threading.Event()

    def take(self, hint: Hint) -> None:
        """Takes a hint in: one that was heard before, or comes soon after another, is not acted upon."""
        new = set(hint.hints) - self._known
        if not new:
            return
        self._known |= new
        now_s = self._clock()
        too_soon = self._last_s is not None and now_s - self._last_s < LEAST_PAUSE_S
        log.warning(
            "received a hint, training goes on cause=%s signal=%s nodes=%s prepares=%s",
            hint.cause,
            hint.signal,
            ",".join(hint.nodes),
            not too_soon,
        )
        if not too_soon:
            self._last_s = now_s
            self._due.set()

    def due(self) -> bool:
        """True, once, if the session is to prepare now."""
        if not self._due.is_set():
            return False
        self._due.clear()
        return True
