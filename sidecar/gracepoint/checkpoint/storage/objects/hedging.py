"""Two equal requests that race, and the clock that starts the second one.

One thread for all stores ("gracepoint: hedges", a daemon) calls functions when they are due. It starts with the first
request and ends with the process. A ``Race`` is shared by the threads of its two requests, under a lock.
"""

from __future__ import annotations

import errno
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from gracepoint.checkpoint.storage.objects.connection import Exchange, Unreachable
from gracepoint.checkpoint.storage.objects.wire import LOOK_EVERY_S

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Transient(OSError):
    """The store did not carry the request out, and may do so later.

    Attributes:
        after_s: Seconds to wait at least, as the store says. 0 if it does not say.
    """

    def __init__(self, message: str, after_s: float = 0.0) -> None:
        super().__init__(errno.EAGAIN, message)
        self.after_s = after_s


class Race(Generic[T]):
    """Two equal requests. The caller's thread makes the first, and a thread of its own the second."""

    def __init__(self, first: Exchange) -> None:
        self._first = first
        self._second: Exchange | None = None
        self._ended = False  # the first request succeeded, or raised an error that counts
        self._won = self._lost = False
        self._value: T
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # protects everything above

    def begin_second(self, second: Exchange) -> bool:
        with self._changed:
            if self._ended:
                return False
            self._second = second
            return True

    def second_won(self, value: T) -> None:
        with self._changed:
            self._value, self._won = value, True
            self._changed.notify_all()
            if not self._ended:
                self._first.abort()

    def second_failed(self, error: BaseException) -> None:
        with self._changed:
            self._error, self._lost = error, True
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            if self._second is not None and not (self._won or self._lost):
                self._second.abort()

    def outcome_of_second(self, error: OSError, go_on: Callable[[], None]) -> T:
        """Waits for the second request, if there is one. Raises ``error`` if that does not help."""
        with self._changed:
            if self._second is None:
                self._ended = True
                raise error
            # The second request ends by itself: its sends and reads have timeouts.
            while not self._changed.wait_for(lambda: self._won or self._lost, LOOK_EVERY_S):
                go_on()
            self._ended = True
            if self._won:
                return self._value
            if self._error is not None and not isinstance(self._error, Transient | Unreachable):
                raise self._error
            raise error


class _Alarm:
    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True
        self.act = _nothing  # frees what the request would have sent


class _Alarms:
    """Calls functions at their times, in one thread. They must return at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due: list[tuple[float, int, _Alarm]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def at(self, at_s: float, act: Callable[[], None]) -> _Alarm:
        alarm = _Alarm(act)
        with self._changed:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="gracepoint: hedges", daemon=True)
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
            with self._changed:
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
