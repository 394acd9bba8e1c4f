"""All receivers of one session: the operator's channel in both directions, SIGTERM, and the cloud's metadata.

The session starts and closes them together through ``ReceiverSet``. Each receiver has its own threads. All calls here
belong to the training thread, which must be the main thread if SIGTERM is to be watched.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from gracepoint.process_group import ProcessGroup
from gracepoint.receivers.channel import OperatorConnection, OperatorSubscriber, Sender
from gracepoint.receivers.mailbox import Hints, Mailbox, Receiver
from gracepoint.receivers.metadata import MetadataWatchers
from gracepoint.receivers.sigterm import SigtermReceiver
from gracepoint.settings import Settings
from gracepoint.version import __version__
from gracepoint.wire.frames import SnapshotPlacement, trust_digest
from gracepoint.wire.messages import Spent, Subscription
from gracepoint.wire.names import BETWEEN_RECEIPTS_S, TELLING_ONE_S, Env

logger = logging.getLogger(__name__)

_ACKNOWLEDGE_WITHIN_S = 30.0


#: Takes a placement of snapshots, and the PEM certificates of the authorities to trust.
Place = Callable[[SnapshotPlacement, str], None]


class Operator:
    """Starts the sender when it is made, and the subscription with ``subscribe``.

    Args:
        settings: Say where the operator is, and which pod this is.
        clock: Returns monotonic seconds.

    Raises:
        SettingsError: The operator is set, but not which pod this is.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float]) -> None:
        self._settings = settings
        for field in ("namespace", "pod_name", "pod_uid", "jobset_uid"):
            settings.required(field, because=f"{Env.OPERATOR_URL} is set")
        self._connections: list[OperatorConnection] = []
        self.sender = Sender(self._channel(), clock)
        self._subscriber: OperatorSubscriber | None = None
        # Of the subscription's thread, once it runs.
        self._authorities = settings.ca_certificate or ""
        self._placement: SnapshotPlacement | None = None
        self._place: Place | None = None

    @classmethod
    def known_to(cls, settings: Settings, clock: Callable[[], float]) -> Operator | None:
        """Returns the operator. None, with a line in the log, if its address is not set."""
        if settings.operator_url is None:
            logger.info("no operator is configured, watching SIGTERM only variable=%s", Env.OPERATOR_URL)
            return None
        return cls(settings, clock)

    def subscribe(
        self,
        session: str,
        gang: ProcessGroup,
        mailbox: Mailbox,
        library_version: str,
        hints: Hints | None = None,
        spent: Callable[[], Spent] | None = None,
        stalled_s: Callable[[], float | None] = lambda: None,
        place: Place | None = None,
    ) -> None:
        """Starts to listen.

        Args:
            session: The session's nonce.
            gang: The processes that train together.
            mailbox: Where notices go.
            library_version: The library's version.
            hints: Where hints go. None: none are wanted.
            spent: Returns what the time went into so far. None: it is not reported.
            stalled_s: Returns for how many seconds training has stalled. None if it has not.
            place: Called with each placement of snapshots and with the PEM certificates of the authorities to trust, in
                the thread that reads notices. Must not block. None: none are wanted.
        """
        settings, self._place = self._settings, place
        subscription = Subscription(
            namespace=settings.namespace or "",
            pod_name=settings.pod_name or "",
            pod_uid=settings.pod_uid or "",
            session=session,
            workload_uid=settings.jobset_uid or "",
            restart_attempt=settings.restart_attempt,
            process_index=gang.process_index,
            process_count=gang.process_count,
            library_version=library_version,
            takes_hints=hints is not None,
            takes_snapshots=place is not None,
            trust=None if settings.ca_certificate is None else trust_digest(settings.ca_certificate),
        )

        def as_of_now(first: Subscription) -> Subscription:
            own = None if spent is None or gang.process_index != 0 else spent()
            return dataclasses.replace(first, spent=own, stalled_s=stalled_s())

        self._subscriber = OperatorSubscriber(
            self._channel(),
            subscription,
            mailbox,
            lambda receipt: self.sender.send(
                receipt,
                within_s=receipt_after_s(gang) + _ACKNOWLEDGE_WITHIN_S,
                after_s=receipt_after_s(gang),
            ),
            hints,
            None if settings.ca_certificate is None else self._trust,
            as_of_now,
            None if place is None else self._placed,
        )

    def wait_until_connected(self, timeout_s: float) -> bool:
        """Returns True once the operator has sent ``Hello``, False if it did not in time or nothing is subscribed."""
        return self._subscriber is not None and self._subscriber.wait_until_connected(timeout_s)

    def stop_listening(self) -> None:
        """Ends the subscription. Messages can still be sent. Safe to repeat."""
        if self._subscriber is not None:
            self._subscriber.close()

    def close(self) -> None:
        """Ends both directions. Drops the messages that are not yet sent: flush the sender first."""
        self.stop_listening()
        self.sender.close()

    def _channel(self) -> OperatorConnection:
        settings = self._settings
        assert settings.operator_url is not None
        connection = OperatorConnection(settings.operator_url, settings.ca_certificate, settings.token_file)
        self._connections.append(connection)
        return connection

    def _trust(self, authorities: str) -> None:
        for connection in self._connections:
            connection.trust(authorities)
        self._authorities = authorities
        if self._placement is not None:  # its servers will have certificates of these
            self._placed(self._placement)

    def _placed(self, placement: SnapshotPlacement) -> None:
        assert self._place is not None
        self._placement = placement
        self._place(placement, self._authorities)


def receipt_after_s(gang: ProcessGroup) -> float:
    """Returns how many seconds after a notice this process sends its acknowledgement.

    The operator notifies all processes at the same time. Acknowledgements are not urgent. They come once all processes
    have been notified, and one after another: each may cost the operator a new connection, and so some milliseconds, in
    which it could notify ten more processes.
    """
    return gang.process_count * TELLING_ONE_S + gang.process_index * BETWEEN_RECEIPTS_S


class ReceiverSet:
    """Reads the operator's stream, SIGTERM and the cloud's metadata into one mailbox.

    Args:
        settings: Say what there is to listen to.
        mailbox: Where notices go.
        hints: Where hints go.
        clock: Returns monotonic seconds.
        receiver: Brings notices from one more source. None if there is none.
    """

    def __init__(
        self,
        settings: Settings,
        mailbox: Mailbox,
        hints: Hints,
        clock: Callable[[], float],
        receiver: Receiver | None = None,
    ) -> None:
        self._settings = settings
        self._mailbox = mailbox
        self._hints = hints
        self._receiver = receiver
        self._operator = Operator.known_to(settings, clock)
        self._metadata: MetadataWatchers | None = None
        self._sigterm: SigtermReceiver | None = None

    @property
    def sender(self) -> Sender | None:
        """Sends messages to the operator. None if there is no operator."""
        return None if self._operator is None else self._operator.sender

    def listen(
        self,
        session: str,
        gang: ProcessGroup,
        on_sigterm: Callable[[], None],
        on_caught: Callable[[], None],
        spent: Callable[[], Spent],
        stalled_s: Callable[[], float | None],
        place: Place | None = None,
    ) -> None:
        """Starts to listen.

        Args:
            session: The session's nonce.
            gang: The processes that train together.
            on_sigterm: Called once, in the thread that reads SIGTERM.
            on_caught: Called in the main thread between two bytecodes, when there was a SIGTERM.
            spent: Returns what the time went into so far.
            stalled_s: Returns for how many seconds training has stalled. None if it has not.
            place: As of ``Operator.subscribe``.
        """
        self._sigterm = SigtermReceiver(
            self._mailbox, self._settings.grace_period_s, on_signal=on_sigterm, on_caught=on_caught
        )
        self._sigterm.install()
        self._metadata = MetadataWatchers.known_to(self._settings, self._mailbox)
        if self._operator is not None:
            self._operator.subscribe(session, gang, self._mailbox, __version__, self._hints, spent, stalled_s, place)
        if self._receiver is not None:
            self._receiver.start(self._mailbox)

    def look(self) -> None:
        """Sees to it that no other code has taken SIGTERM away. For the training thread, at each sync point."""
        if self._sigterm is not None:
            self._sigterm.look()

    def stop_listening(self) -> None:
        """Closes the receivers. Messages can still be sent. Safe to repeat."""
        if self._receiver is not None:
            self._receiver.close()
        if self._operator is not None:
            self._operator.stop_listening()
        if self._metadata is not None:
            self._metadata.close()
        if self._sigterm is not None:
            self._sigterm.close()

    def call_handlers(self) -> None:
        """Calls other code's handler of a SIGTERM that has come, as the process exits. Safe to repeat."""
        if self._sigterm is not None:
            self._sigterm.call_theirs()

    def close(self) -> None:
        """Ends all threads. Messages that were not sent are dropped: flush the sender first."""
        self.stop_listening()
        if self._operator is not None:
            self._operator.close()
