"""Equal requests that race, and the clock that starts all but the first one.

One thread for all stores ("gracepoint: hedges", a daemon) calls functions when they are due. It starts with the first
request and ends with the process. A ``Race`` is shared by the threads of its requests, under a lock.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gracepoint.checkpoint.storage.objects.http.connection import Exchange, Unreachable
from gracepoint.checkpoint.storage.objects.http.request_errors import Transient
from gracepoint.checkpoint.storage.objects.http.wire import LOOK_EVERY_S
from gracepoint.daemon_thread import DaemonThread
from gracepoint.forks import forget_in_child

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Race(Generic[T]):
    """Equal requests, of which the first to end well counts. The caller's thread makes the first, others the hedges."""

    def __init__(self, first: Exchange) -> None:
        self._first = first
        self._hedges: set[Exchange] = set()  # under way
        self._ended = False  # the caller has its result
        self._outcome: Callable[[], T] | None = None  # of the hedge that decided
        self._error: BaseException | None = None  # of a hedge, if the request need not be repeated
        self._lock = threading.RLock()  # protects everything above
        self._changed = threading.Condition(self._lock)

    def begin(self, hedge: Exchange) -> bool:
        """Notes that a hedge begins. Returns False if it is not needed any more."""
        with self._lock:
            if self._ended or self._outcome is not None:
                return False
            self._hedges.add(hedge)
            return True

    def decide(self, hedge: Exchange, outcome: Callable[[], T]) -> None:
        """Notes that a hedge ended with a result or an error that ends the race: the other requests are aborted."""
        with self._lock:
            self._hedges.discard(hedge)
            if self._outcome is None:
                self._outcome = outcome
                if not self._ended:
                    self._first.abort()
                self._abort_hedges()
            self._changed.notify_all()

    def fail(self, hedge: Exchange, error: BaseException) -> None:
        """Notes that a hedge failed. Another request may still succeed."""
        with self._lock:
            self._hedges.discard(hedge)
            if not isinstance(error, Transient | Unreachable):
                self._error = error
            self._changed.notify_all()

    def end(self) -> None:
        """Notes that the caller has its result. Hedges that are still under way are aborted."""
        with self._lock:
            self._ended = True
            self._abort_hedges()

    def outcome_of_hedges(self, error: OSError, go_on: Callable[[], None]) -> T:
        """Waits for the hedges, if there are any. Raises ``error`` if none helps."""
        with self._lock:
            # Each hedge ends by itself: its sends and reads have timeouts.
            while not self._changed.wait_for(lambda: self._outcome is not None or not self._hedges, LOOK_EVERY_S):
                go_on()
            self._ended = True
            if self._outcome is not None:
                return self._outcome()
            raise error if self._error is None else self._error

    def _abort_hedges(self) -> None:
        for hedge in self._hedges:
            hedge.abort()


class Alarm:
    """A function that is called at its time, unless it is cancelled before."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.act = _nothing  # frees what the request would have sent


class _Alarms:
    """Calls functions at their times, in one thread. They must return at once."""

    def __init__(self) -> None:
        self._begin_anew()
        forget_in_child(self, _Alarms._begin_anew)  # the alarms of the parent would break off its requests

    def _begin_anew(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, Alarm]] = []
        self._numbers = itertools.count()
        self._thread: DaemonThread | None = None

    def at(self, at_s: float, act: Callable[[], None]) -> Alarm:
        alarm = Alarm(act)
        with self._lock:
            if self._thread is None or self._thread.ended:
                self._thread = DaemonThread(self._run, "gracepoint: hedges")
                try:
                    self._thread.start()
                except RuntimeError as error:  # the interpreter is about to end: requests are not hedged
                    logger.debug("no thread for hedges: %s", error)
                    self._thread = None
                    return alarm
            heapq.heappush(self._due, (at_s, next(self._numbers), alarm))
            if self._due[0][2] is alarm:
                self._changed.notify()
        return alarm

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._due and self._due[0][2].cancelled:
                    heapq.heappop(self._due)
                if not self._due:
                    self._changed.wait()
                    continue
                left_s = self._due[0][0] - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                alarm = heapq.heappop(self._due)[2]
            alarm.act()


ALARMS = _Alarms()


def _nothing() -> None:
    pass
