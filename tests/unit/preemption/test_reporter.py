"""What the primary process tells of a restart: which step it restored, and for which preemption that was saved."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import pytest

from gracepoint.preemption.reporter import Reporter
from gracepoint.preemption.time_spent import TimeSpent
from gracepoint.process_group import SingleProcess
from gracepoint.receivers import Disruption, Mailbox, Sender
from gracepoint.settings import Settings
from gracepoint.wire.messages import Resumption
from tests.unit.preemption.fakes.reporters import Sent


def reporter(sent: Sent, clock: Callable[[], float], session: str) -> Reporter:
    settings = Settings(restart_attempt=3)
    time_spent = TimeSpent(clock)
    return Reporter(cast(Sender, sent), settings, session, SingleProcess(), Mailbox(clock), time_spent)


@pytest.mark.parametrize("notice", ["gpt-1", ""], ids=["of the operator", "SIGTERM alone"])
def test_a_restart_says_for_which_preemption_its_step_was_saved(notice: str) -> None:
    sent, now = Sent(), [0.0]
    before = reporter(sent, lambda: now[0], "before")
    before.resumption(None, training=True)
    now[0] = 30.0
    before.time_spent.stops(40)
    about = Disruption(preemption=notice, cause="Spot", signal="taint", remaining_s=10.0) if notice else None
    note = before.note(about, leaves=True)
    after = reporter(sent, lambda: now[0], "after")
    after.resumption(40, training=False, note=note)
    after.resumption(40, training=True)
    first, second = (message for message in sent.messages if message.session == "after")
    assert isinstance(first, Resumption)
    assert first.saved_for is not None
    assert (first.saved_for.preemption, first.saved_for.session) == (notice, "before")
    assert (first.saved_for.restart_attempt, first.saved_for.spent.left_s) == (3, 30.0)
    assert first.saved_for.spent.passed == {"40": 30.0}
    assert second.saved_for == first.saved_for


def test_a_note_that_cannot_be_read_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    sent = Sent()
    with caplog.at_level(logging.WARNING):
        reporter(sent, lambda: 0.0, "after").resumption(40, training=False, note="{}")
    (message,) = sent.messages
    assert (message.restored_step, message.saved_for) == (40, None)
    assert "not known for which preemption" in caplog.text
