"""What a stall that was told to the operator means for the process."""

from __future__ import annotations

import time

import pytest

from gracepoint.multihost import InMemoryStore
from gracepoint.multihost.stalls import StallBoard
from gracepoint.preemption.exit import ProcessExit
from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.stall_watch import StallReports
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import SingleProcess
from gracepoint.receivers import Mailbox
from gracepoint.settings import Settings


@pytest.fixture
def process_exit() -> ProcessExit:
    """Without its watchdog."""
    return ProcessExit(InMemoryStore(), 0, 1, clock=time.monotonic)


def reports(process_exit: ProcessExit, action: str) -> StallReports:
    settings, clock = Settings(stall_action=action), time.monotonic
    reporter = Reporter(None, settings, "session", SingleProcess(), Mailbox(clock), TimeSpent(clock))
    return StallReports(settings, reporter, process_exit, StallBoard(InMemoryStore(), SingleProcess()), lambda: 7)


@pytest.mark.parametrize(("action", "ends"), [("report", False), ("restart", True)])
def test_a_stall_ends_the_process_if_the_settings_say_so(process_exit: ProcessExit, action: str, ends: bool) -> None:
    reports(process_exit, action).limit("no progress in training for 900 s")
    assert process_exit.decided is ends


def test_within_a_preemption_the_deadline_is_the_limit(process_exit: ProcessExit) -> None:
    process_exit.watch(lambda: 3600.0, 78, on_overdue=lambda: None)
    reports(process_exit, "restart").limit("no progress in emergency save after step 7 for 900 s")
    assert not process_exit.decided


def test_once_a_preemption_is_over_a_stall_ends_the_process_again(process_exit: ProcessExit) -> None:
    process_exit.watch(lambda: 3600.0, 78, on_overdue=lambda: None)
    process_exit.cancel()
    reports(process_exit, "restart").limit("no progress in training for 900 s")
    assert process_exit.decided
