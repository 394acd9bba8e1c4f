"""Reporters that reach no operator."""

from __future__ import annotations

import time

from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import SingleProcess
from gracepoint.receivers import Mailbox
from gracepoint.settings import Settings


def without_operator() -> Reporter:
    """Returns a reporter of a process on a laptop."""
    clock = time.monotonic
    return Reporter(None, Settings(), "session", SingleProcess(), Mailbox(clock), TimeSpent(clock))
