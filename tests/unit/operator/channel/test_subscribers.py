"""Subscribers: queues with a limit, and one session for each pod."""

from __future__ import annotations

from gracepoint.wire.frames import Ping
from gracepoint_operator.channel.subscribers import Outgoing, Subscriber, Subscribers
from tests.unit.operator.fakes.replica import subscription


async def test_a_subscriber_that_takes_nothing_is_cut_off_and_not_waited_for() -> None:
    subscriber = Subscriber(subscription())
    for _ in range(100):
        subscriber.send(Outgoing(Ping, lambda: None))
    assert subscriber.closed
    assert await subscriber.next() is None


async def test_a_newer_session_stops_the_older_one_of_the_same_pod_only() -> None:
    subscribers = Subscribers()
    old, other = subscribers.add(subscription(0, "s-1")), subscribers.add(subscription(1, "s-1"))
    new = subscribers.add(subscription(0, "s-2"))
    assert (old.closed, other.closed, new.closed) == (True, False, False)
    subscribers.remove(old)  # its stream ends later than the new one began
    assert len(subscribers) == 2
    assert subscribers.is_stopped("uid-pod-0-0", "s-1")
    assert not subscribers.speaks_for("uid-pod-0-0", "s-1")
    assert subscribers.speaks_for("uid-pod-0-0", "s-2")
    assert subscribers.speaks_for("uid-pod-9-0", "of the twin")


async def test_a_subscriber_that_left_is_not_connected() -> None:
    subscribers = Subscribers()
    current = subscribers.add(subscription(0, "s-2"))
    cancelled = Subscriber(subscription(0, "s-1"))
    subscribers.remove(cancelled)
    subscribers.connect(cancelled)
    assert not current.closed
    assert subscribers.speaks_for("uid-pod-0-0", "s-2")
    assert len(subscribers) == 1
