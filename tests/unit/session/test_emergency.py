"""How much time an emergency gives itself."""

from __future__ import annotations

import pytest

from gracepoint.emergency import Emergency
from gracepoint.gang import SingleProcess
from gracepoint.receivers import Disruption, Mailbox
from gracepoint.reporting import Reporter
from gracepoint.settings import Settings


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("remaining_s", [-60.0, 0.0, 1.0])
def test_a_deadline_that_is_past_is_tried_all_the_same_also_where_training_is_held_before_the_epoch_is_told(
    remaining_s: float,
) -> None:
    clock, gang, settings = Clock(), SingleProcess(), Settings()
    mailbox = Mailbox(clock)
    emergency = Emergency(gang, settings, mailbox, Reporter(None, settings, "s", gang, mailbox), clock)
    mailbox.post(Disruption(preemption="p", cause="Spot", signal="taint", remaining_s=remaining_s))
    assert emergency.time_left_s() > 0  # the agreement's thread has frozen training, and told nobody yet
    emergency.epoch_opened(0, by=0, notice="")
    assert 2 < emergency.time_left_s() < 3
    clock.now_s += 3
    assert emergency.time_left_s() <= 0
