"""Sends messages to the operator. Training never waits for that.

``send`` puts a message into a bounded queue and returns. One thread ("gracepoint-sender", daemon) owns the
connection. It posts the messages in order, and repeats each until the operator takes it, its time is over, or the
operator refuses it for good. A message may be held back for a while; later messages overtake it then. ``flush`` sends
those at once, too, and waits until the queue is empty or the time is over. ``close`` ends the thread. All state is
guarded by ``_changed``.
"""

from __future__ import annotations

import collections
import dataclasses
import http
import logging
import threading
from collections.abc import Callable

from gracepoint.deadline import Backoff
from gracepoint.errors import WireError
from gracepoint.receivers.channel import ChannelError, OperatorConnection
from gracepoint.wire.messages import (
    Acknowledgement,
    Forecast,
    Message,
    Report,
    Resumption,
    SaveEvery,
    SnapshotReport,
    Stall,
    Trouble,
)
from gracepoint.wire.names import (
    PATH_ACKNOWLEDGE,
    PATH_FORECAST,
    PATH_REPORT,
    PATH_RESUMPTION,
    PATH_SNAPSHOT,
    PATH_STALL,
    PATH_TROUBLE,
)

logger = logging.getLogger(__name__)

_PATHS: dict[type[Message], str] = {
    Acknowledgement: PATH_ACKNOWLEDGE,
    Forecast: PATH_FORECAST,
    Report: PATH_REPORT,
    Resumption: PATH_RESUMPTION,
    SnapshotReport: PATH_SNAPSHOT,
    Stall: PATH_STALL,
    Trouble: PATH_TROUBLE,
}
_MOST_WAITING = 200
#: Short, as a replica that is gone with its node does not answer, and the next attempt may reach the other replica.
_POST_TIMEOUT_S = 2.0
_JOIN_S = 1.0
#: The operator has read the message and refuses it; another attempt cannot help. 401 and 403 are not here: a token is
#: renewed, and a replica of the operator may not have seen the pod yet, or may hear another session of it.
_FINAL = frozenset({400, 404, 405, 409, 410, 413, 415, 422})


@dataclasses.dataclass(frozen=True)
class _Item:
    message: Message
    queued_at_s: float
    within_s: float
    after_s: float

    @property
    def due_s(self) -> float:
        return self.queued_at_s + self.after_s

    @property
    def until_s(self) -> float:
        return self.queued_at_s + self.within_s

    def as_of(self, now_s: float) -> Message:
        """Returns the message with its ages as of now."""
        message, waited_s = self.message, now_s - self.queued_at_s
        if isinstance(message, Forecast | Report | Resumption) and (spent := message.spent) is not None:
            message = dataclasses.replace(message, spent=dataclasses.replace(spent, now_s=spent.now_s + waited_s))
        if isinstance(message, Resumption | SnapshotReport) and message.age_s is not None:
            message = dataclasses.replace(message, age_s=message.age_s + waited_s)
        return message


class Sender:
    """Sends acknowledgements, reports of all kinds, forecasts, resumptions and stalls.

    Args:
        channel: The connection, used by the sender's thread alone.
        clock: Returns monotonic seconds.

    Attributes:
        on_interval: Called by the sender's thread with the seconds between two saves that the operator suggests. Set
            it before a ``Forecast`` that takes them is sent.
    """

    def __init__(self, channel: OperatorConnection, clock: Callable[[], float]) -> None:
        self._channel = channel
        self._clock = clock
        self.on_interval: Callable[[float], None] = lambda every_s: None
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: collections.deque[_Item] = collections.deque()
        self._busy = False
        self._flushing = 0  # callers of flush() that wait
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gracepoint-sender", daemon=True)
        self._thread.start()

    def send(self, message: Message, *, within_s: float, after_s: float = 0.0) -> None:
        """Queues a message. A ``Trouble`` or ``SnapshotReport`` takes the place of one of its kind that waits.

        Args:
            message: What is sent.
            within_s: Seconds after which the message is dropped, with a line in the log, if it was not taken.
            after_s: Seconds for which the message is held back, unless ``flush`` is called.
        """
        with self._lock:
            for item in [item for item in self._waiting if _says_all_of(message, item.message)]:
                self._waiting.remove(item)
            if len(self._waiting) >= _MOST_WAITING:
                logger.error(
                    "dropped a message, as too many wait message=%s waiting=%d", _named(message), _MOST_WAITING
                )
                return
            self._waiting.append(_Item(message, self._clock(), within_s, after_s))
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Waits until every message was sent or dropped. Returns False if that did not happen in time."""
        with self._lock:
            self._flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(lambda: not self._waiting and not self._busy, max(0.0, timeout_s))
            finally:
                self._flushing -= 1

    def close(self) -> None:
        """Ends the thread. Drops the messages in the queue: call ``flush`` first. Safe to repeat."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._channel.interrupt()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._deliver(item)
            with self._lock:
                self._busy = False
                self._changed.notify_all()
        self._channel.close()

    def _next(self) -> _Item | None:
        with self._lock:
            while not self._closed:
                now_s = self._clock()
                due = (item for item in self._waiting if self._flushing or item.due_s <= now_s)
                if (item := next(due, None)) is not None:
                    self._waiting.remove(item)
                    self._busy = True
                    return item
                next_s = min((item.due_s for item in self._waiting), default=None)
                self._changed.wait(None if next_s is None else next_s - now_s)
            return None

    def _deliver(self, item: _Item) -> None:
        path = _PATHS[type(item.message)]
        backoff = Backoff(first_s=0.1, most_s=2.0)
        while not self._closed:
            try:
                answer = self._channel.post(path, item.as_of(self._clock()), timeout_s=_POST_TIMEOUT_S)
                return self._take_answer(item.message, answer)
            except ChannelError as error:
                pause_s = backoff.next_s()
                if error.status in _FINAL or self._clock() + pause_s > item.until_s:
                    logger.error("could not send a message message=%s error=%s", _named(item.message), error)
                    return
                logger.info("could not send a message, trying again message=%s error=%s", _named(item.message), error)
                if error.status == http.HTTPStatus.FORBIDDEN:
                    self._channel.close()  # a new connection may lead to the other replica, which knows the session
            with self._lock:
                self._changed.wait_for(lambda: self._closed, pause_s)

    def _take_answer(self, message: Message, answer: bytes) -> None:
        if not (answer and isinstance(message, Forecast) and message.takes_interval):
            return
        try:
            every_s = SaveEvery.from_json(answer).every_s
        except WireError as error:
            logger.error("ignored an answer that cannot be read message=%s error=%s", _named(message), error)
            return
        logger.info("the operator suggests an interval between saves seconds=%.1f", every_s)
        self.on_interval(every_s)


def _says_all_of(message: Message, earlier: Message) -> bool:
    """True if a message says all that an earlier one does. Hundreds of such may come at once."""
    if isinstance(message, Trouble):
        return isinstance(earlier, Trouble) and earlier.kind == message.kind
    return isinstance(message, SnapshotReport) and isinstance(earlier, SnapshotReport)


def _named(message: Message) -> str:
    phase = f" {message.phase}" if isinstance(message, Report) else ""
    return type(message).__name__ + phase
