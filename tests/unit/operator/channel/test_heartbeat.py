"""A stream's heart: pings, and an end to a write that is stuck. Beaten by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from gracepoint.wire.frames import Ping
from gracepoint_operator.channel.notifier import Heartbeat, Outgoing, Subscriber
from tests.unit.operator.fakes.replica import frames, subscription


@pytest.fixture
def subscriber() -> Subscriber:
    return Subscriber(subscription())


@pytest.fixture
def given_up() -> list[str]:
    return []


@pytest.fixture
async def heart(subscriber: Subscriber, given_up: list[str]) -> AsyncIterator[Heartbeat]:
    made = Heartbeat(subscriber, lambda: given_up.append("given up"))
    yield made
    made.stop()


async def test_a_stream_with_nothing_to_say_pings_at_each_beat(heart: Heartbeat, subscriber: Subscriber) -> None:
    for _ in range(2):
        heart.beat()
        assert await frames(subscriber) == [Ping()]


async def test_a_stream_that_has_something_to_say_needs_no_ping(heart: Heartbeat, subscriber: Subscriber) -> None:
    subscriber.send(Outgoing(lambda: Ping(version=1), lambda: None))
    heart.beat()
    assert len(await frames(subscriber)) == 1


async def test_stuck_write_is_given_up_once_and_queues_no_pings(
    heart: Heartbeat, subscriber: Subscriber, given_up: list[str]
) -> None:
    heart.writing = True
    heart.beat()
    heart.beat()  # five seconds later, and five to ten after the write began
    assert given_up == []
    heart.beat()
    heart.beat()
    assert given_up == ["given up"]
    assert await frames(subscriber) == []


async def test_a_slow_write_that_gets_through_is_forgotten(heart: Heartbeat, given_up: list[str]) -> None:
    for writing in (True, True, False, True, True):
        heart.writing = writing
        heart.beat()
    assert given_up == []
