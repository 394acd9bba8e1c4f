"""All receivers of notices as one: started with the session, and closed with it.

Each receiver has its own threads. All calls here belong to the training thread. It must be the main thread if SIGTERM
is to be watched.
"""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Hints, Mailbox, MetadataWatchers, Operator, Receiver, Sender, SigtermReceiver
from gracepoint.settings import Settings
from gracepoint.version import __version__
from gracepoint.wire.messages import Spent


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
    ) -> None:
        """Starts to listen.

        Args:
            session: The session's nonce.
            gang: The processes that train together.
            on_sigterm: Called once, in the thread that reads SIGTERM.
            on_caught: Called in the main thread between two bytecodes, when there was a SIGTERM.
            spent: Returns what the time went into so far.
            stalled_s: Returns for how many seconds training has stalled. None if it has not.
        """
        self._sigterm = SigtermReceiver(
            self._mailbox, self._settings.grace_period_s, on_signal=on_sigterm, on_caught=on_caught
        )
        self._sigterm.install()
        self._metadata = MetadataWatchers.known_to(self._settings, self._mailbox)
        if self._operator is not None:
            self._operator.subscribe(session, gang, self._mailbox, __version__, self._hints, spent, stalled_s)
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
