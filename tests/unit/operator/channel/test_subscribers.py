"""Subscribers: queues with a limit, and one session for each pod."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gracepoint.wire.frames import Ping
from gracepoint_operator.channel.notifier import Outgoing, Subscriber, Subscribers, WakeUps
from gracepoint_operator.event_loop import LoopCalls
from tests.unit.operator.fakes.replica import subscription


async def test_a_subscriber_that_takes_nothing_is_cut_off_and_not_waited_for() -> None:
    subscriber = Subscriber(subscription())
    for _ in range(100):
        subscriber.send(Outgoing(Ping, lambda: None))
    assert subscriber.closed
    assert await subscriber.next() is None


async def test_the_loop_of_many_streams_wakes_once_for_all_their_frames() -> None:
    posted: list[Callable[[], object]] = []

    class Counting(LoopCalls):
        def post(self, call: Callable[[], object], *, after_s: float = 0.0) -> None:
            posted.append(call)

    calls = Counting(asyncio.get_running_loop())
    subscribers = [Subscriber(subscription(index), calls) for index in range(3)]
    waiting = [asyncio.create_task(subscriber.next()) for subscriber in subscribers]
    await asyncio.sleep(0)  # each of them waits for its first frame
    wake_ups = WakeUps()
    for subscriber in subscribers:
        subscriber.send(Outgoing(Ping), wake_ups)
    assert not posted
    wake_ups.post()
    (wake,) = posted
    wake()
    async with asyncio.timeout(60):
        assert [frame.make for frame in await asyncio.gather(*waiting) if frame] == [Ping] * 3


async def test_a_waiting_stream_that_is_cut_off_is_woken_with_the_others() -> None:
    subscriber = Subscriber(subscription(0), LoopCalls(asyncio.get_running_loop()))
    waiting = asyncio.create_task(subscriber.next())
    await asyncio.sleep(0)
    wake_ups = WakeUps()
    for _ in range(100):
        subscriber.send(Outgoing(Ping), wake_ups)
    wake_ups.post()
    async with asyncio.timeout(60):
        assert await waiting is None


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
    subscribers.remove(new)
    assert not subscribers.speaks_for("uid-pod-0-0", "s-1")


async def test_another_session_speaks_once_the_one_known_here_has_left() -> None:
    """Its container was started again in its pod, or another process of the pod is connected to the other replica."""
    subscribers = Subscribers()
    known = subscribers.add(subscription(0, "s-1"))
    assert not subscribers.speaks_for("uid-pod-0-0", "s-2")
    subscribers.remove(known)
    assert subscribers.speaks_for("uid-pod-0-0", "s-2")
    assert not subscribers.is_stopped("uid-pod-0-0", "s-1")  # what speaks may be late, and of a session before


async def test_a_subscriber_that_left_is_not_connected() -> None:
    subscribers = Subscribers()
    current = subscribers.add(subscription(0, "s-2"))
    cancelled = Subscriber(subscription(0, "s-1"))
    subscribers.remove(cancelled)
    subscribers.connect(cancelled)
    assert not current.closed
    assert subscribers.speaks_for("uid-pod-0-0", "s-2")
    assert len(subscribers) == 1
