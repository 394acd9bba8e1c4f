"""Reporters that reach no operator, and what stands for one."""

from __future__ import annotations

import time
from typing import Any, cast

from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import SingleProcess
from gracepoint.receivers import Mailbox, Sender
from gracepoint.settings import Settings


def without_operator() -> Reporter:
    """Returns a reporter of a process on a laptop."""
    return to(None)


def to(sent: Sent | None) -> Reporter:
    """Returns a reporter of the primary process, whose messages are kept. None: there is no operator."""
    clock = time.monotonic
    return Reporter(cast(Sender | None, sent), Settings(), "session", SingleProcess(), Mailbox(clock), TimeSpent(clock))


class Sent:
    """Keeps the messages in the place of the sender."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: Any, *, within_s: float) -> None:
        self.messages.append(message)

    def flush(self, timeout_s: float) -> bool:
        return True
