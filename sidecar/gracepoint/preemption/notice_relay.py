"""Between this process's mailbox and the bell, the log of notices that all processes read in the same order.

``NoticePublisher`` writes on the bell what a receiver posts or retracts, in the receiver's thread. ``NoticeReader``
keeps the mailbox in line with what the bell says, in the agreement's reading thread, so all mailboxes agree.

The name of a preemption means the same in all processes. A notice without a name (SIGTERM, the cloud's metadata) is
about one pod: on the bell its origin has the process index in front, so that one pod's SIGTERM does not replace
another's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Protocol

from gracepoint.errors import GracepointError
from gracepoint.multihost.sync_point.entries import NoticeEntry
from gracepoint.receivers.mailbox import Disruption, Listener, Mailbox

log = logging.getLogger(__name__)


class NoticeLog(Protocol):
    """The part of the agreement that writes on the bell."""

    def tell(
        self, origin: str, text: str, *, remaining_s: float, drill: bool, once: bool, revision: int | None
    ) -> None:
        """Tells every process of a notice."""

    def take_back(self, origin: str, reason: str) -> None:
        """Tells every process that a signal went away."""


class NoticePublisher(Listener):
    """Tells the other processes what a receiver of this process posts or retracts.

    Args:
        mailbox: This process's mailbox.
        bell: Where the notices are written.
        process_index: This process.
        clock: Returns monotonic seconds; the mailbox's clock.
    """

    def __init__(self, mailbox: Mailbox, bell: NoticeLog, process_index: int, clock: Callable[[], float]) -> None:
        self._mailbox = mailbox
        self._bell = bell
        self._own = f"{process_index}/"
        self._clock = clock

    def posted(self, disruption: Disruption) -> None:
        """As ``Listener``."""
        try:
            self._bell.tell(
                disruption.origin if disruption.preemption else self._own + disruption.origin,
                json.dumps({"disruption": disruption.to_json(), "at_s": self._clock()}),
                remaining_s=disruption.remaining_s,
                drill=disruption.drill,
                once=bool(disruption.preemption),
                revision=disruption.revision,
            )
        except GracepointError as error:
            log.error("the other processes could not be told of the notice error=%s", error)

    def retracted(self, origin: str, reason: str) -> None:
        """As ``Listener``."""
        found = self._mailbox.find(origin)
        unnamed = found is not None and not found.preemption
        try:
            self._bell.take_back(self._own + origin if unnamed else origin, reason)
        except GracepointError as error:
            log.error("the other processes could not be told of the retraction error=%s", error)


class NoticeReader:
    """Keeps the mailbox in line with the bell.

    Args:
        mailbox: This process's mailbox.
        process_index: This process.
        clock: Returns monotonic seconds; the mailbox's clock.
    """

    def __init__(self, mailbox: Mailbox, process_index: int, clock: Callable[[], float]) -> None:
        self._mailbox = mailbox
        self._process_index = process_index
        self._own = f"{process_index}/"
        self._clock = clock

    def received(self, notice: NoticeEntry) -> Disruption:
        """Puts a notice of the bell into the mailbox: it replaces an earlier one of the same origin."""
        text = json.loads(notice.text)
        disruption = Disruption.from_json(text["disruption"])
        if notice.by == self._process_index:  # written here, so it is known how long ago that was
            passed_s = self._clock() - text["at_s"]
            disruption = dataclasses.replace(disruption, remaining_s=disruption.remaining_s - passed_s)
        self._mailbox.take(self._here(notice.origin), disruption)
        return disruption

    def removed(self, origin: str) -> Disruption | None:
        """Removes a notice that is dealt with or was retracted, and returns it. None if it was not in the mailbox."""
        return self._mailbox.drop(self._here(origin))

    def _here(self, origin: str) -> str:
        return origin.removeprefix(self._own)
