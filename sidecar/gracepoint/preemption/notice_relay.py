"""Between this process's mailbox and the bell that all processes read.

What a receiver posts or retracts is written on the bell, in the receiver's thread. What stands in the mailbox is
what the bell says, in all processes alike: the agreement's reading thread puts it there and takes it away.

A preemption's name says the same in all processes. A notice without one (SIGTERM, the cloud's metadata) is about
the pod that got it: on the bell its origin carries the process, so that one pod's SIGTERM does not put off
another's.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from typing import Protocol

from gracepoint.errors import GracepointError
from gracepoint.multihost.entries import NoticeEntry
from gracepoint.receivers.mailbox import Disruption, Listener, Mailbox

log = logging.getLogger(__name__)


class NoticeLog(Protocol):
    """The part of the agreement that is used here."""

    def tell(
        self, origin: str, text: str, *, remaining_s: float, drill: bool, once: bool, revision: int | None
    ) -> None:
        """Tells every process of a notice."""

    def take_back(self, origin: str, reason: str) -> None:
        """Tells every process that a signal went away."""


class NoticeRelay(Listener):
    """See the module.

    Args:
        mailbox: This process's.
        process_index: This process.
        clock: Monotonic seconds; the mailbox's.
    """

    def __init__(self, mailbox: Mailbox, process_index: int, clock: Callable[[], float]) -> None:
        self._mailbox = mailbox
        self._process_index = process_index
        self._clock = clock
        self._own = f"{process_index}/"
        self._bell: NoticeLog | None = None

    def connect(self, bell: NoticeLog) -> None:
        """From now on the others are told; first of what is here already."""
        self._bell = bell
        self._mailbox.listen(self)

    # Receivers' threads.

    def posted(self, disruption: Disruption) -> None:
        """As ``Listener``."""
        assert self._bell is not None
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
        assert self._bell is not None
        found = self._mailbox.find(origin)
        unnamed = found is not None and not found.preemption
        try:
            self._bell.take_back(self._own + origin if unnamed else origin, reason)
        except GracepointError as error:
            log.error("the other processes could not be told of the retraction error=%s", error)

    # The agreement's reading thread.

    def stands(self, notice: NoticeEntry) -> Disruption:
        """A notice is on the bell: the newest word of its origin."""
        text = json.loads(notice.text)
        disruption = Disruption.from_json(text["disruption"])
        if notice.by == self._process_index:  # then the time that it took here is known
            passed_s = self._clock() - text["at_s"]
            disruption = dataclasses.replace(disruption, remaining_s=disruption.remaining_s - passed_s)
        self._mailbox.take(self._here(notice.origin), disruption)
        return disruption

    def falls(self, origin: str) -> None:
        """A notice is dealt with, or was retracted."""
        self._mailbox.drop(self._here(origin))

    def _here(self, origin: str) -> str:
        return origin.removeprefix(self._own)
