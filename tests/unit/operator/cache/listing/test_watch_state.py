"""What is known of the watches: their ages, and the threads that hang."""

from __future__ import annotations

import pytest

from gracepoint_operator.cache.listing.watch_state import HANGS_AFTER_S, WatchState
from gracepoint_operator.kube import kinds
from gracepoint_operator.observability.metrics import Metrics
from tests.unit.operator.fakes.objects import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watches(clock: Clock) -> WatchState:
    return WatchState(Metrics(), clock)


def test_the_age_of_a_watch_counts_from_the_last_answer_or_event(watches: WatchState, clock: Clock) -> None:
    watches.answered(kinds.NODES, listed=True)
    clock.move(20)
    assert watches.ages() == {kinds.NODES: 20}
    watches.seen(kinds.NODES)
    clock.move(5)
    watches.failed(kinds.NODES, "refused", optional=False)
    assert watches.ages() == {kinds.NODES: 5}


def test_a_thread_hangs_when_it_has_sent_no_request_for_long(watches: WatchState, clock: Clock) -> None:
    watches.asked("watch nodes")
    watches.asked("watch pods")
    clock.move(HANGS_AFTER_S)
    assert watches.hanging() == []
    watches.asked("watch pods")
    clock.move(1)
    assert watches.hanging() == ["watch nodes"]
    watches.ended("watch nodes")
    assert watches.hanging() == []
