"""The stream of notices from the operator.

One thread ("gracepoint-subscription", daemon) owns the connection. It connects, sends the ``Subscription``, and reads
frames, one JSON object on each line, until the stream ends or is silent for three heartbeats. Then it connects again
after a pause, for as long as the session lives. The pauses grow and are jittered. They start over only after a stream
that has brought more than its first frame, so a server that accepts and hangs up is not flooded. No notice is lost
meanwhile: the operator sends all open notices first, and the mailbox ignores those that it has. Nothing here makes
training wait or fail: errors are logged, each reason once in an outage. ``close`` interrupts a blocked read and ends
the thread.

A notice is taken only if it names this pod and this session: a proxy may mix up streams, and a pod may have the name
and address of an earlier one. It is acknowledged, on the sender's own connection, and posted.

The operator may send other authorities to trust. They replace the earlier ones at the next connection, so that a
certificate of a new authority does not cut off a running pod.
"""

from __future__ import annotations

import dataclasses
import http.client
import logging
import ssl
import threading
from collections.abc import Callable

from gracepoint.errors import WireError
from gracepoint.receivers.backoff import Backoff
from gracepoint.receivers.channel import ChannelError, OperatorConnection
from gracepoint.receivers.hints import Hints
from gracepoint.receivers.mailbox import Disruption, Mailbox
from gracepoint.wire.frames import Frame, Hello, Hint, Notice, Retraction, Trust, trust_digest
from gracepoint.wire.messages import Acknowledgement, Mode, Spent, Subscription
from gracepoint.wire.names import PATH_SUBSCRIBE

log = logging.getLogger(__name__)

_LONGEST_LINE_BYTES = 1 << 20
_HEARTBEATS_MISSED = 3
_MOST_UNREADABLE = 20
_JOIN_S = 1.0


class OperatorSubscriber:
    """Reads notices into the mailbox.

    Args:
        channel: The connection, used by the subscriber's thread alone.
        who: The first message, which says who listens.
        mailbox: Where notices go.
        acknowledge: Called with the acknowledgement of each notice that is taken. Must not block.
        hints: Where hints go. None if ``who`` does not take hints.
        trust: Called with the PEM certificates that the operator says are to be trusted. None if ``who`` has no
            ``trust``. Raises ``ssl.SSLError`` if they cannot be read.
        spent: Returns what the time went into so far, for each first message. None: it is not told.
        stalled_s: Returns for how many seconds training has stalled, for each first message. None if it has not.
    """

    def __init__(
        self,
        channel: OperatorConnection,
        who: Subscription,
        mailbox: Mailbox,
        acknowledge: Callable[[Acknowledgement], None],
        hints: Hints | None = None,
        trust: Callable[[str], None] | None = None,
        spent: Callable[[], Spent] | None = None,
        stalled_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._who = who
        self._mailbox = mailbox
        self._hints = hints
        self._trust = trust
        self._spent = spent
        self._stalled_s = stalled_s
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
            log.log(
                logging.DEBUG if reason in self._said else logging.WARNING,
                "not subscribed to the operator, trying again; SIGTERM is still watched reason=%s",
                reason,
            )
            self._said.add(reason)
            self._closed.wait(backoff.next_s())

    def _read_stream(self, backoff: Backoff) -> None:
        spent = None if self._spent is None else self._spent()
        who = dataclasses.replace(self._who, spent=spent, stalled_s=self._stalled_s())
        response = self._channel.stream(PATH_SUBSCRIBE, who)
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
                log.error("ignored a frame that cannot be read error=%s", error)
                unreadable += 1
                if unreadable == _MOST_UNREADABLE:
                    raise ChannelError(f"{unreadable} frames of the stream could not be read") from error
                continue
            backoff.reset()
            self._said.clear()
            if isinstance(frame, Notice | Retraction | Hint):
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
        log.info("subscribed replica=%s heartbeat_s=%g", hello.replica, hello.heartbeat_s)
        self._channel.set_timeout_s(_HEARTBEATS_MISSED * hello.heartbeat_s)
        self._connected.set()

    def _take_trust(self, frame: Trust) -> None:
        if self._trust is None:
            return
        try:
            self._trust(frame.authorities)
        except ssl.SSLError as error:
            log.error("kept the authorities, as the operator's cannot be read error=%s", error)
            return
        self._who = dataclasses.replace(self._who, trust=trust_digest(frame.authorities))
        log.info("trusts other authorities of the operator digest=%s", self._who.trust)

    def _take(self, frame: Notice | Retraction | Hint) -> None:
        if (frame.pod_uid, frame.session) != (self._who.pod_uid, self._who.session):
            log.warning(
                "ignored what is not for this session type=%s pod_uid=%s session=%s own_pod_uid=%s own_session=%s",
                frame.type,
                frame.pod_uid,
                frame.session,
                self._who.pod_uid,
                self._who.session,
            )
        elif isinstance(frame, Hint):
            if self._hints is not None:
                self._hints.take(frame)
        elif isinstance(frame, Retraction):
            log.warning("received a retraction preemption=%s reason=%s", frame.preemption, frame.reason)
            self._mailbox.retract(frame.preemption, frame.reason)
        elif frame.mode not in (Mode.ENFORCE, Mode.DRILL):
            log.info("ignored a notice that asks for nothing preemption=%s mode=%s", frame.preemption, frame.mode)
        else:
            log.warning(
                "received a notice preemption=%s mode=%s cause=%s signal=%s remaining_s=%.1f",
                frame.preemption,
                frame.mode,
                frame.cause,
                frame.signal,
                frame.remaining_s,
            )
            # Before the post, in which the mailbox tells the other processes: that waits for process 0 to answer.
            self._acknowledge(
                Acknowledgement(
                    pod_uid=self._who.pod_uid,
                    session=self._who.session,
                    preemption=frame.preemption,
                    process_index=self._who.process_index,
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
                )
            )
