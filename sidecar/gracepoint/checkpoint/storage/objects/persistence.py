"""Requests that continue until they succeed: repeated after errors that pass, and hedged against a slow connection.

A request that gets no reply for longer than most requests took is **hedged**: another thread makes the same request on
another connection, and the first reply counts. The other request is aborted. If the hedge is slow as well, further ones
follow. All requests of this package can be repeated: they are conditional, or they have the same result each time.

The calling thread makes the first request. A thread for a hedge ("gracepoint: hedged request", a daemon) lives as
long as its request. One thread for all stores ("gracepoint: hedges", a daemon) starts hedges when they are due. It
starts with the first request and ends with the process. A ``Race`` is shared by the threads of its requests, under a
lock.
"""

from __future__ import annotations

import collections
import errno
import functools
import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, NoReturn, TypeVar

from gracepoint.checkpoint.storage.objects.http import LOOK_EVERY_S, STALL_S, Exchange, Unreachable
from gracepoint.checkpoint.storage.objects.provider import ConditionFailed, Transient
from gracepoint.checkpoint.storage.storage_path import current_limit
from gracepoint.deadline import Backoff
from gracepoint.threads import DaemonThread, NoThread, forget_in_child, start_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Race(Generic[T]):
    """Equal requests, of which the first to end well counts. The caller's thread makes the first, others the hedges."""

    def __init__(self, first: Exchange) -> None:
        self._first = first
        self._hedges: set[Exchange] = set()  # in progress
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
        """Notes that the caller has its result. Hedges that are still in progress are aborted."""
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
                except NoThread as error:  # the interpreter is about to end: requests are not hedged
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


#: Seconds for a request and its repetitions, if the caller has no deadline.
PATIENCE_S = 60.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0
#: Seconds of failures after which a warning says so, once: whoever waits should know for what.
_SAID_AFTER_S = 10.0
# Before anything is known of a store, a request is hedged after this time, and the time for its bytes at this speed.
_HEDGE_FIRST_S = 2.0
_HEDGE_FIRST_BYTES_PER_S = 5e6
_HEDGE_SOONEST_S = 0.3
_HEDGES_AT_ONCE = 4
#: Most hedges of one request. A hedge can meet a slow connection as well. After the third, the cause must be another.
_HEDGES_OF_ONE = 3
_REMEMBERED = 128
_KNOWN_FROM = 16
_PERCENTILE = 0.95
_HEDGE_FACTOR = 1.5


class Pace:
    """How long the requests of one kind took lately. Any thread uses it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._took = collections.deque[float](maxlen=_REMEMBERED)  # seconds, each divided by ``_scale``

    def note(self, size_bytes: int, took_s: float) -> None:
        """Records a request of ``size_bytes`` that succeeded."""
        with self._lock:
            self._took.append(took_s / _scale(size_bytes))

    def hedge_after_s(self, size_bytes: int) -> float:
        """Returns after how many seconds a request of ``size_bytes`` is slower than most."""
        with self._lock:
            durations = sorted(self._took) if len(self._took) >= _KNOWN_FROM else None
        if durations is None:
            return _HEDGE_FIRST_S + size_bytes / _HEDGE_FIRST_BYTES_PER_S
        slow_s = durations[int(_PERCENTILE * (len(durations) - 1))] * _scale(size_bytes)
        return max(_HEDGE_SOONEST_S, slow_s * _HEDGE_FACTOR)


def _scale(size_bytes: int) -> float:
    # A request takes a round trip, and time for its bytes. A MiB takes about as long as a round trip.
    return 1.0 + size_bytes / (1 << 20)


class Persistence:
    """Makes the requests of one store.

    Args:
        new_exchange: Returns a new exchange with the store.
        hedges: Whether slow requests are made a second time.
        patience_s: Seconds for a request and its repetitions, if the caller has no deadline.
    """

    def __init__(
        self, new_exchange: Callable[[], Exchange], *, hedges: bool = True, patience_s: float = PATIENCE_S
    ) -> None:
        self._new_exchange = new_exchange
        self._hedges = hedges
        self.patience_s = patience_s
        self._paces = collections.defaultdict[str, Pace](Pace)
        self._slots = threading.BoundedSemaphore(_HEDGES_AT_ONCE)

    def run(
        self,
        subject: str,
        act: Callable[[Exchange], T],
        *,
        kind: str,
        size_bytes: int = 0,
        go_on: Callable[[], None] = lambda: None,
        patient: bool = False,
        hedge: bool = True,
    ) -> T:
        """Calls ``act`` with a new exchange until it succeeds. Returns its result.

        Args:
            subject: What is done, for messages.
            act: Makes one request. Any thread may run it, and two threads at once.
            kind: Requests of one kind take about equally long for equally many bytes.
            size_bytes: Bytes that the request sends or gets.
            go_on: Called before each request and while waiting. An error that it raises ends the call.
            patient: If True, there is no timeout for all repetitions together, as ``go_on`` ends the call. If the
                thread has a limit (``ended_by``), that limit takes the place of the timeout, too.
            hedge: Whether the request is made a second time if it is slow.

        Raises:
            TimeoutError: The request did not succeed in time. The message has its last error.
            OSError: Another error of ``act``.
        """
        began_s, pauses, pace = time.monotonic(), request_backoff(), self._paces[kind]
        is_said = False
        limit = current_limit()
        patient = patient or limit is not None
        check = go_on if limit is None else _both(limit, go_on)

        def look() -> None:
            check()
            if not patient and time.monotonic() - began_s > self.patience_s + STALL_S:
                raise TimeoutError(errno.ETIMEDOUT, f"{subject}: not done after {time.monotonic() - began_s:.1f} s")

        for tries in itertools.count(1):
            check()
            tried_s = time.monotonic()
            try:
                reply = self._raced(act, pace.hedge_after_s(size_bytes) if self._hedges and hedge else None, look)
            except (Transient, Unreachable) as error:
                wait_s = max(pauses.next_s(), error.after_s if isinstance(error, Transient) else 0.0)
                elapsed_s = time.monotonic() - began_s
                if not patient and elapsed_s + wait_s > self.patience_s:
                    raise TimeoutError(
                        errno.ETIMEDOUT,
                        f"{subject}: {tries} requests in {elapsed_s:.1f} s failed, the last with: {error}",
                    ) from error
                is_worth_saying = elapsed_s >= _SAID_AFTER_S and not is_said
                is_said = is_said or is_worth_saying
                level = logging.WARNING if is_worth_saying else logging.DEBUG
                logger.log(level, "%s: request %d failed, the next in %.2f s: %s", subject, tries, wait_s, error)
                wait(wait_s, check)
            else:
                pace.note(size_bytes, time.monotonic() - tried_s)
                return reply
        raise AssertionError

    def keep(self, subject: str, act: Callable[[Exchange], Exchange]) -> Exchange:
        """Does as ``run``, but leaves the exchange open, so that the caller can read the reply. There are no hedges.

        Raises:
            TimeoutError: The request did not succeed in time.
            OSError: Another error of ``act``.
        """
        limit = current_limit() or _nothing

        def unclosed(race: Exchange) -> Exchange:
            exchange = self._new_exchange()
            exchange.go_on = race.go_on
            try:
                act(exchange)
            except BaseException:
                exchange.close()
                raise
            # The time for the request does not bound what the caller reads later.
            exchange.go_on = limit
            return exchange

        return self.run(subject, unclosed, kind="stream", hedge=False)

    def _raced(self, act: Callable[[Exchange], T], hedge_after_s: float | None, go_on: Callable[[], None]) -> T:
        first = self._new_exchange()
        first.go_on = go_on
        if hedge_after_s is None:
            with first:
                return act(first)
        race = Race[T](first)
        hedging = _Hedging(hedge_after_s, lambda: self._hedge(act, race, go_on))
        try:
            with first:
                return act(first)
        except (Transient, Unreachable) as error:
            return race.outcome_of_hedges(error, go_on)
        finally:
            race.end()
            hedging.cancel()

    def _hedge(self, act: Callable[[Exchange], T], race: Race[T], go_on: Callable[[], None]) -> bool:
        """Starts a hedge. Returns False if too many requests are hedged at the moment."""
        if not self._slots.acquire(blocking=False):
            return False
        hedge = self._new_exchange()
        hedge.go_on = go_on
        if not race.begin(hedge):
            self._slots.release()
            return True

        def run() -> None:
            try:
                with hedge:
                    value = act(hedge)
            except (ConditionFailed, FileNotFoundError) as error:
                # The object is not as the request expects it: another request of the race has changed it, or somebody
                # else has. The caller finds out which.
                race.decide(hedge, functools.partial(_raise, error))
            except BaseException as error:  # noqa: BLE001 - raised by the calling thread, if nothing else helps
                race.fail(hedge, error)
            else:
                race.decide(hedge, lambda: value)
            finally:
                self._slots.release()

        try:
            start_thread(threading.Thread(target=run, name="gracepoint: hedged request", daemon=True))
        except NoThread as error:
            self._slots.release()
            race.fail(hedge, error)
        return True


class _Hedging:
    """Starts hedges of one request, the next after twice as long, until it is cancelled.

    Args:
        after_s: When the first hedge is started, in seconds from now.
        hedge: Starts a hedge. Returns False if that was not possible.
    """

    def __init__(self, after_s: float, hedge: Callable[[], bool]) -> None:
        self._after_s = after_s
        self._hedge = hedge
        self._left = _HEDGES_OF_ONE
        self._lock = threading.Lock()  # the clock's thread sets the next alarm while the caller cancels
        self._alarm: Alarm | None = ALARMS.at(time.monotonic() + after_s, self._begin)

    def cancel(self) -> None:
        with self._lock:
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
        self._hedge = _started  # frees what the request would have sent

    def _begin(self) -> None:
        if self._hedge():
            self._left -= 1
            self._after_s *= 2
            next_s = self._after_s
        else:
            next_s = LOOK_EVERY_S
        with self._lock:
            if self._alarm is not None and self._left:
                self._alarm = ALARMS.at(time.monotonic() + next_s, self._begin)


def _started() -> bool:
    return True


def _raise(error: BaseException) -> NoReturn:
    raise error


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def check() -> None:
        first()
        second()

    return check


def request_backoff() -> Backoff:
    """Returns the pauses between the repetitions of a request."""
    return Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)


def wait(seconds: float, go_on: Callable[[], None]) -> None:
    """Waits for a number of seconds. Calls ``go_on`` meanwhile, whose error ends the wait."""
    until_s = time.monotonic() + seconds
    while (left_s := until_s - time.monotonic()) > 0:
        go_on()
        time.sleep(min(left_s, LOOK_EVERY_S))
