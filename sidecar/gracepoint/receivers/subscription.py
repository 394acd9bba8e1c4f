"""The stream of notices from the operator.

One thread ("gracepoint-subscription", daemon) owns the connection: it connects, says who listens, and reads
frames, one JSON object a line, until the stream ends or is silent for three heartbeats; then it connects again,
after a pause that grows and is jittered, for as long as the session lives. The pauses begin anew only after a stream
that has proved itself by more than its greeting: a server that greets and hangs up is not hammered. What was missed
meanwhile is not lost, as the operator greets with what is open; the mailbox knows what it has heard before. Nothing
here can make training wait or fail: what goes wrong is logged, each reason once in an outage, and tried again.
``close`` interrupts a blocked read and ends the thread.

A notice is taken only if it names this pod and this session (a stream may be mixed up by a proxy, a pod's name
and address may be those of its predecessor); it is acknowledged, on the sender's own
connection, and posted.
"""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Callable

from gracepoint.errors import WireError
from gracepoint.receivers.backoff import Backoff
from gracepoint.receivers.channel import ChannelError, OperatorConnection
from gracepoint.receivers.hints import Hints
from gracepoint.receivers.mailbox import Disruption, Mailbox
from gracepoint.wire.messages import Acknowledgement, Frame, Hello, Hint, Mode, Notice, Retraction, Subscription
from gracepoint.wire.names import PATH_SUBSCRIBE

log = logging.getLogger(__name__)

_LONGEST_LINE_BYTES = 1 << 20
_HEARTBEATS_MISSED = 3
_MOST_UNREADABLE = 20
_JOIN_S = 1.0


class OperatorSubscriber:
    """Reads notices into the mailbox.

    Args:
        channel: Its own, used by its thread alone.
        who: Says who listens.
        mailbox: Where notices go.
        acknowledge: Called with the receipt for each notice that was taken; must not block.
        hints: Where hints go; None where ``who`` takes none.
    """

    def __init__(
        self,
        channel: OperatorConnection,
        who: Subscription,
        mailbox: Mailbox,
        acknowledge: Callable[[Acknowledgement], None],
        hints: Hints | None = None,
    ) -> None:
        self._channel = channel
        self._who = who
        self._mailbox = mailbox
        self._hints = hints
        self._acknowledge = acknowledge
        self._closed = threading.Event()
        self._connected = threading.Event()
        self._said: set[str] = set()  # what went wrong in this outage; of the thread alone
        self._thread = threading.Thread(target=self._run, name="gracepoint-subscription", daemon=True)
        self._thread.start()

    def wait_until_connected(self, timeout_s: float) -> bool:
        """True once the operator has said hello on the present stream."""
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
            # An operator that is down for an hour is a line in the log for each reason, not hundreds.
            log.log(
                logging.DEBUG if reason in self._said else logging.WARNING,
                "not subscribed to the operator, trying again; SIGTERM is still watched reason=%s",
                reason,
            )
            self._said.add(reason)
            self._closed.wait(backoff.next_s())

    def _read_stream(self, backoff: Backoff) -> None:
        response = self._channel.stream(PATH_SUBSCRIBE, self._who)
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
            except WireError as error:  # lines keep the stream in step, so one bad frame costs only itself
                log.error("ignored a frame that cannot be read error=%s", error)
                unreadable += 1
                if unreadable == _MOST_UNREADABLE:
                    raise ChannelError(f"{unreadable} frames of the stream could not be read") from error
                continue
            backoff.reset()
            self._said.clear()
            if isinstance(frame, Notice | Retraction | Hint):
                self._take(frame)

    def _greeted(self, response: http.client.HTTPResponse) -> None:
        """Reads the first frame: what does not greet is not the operator."""
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
            # First, as the mailbox tells the other processes, and that takes as long as process 0 takes to answer.
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
