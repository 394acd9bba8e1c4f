"""The HTTPS connection to the operator, the thread that reads notices from it, and the one that sends messages to it.
Standard library only.

An ``OperatorConnection`` belongs to one thread; other threads may only call ``interrupt`` and ``trust``. The token file
is read for every request, as the kubelet renews a projected token in place. Proxies of the environment are not used, as
the operator is inside the cluster.

The thread of ``OperatorSubscriber`` ("gracepoint-subscription", daemon) owns the subscription's connection. It
connects, sends the ``Subscription``, and reads frames, one JSON object on each line, until the stream ends or is silent
for three heartbeats. Then it connects again after a pause (``Backoff``), for as long as the session lives. The pauses
start over only after a stream that has brought more than its first frame, so a server that accepts and hangs up is not
flooded. No notice is lost meanwhile: the operator sends all open notices first, and the mailbox ignores those that it
has. A connection that fails makes no training wait or fail: errors are logged, each reason once in an outage. ``close``
interrupts a blocked read and ends the thread.

A notice is taken only if it names this pod and this session: a proxy may mix up streams, and a pod may have the name
and address of an earlier one. It is acknowledged on the sender's connection, and posted to the mailbox. If the operator
sends other authorities to trust, they replace the earlier ones at the next connection, so that a certificate of a new
authority does not cut off a running pod.

Training never waits for the ``Sender``. ``send`` puts a message into a bounded queue and returns. One thread
("gracepoint-sender", daemon) owns the connection. It posts the messages in order, and repeats each until the operator
takes it, its time is over, or the operator refuses it for good. A message may be held back for a while; later messages
overtake it then. ``flush`` sends those at once, too, and waits until the queue is empty or the time is over. ``close``
ends the thread. All its state is guarded by ``_changed``.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import http
import http.client
import logging
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path

from gracepoint.deadline import Backoff
from gracepoint.errors import GracepointError, WireError
from gracepoint.receivers.mailbox import Disruption, Hints, Mailbox
from gracepoint.threads import forget_in_child
from gracepoint.wire.frames import Frame, Hello, Hint, Notice, Retraction, SnapshotPlacement, Trust, trust_digest
from gracepoint.wire.messages import (
    Acknowledgement,
    Forecast,
    Message,
    Mode,
    Report,
    Resumption,
    SaveEvery,
    SnapshotReport,
    Stall,
    Subscription,
    Trouble,
)
from gracepoint.wire.names import (
    PATH_ACKNOWLEDGE,
    PATH_FORECAST,
    PATH_REPORT,
    PATH_RESUMPTION,
    PATH_SNAPSHOT,
    PATH_STALL,
    PATH_SUBSCRIBE,
    PATH_TROUBLE,
)

CONNECT_TIMEOUT_S = 2.0
#: From the connection to the first frame of the stream. A thousand processes may connect at once. If they gave up and
#: tried again, each would cost the operator another handshake, which is the most expensive part.
STREAM_TIMEOUT_S = 15.0


class ChannelError(GracepointError, ConnectionError):
    """The operator could not be reached, or refused. ``status`` is its HTTP status. None if there was no answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class OperatorConnection:
    """One connection at a time to the operator.

    Args:
        url: ``https://host:port``.
        ca_certificate: PEM certificate of the authority to trust. None for the system's authorities.
        token_file: Path of the bearer token.
    """

    def __init__(self, url: str, ca_certificate: str | None, token_file: str) -> None:
        parts = urllib.parse.urlsplit(url)
        assert parts.hostname is not None, url  # checked by the settings
        self._host, self._port = parts.hostname, parts.port or 443
        self._base = parts.path.rstrip("/")
        self._ca_certificate = ca_certificate
        self._token_file = Path(token_file)
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = None
        # As long as a child has the connection, too, the operator takes a process that has died for connected.
        forget_in_child(self, OperatorConnection.close)

    def post(self, path: str, message: Message, *, timeout_s: float) -> bytes:
        """Sends a message and waits until the operator has taken it. Keeps the connection for the next message.

        Returns what the operator answers; mostly nothing.

        Raises:
            ChannelError: The operator was not reached, or did not take the message.
        """
        kept = self._connection is not None
        try:
            response = self._request(path, message, timeout_s)
        except ChannelError:
            if not kept:
                raise
            response = self._request(path, message, timeout_s)  # the server had closed the idle connection
        try:
            text = response.read(1000)
            response.close()
        except (OSError, http.client.HTTPException) as error:
            self.close()
            raise ChannelError(f"POST {path}: {error!r}") from error
        if response.will_close:
            self.close()
        self._check(path, response.status, text)
        return text

    def stream(self, path: str, message: Message) -> http.client.HTTPResponse:
        """Sends a message and returns the response, whose body is an open stream.

        Raises:
            ChannelError: The operator was not reached, or did not take the message.
        """
        response = self._request(path, message, STREAM_TIMEOUT_S)
        if response.status != 200:
            text = response.read(1000)
            self.close()
            self._check(path, response.status, text)
            raise ChannelError(f"POST {path}: expected HTTP 200, found {response.status}", response.status)
        return response

    def trust(self, authorities: str) -> None:
        """Trusts these authorities at the next connection. Callable from any thread.

        Args:
            authorities: PEM certificates.

        Raises:
            ssl.SSLError: They cannot be read. Those before stay.
        """
        ssl.create_default_context(cadata=authorities)
        self._ca_certificate = authorities

    def set_timeout_s(self, timeout_s: float) -> None:
        """Sets how long a read of the stream may take."""
        if self._socket is not None:
            self._socket.settimeout(timeout_s)

    def interrupt(self) -> None:
        """Ends a read or write in which this object's thread is blocked. Callable from any thread."""
        held = self._socket
        if held is not None:
            with contextlib.suppress(OSError):  # not connected any more, so no thread is blocked
                held.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection. Safe to repeat."""
        self._socket = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, path: str, message: Message, timeout_s: float) -> http.client.HTTPResponse:
        try:
            connection = self._connection or self._connect(timeout_s)
            if self._socket is not None:
                self._socket.settimeout(timeout_s)
            token = self._token_file.read_text().strip()
            connection.request(
                "POST",
                self._base + path,
                body=message.to_json().encode(),
                headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
            )
            return connection.getresponse()
        except (OSError, http.client.HTTPException, ValueError) as error:  # a token that is no header's value, say
            self.close()
            reason = f"{type(error).__name__}: {error}"
            raise ChannelError(f"POST {path} to {self._host}:{self._port}: {reason}") from error

    def _connect(self, handshake_timeout_s: float) -> http.client.HTTPConnection:
        context = ssl.create_default_context(cadata=self._ca_certificate)
        connection = http.client.HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        connection.connect()
        # Not by HTTPSConnection, which has one timeout for both: a server that accepts at once may take long for the
        # handshake.
        connection.sock.settimeout(handshake_timeout_s)
        try:
            connection.sock = context.wrap_socket(connection.sock, server_hostname=self._host)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        # Kept here, too: a response that ends with its connection takes the socket out of the connection.
        self._socket = connection.sock
        return connection

    def _check(self, path: str, status: int, text: bytes) -> None:
        if not 200 <= status < 300:
            raise ChannelError(f"POST {path}: HTTP {status} {text[:200].decode(errors='replace')!r}", status)


logger = logging.getLogger(__name__)

_LONGEST_LINE_BYTES = 1 << 20
_HEARTBEATS_MISSED = 3
_MOST_UNREADABLE = 20
_JOIN_S = 1.0


class OperatorSubscriber:
    """Reads notices into the mailbox.

    Args:
        channel: The connection, used by the subscriber's thread alone.
        subscription: The first message, which says who listens.
        mailbox: Where notices go.
        acknowledge: Called with the acknowledgement of each notice that is taken. Must not block.
        hints: Where hints go. None if ``subscription`` does not take hints.
        trust: Called with the PEM certificates that the operator says are to be trusted. None if ``subscription`` has
            no ``trust``. Raises ``ssl.SSLError`` if they cannot be read.
        as_of_now: Returns the first message of a new stream, with what it says of this moment.
        place: Called with each placement of snapshots. Must not block. None if ``subscription`` does not take them.
    """

    def __init__(
        self,
        channel: OperatorConnection,
        subscription: Subscription,
        mailbox: Mailbox,
        acknowledge: Callable[[Acknowledgement], None],
        hints: Hints | None = None,
        trust: Callable[[str], None] | None = None,
        as_of_now: Callable[[Subscription], Subscription] = lambda subscription: subscription,
        place: Callable[[SnapshotPlacement], None] | None = None,
    ) -> None:
        self._channel = channel
        self._subscription = subscription
        self._mailbox = mailbox
        self._hints = hints
        self._trust = trust
        self._as_of_now = as_of_now
        self._place = place
        self._acknowledge = acknowledge
        self._closed = threading.Event()
        self._connected = threading.Event()
        self._said: set[str] = set()  # reasons that were logged in this outage; the thread's own
        self._thread = threading.Thread(target=self._run, name="gracepoint-subscription", daemon=True)
        self._thread.start()

    def wait_until_connected(self, timeout_s: float) -> bool:
        """Returns True once the operator has sent ``Hello`` on the current stream, False if it did not in time."""
        return self._connected.wait(timeout_s)

    def close(self) -> None:
        """Ends the thread. Safe to repeat."""
        self._closed.set()
        self._channel.interrupt()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        backoff = Backoff(first_s=0.2, most_s=15.0)
        while not self._closed.is_set():
            try:
                self._read_stream(backoff)
                reason = "the operator ended the stream"
            except (OSError, http.client.HTTPException) as error:  # ChannelError is an OSError
                reason = repr(error)
            self._connected.clear()
            self._channel.close()
            if self._closed.is_set():
                return
            # While the operator is down for an hour, the log has one line for each reason, not hundreds.
            logger.log(
                logging.DEBUG if reason in self._said else logging.WARNING,
                "not subscribed to the operator, trying again; SIGTERM is still watched reason=%s",
                reason,
            )
            self._said.add(reason)
            self._closed.wait(backoff.next_s())

    def _read_stream(self, backoff: Backoff) -> None:
        response = self._channel.stream(PATH_SUBSCRIBE, self._as_of_now(self._subscription))
        self._greeted(response)
        unreadable = 0
        while not self._closed.is_set():
            line = response.readline(_LONGEST_LINE_BYTES)
            if not line.endswith(b"\n"):
                if line:
                    raise ChannelError(f"a frame of the stream was cut off after {len(line)} bytes")
                return
            try:
                frame = Frame.read(line)
            except WireError as error:  # the next line is a new frame, so only this one is lost
                logger.error("ignored a frame that cannot be read error=%s", error)
                unreadable += 1
                if unreadable == _MOST_UNREADABLE:
                    raise ChannelError(f"{unreadable} frames of the stream could not be read") from error
                continue
            backoff.reset()
            self._said.clear()
            if isinstance(frame, Notice | Retraction | Hint | SnapshotPlacement):
                self._take(frame)
            elif isinstance(frame, Trust):
                self._take_trust(frame)

    def _greeted(self, response: http.client.HTTPResponse) -> None:
        """Reads the first frame. A server that does not begin with ``Hello`` is not the operator."""
        line = response.readline(_LONGEST_LINE_BYTES)
        try:
            hello = Frame.read(line)
        except WireError as error:
            raise ChannelError(f"expected the operator's hello: {error}") from error
        if not isinstance(hello, Hello):
            raise ChannelError(f"expected the operator's hello, found {hello.type}")
        logger.info("subscribed replica=%s heartbeat_s=%g", hello.replica, hello.heartbeat_s)
        self._channel.set_timeout_s(_HEARTBEATS_MISSED * hello.heartbeat_s)
        self._connected.set()

    def _take_trust(self, frame: Trust) -> None:
        if self._trust is None:
            return
        try:
            self._trust(frame.authorities)
        except ssl.SSLError as error:
            logger.error(
                "cannot read the operator's new certificate authorities, keeping the earlier ones error=%s", error
            )
            return
        self._subscription = dataclasses.replace(self._subscription, trust=trust_digest(frame.authorities))
        logger.info("trusting the operator's new certificate authorities digest=%s", self._subscription.trust)

    def _take(self, frame: Notice | Retraction | Hint | SnapshotPlacement) -> None:
        if (frame.pod_uid, frame.session) != (self._subscription.pod_uid, self._subscription.session):
            logger.warning(
                "ignored a message for another session type=%s pod_uid=%s session=%s own_pod_uid=%s own_session=%s",
                frame.type,
                frame.pod_uid,
                frame.session,
                self._subscription.pod_uid,
                self._subscription.session,
            )
        elif isinstance(frame, Hint):
            if self._hints is not None:
                self._hints.take(frame)
        elif isinstance(frame, SnapshotPlacement):
            if self._place is not None:
                self._place(frame)
        elif isinstance(frame, Retraction):
            logger.warning("received a retraction preemption=%s reason=%s", frame.preemption, frame.reason)
            self._mailbox.retract(frame.preemption, frame.reason)
        elif frame.mode not in (Mode.ENFORCE, Mode.DRILL):
            logger.info("ignored a notice that asks for nothing preemption=%s mode=%s", frame.preemption, frame.mode)
        else:
            logger.warning(
                "received a notice preemption=%s mode=%s cause=%s signal=%s remaining_s=%.1f",
                frame.preemption,
                frame.mode,
                frame.cause,
                frame.signal,
                frame.remaining_s,
            )
            # Before the post, in which the mailbox notifies the other processes: that waits for process 0 to answer.
            self._acknowledge(
                Acknowledgement(
                    pod_uid=self._subscription.pod_uid,
                    session=self._subscription.session,
                    preemption=frame.preemption,
                    process_index=self._subscription.process_index,
                )
            )
            self._mailbox.post(
                Disruption(
                    preemption=frame.preemption,
                    cause=frame.cause,
                    signal=frame.signal,
                    remaining_s=frame.remaining_s,
                    drill=frame.mode is Mode.DRILL,
                    revision=frame.revision,
                    nodes=tuple(frame.nodes),
                )
            )


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
        # Messages and errors that were logged in this outage; the thread's own.
        self._said: set[tuple[str, str]] = set()
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
                self._said.clear()
                return self._take_answer(item.message, answer)
            except ChannelError as error:
                pause_s = backoff.next_s()
                if error.status in _FINAL or self._clock() + pause_s > item.until_s:
                    logger.error("could not send a message message=%s error=%s", _named(item.message), error)
                    return
                said = _named(item.message), str(error)
                # While the operator cannot be reached for hours, the log has one line for each, not thousands.
                level = logging.DEBUG if said in self._said else logging.INFO
                logger.log(level, "could not send a message, trying again message=%s error=%s", *said)
                self._said.add(said)
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
