"""Hints: signs that a disruption may be near. Training goes on, and the session prepares for a save.

The subscription's thread calls ``take``, the training thread calls ``due``. They share one event, so ``due`` costs
nothing at a step without a hint. A hint that comes while the session prepares for another one is covered by that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from gracepoint.wire.frames import Hint

log = logging.getLogger(__name__)

#: The session prepares no more often than this, so an autoscaler that often changes its mind costs little.
LEAST_PAUSE_S = 300.0
#: A hint that comes again after this time counts as new: a node may be cordoned for a second time.
SAME_S = 3600.0


class Hints:
    """See the module.

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
        """Returns True, once, if the session is to prepare now."""
        if not self._due.is_set():
            return False
        self._due.clear()
        return True
