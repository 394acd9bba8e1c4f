"""Whatever brings notices, as one: started by ``attach``, ended with the session.

The threads are the receivers' own. All calls here belong to the training thread, which must be the main one where
SIGTERM is to be watched.
"""

from __future__ import annotations

from collections.abc import Callable

from gracepoint.process_group import ProcessGroup
from gracepoint.receivers import Hints, Mailbox, MetadataWatchers, Operator, Sender, SigtermReceiver
from gracepoint.settings import Settings
from gracepoint.version import __version__


class ReceiverSet:
    """The operator's stream, SIGTERM and the cloud's metadata, all into one mailbox.

    Args:
        settings: What there is to listen to.
        mailbox: Where notices go.
        hints: Where hints go.
        clock: Monotonic seconds.
    """

    def __init__(self, settings: Settings, mailbox: Mailbox, hints: Hints, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._mailbox = mailbox
        self._hints = hints
        self._operator = Operator.known_to(settings, clock)
        self._metadata: MetadataWatchers | None = None
        self._sigterm: SigtermReceiver | None = None

    @property
    def sender(self) -> Sender | None:
        """To the operator; None where there is none."""
        return None if self._operator is None else self._operator.sender

    def listen(self, session: str, gang: ProcessGroup, on_sigterm: Callable[[], None]) -> None:
        """Starts to listen."""
        self._sigterm = SigtermReceiver(self._mailbox, self._settings.grace_period_s, on_signal=on_sigterm)
        self._sigterm.install()
        self._metadata = MetadataWatchers.known_to(self._settings, self._mailbox)
        if self._operator is not None:
            self._operator.subscribe(session, gang, self._mailbox, __version__, self._hints)

    def stop_listening(self) -> None:
        """Brings no notices any more; word can still be sent. Safe to repeat."""
        if self._operator is not None:
            self._operator.stop_listening()
        if self._metadata is not None:
            self._metadata.close()
        if self._sigterm is not None:
            self._sigterm.close()

    def close(self) -> None:
        """Ends all threads. What was not sent is dropped: flush it first."""
        self.stop_listening()
        if self._operator is not None:
            self._operator.close()
