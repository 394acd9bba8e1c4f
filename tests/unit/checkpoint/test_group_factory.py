"""Processes that a checkpointer brings together before its first save."""

from __future__ import annotations

import pytest

from gracepoint.checkpoint.groups import GroupFactory
from gracepoint.errors import BarrierTimeout
from tests.unit.multihost.fakes.gangs import gangs


def test_a_process_that_waited_in_vain_joins_later() -> None:
    first, second = gangs(2)
    early = GroupFactory(gang=second)
    for _ in range(2):
        with pytest.raises(BarrierTimeout, match="process 0 published nothing"):
            early.join(timeout_s=0.05)
    late = GroupFactory(gang=first).join(timeout_s=1)
    joined = early.join(timeout_s=1)
    assert (joined.attempt, joined.processes) == (late.attempt, (0, 1))
