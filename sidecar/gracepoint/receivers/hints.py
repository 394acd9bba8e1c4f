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
#: A hint that was not heard for so long is another one of the same name: a node that is cordoned for a second time.
SAME_S = 3600.0


class Hints:
    """See the module.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_s: dict[str, float] = {}  # when each was heard last, by name
        self._last_s: float | None = None
        self._due = threading.Event()

    def take(self, hint: Hint) -> None:
        """Takes a hint in: one that was heard before, or comes soon after another, is not acted upon.

        Names are the same for all replicas of the operator, so they don't say how often a sign has come and gone.
        A stream that was lost brings again what still stands; what comes again after ``SAME_S`` counts as new.
        """
        now_s = self._clock()
        self._heard_s = {name: at_s for name, at_s in self._heard_s.items() if now_s - at_s < SAME_S}
        is_new = not set(hint.hints) <= self._heard_s.keys()
        self._heard_s.update(dict.fromkeys(hint.hints, now_s))
        if not is_new:
            return
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
