"""Tells pods which authorities to trust. Runs on the controller's event loop.

It is level-based like the notifier: every subscriber whose authorities differ from the operator's is sent these, when
they change and when it connects.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from gracepoint.wire.frames import Trust, trust_digest
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber, Subscribers
from gracepoint_operator.observability.logs import about

log = logging.getLogger(__name__)


class TrustNotifier:
    """Sends the authorities.

    Args:
        subscribers: The pods that are connected to this replica.
    """

    def __init__(self, subscribers: Subscribers) -> None:
        self._subscribers = subscribers
        self._authorities = ""
        self._digest = ""

    def change(self, authorities: str) -> None:
        """Tells all subscribers.

        Args:
            authorities: PEM certificates.
        """
        digest = trust_digest(authorities)
        if not authorities or digest == self._digest:
            return
        self._authorities, self._digest = authorities, digest
        self.tell(self._subscribers.all())

    def tell(self, subscribers: Iterable[Subscriber]) -> None:
        """Tells those of the subscribers that have other authorities."""
        told = 0
        for subscriber in subscribers:
            if self._digest and subscriber.trusts not in (None, self._digest):
                subscriber.trusts = self._digest
                subscriber.send(Outgoing(functools.partial(Trust, authorities=self._authorities)))
                told += 1
        if told:
            log.info("pods told which authorities to trust", extra=about(pods=told, digest=self._digest))
