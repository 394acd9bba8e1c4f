"""Calls on an event loop that come from another thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from gracepoint_operator.event_loop import LoopCalls

WAIT_S = 60.0


class CountedLoop(asyncio.SelectorEventLoop):
    """Counts how often another thread wakes it."""

    woken = 0

    def _write_to_self(self) -> None:
        self.woken += 1
        super()._write_to_self()  # type: ignore[misc]


@pytest.fixture
def other() -> Iterator[CountedLoop]:
    """A loop that runs in a thread of its own."""
    loop = CountedLoop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join(WAIT_S)
    loop.close()


def test_many_calls_come_in_their_order_and_wake_the_loop_once(other: CountedLoop) -> None:
    calls, blocked, came, done = LoopCalls(other), threading.Event(), [], threading.Event()
    other.call_soon_threadsafe(blocked.wait, WAIT_S)
    before = other.woken
    for number in range(1000):
        calls.post(lambda number=number: came.append(number))  # type: ignore[misc]
    calls.post(done.set)
    assert other.woken == before + 1
    blocked.set()
    assert done.wait(WAIT_S)
    assert came == list(range(1000))


def test_no_call_is_lost_between_two_threads_that_do_not_wait(other: CountedLoop) -> None:
    calls, came, done = LoopCalls(other), [0, 0], threading.Event()

    def count(which: int) -> None:
        came[which] += 1
        if came == [5000, 5000]:
            done.set()

    def post(which: int) -> None:
        for _ in range(5000):
            calls.post(lambda: count(which))

    threads = [threading.Thread(target=post, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    assert done.wait(WAIT_S), came
    for thread in threads:
        thread.join(WAIT_S)


def test_calls_that_may_wait_come_together_and_in_their_order(other: CountedLoop) -> None:
    calls, came, done = LoopCalls(other), [], threading.Event()
    before = other.woken
    for number in range(1000):
        calls.post(lambda number=number: came.append(number), after_s=0.001)  # type: ignore[misc]
    calls.post(done.set, after_s=0.001)
    assert done.wait(WAIT_S)
    assert came == list(range(1000))
    assert other.woken < before + 500


def test_a_call_that_does_not_wait_takes_those_before_it_along(other: CountedLoop) -> None:
    calls, came, done = LoopCalls(other), [], threading.Event()
    calls.post(lambda: came.append("patient"), after_s=10 * WAIT_S)
    calls.post(lambda: came.append("urgent"))
    calls.post(done.set)
    assert done.wait(WAIT_S)
    assert came == ["patient", "urgent"]
    done.clear()
    calls.post(done.set, after_s=0.001)
    assert done.wait(WAIT_S), "a timer that is still pending must not hold up what comes later"


async def test_other_work_of_the_loop_comes_between_many_calls() -> None:
    came: list[str] = []
    calls = LoopCalls(asyncio.get_running_loop(), slice_s=0.0)
    for number in range(3):
        calls.post(lambda number=number: came.append(str(number)))  # type: ignore[misc]
    asyncio.get_running_loop().call_soon(came.append, "other")
    while len(came) < 4:  # noqa: ASYNC110  the calls are counted, not one event
        await asyncio.sleep(0)
    assert came.index("other") < 3


async def test_a_call_that_fails_stops_no_other() -> None:
    loop, errors, came = asyncio.get_running_loop(), [], asyncio.Event()
    loop.set_exception_handler(lambda loop, context: errors.append(context["exception"]))
    calls = LoopCalls(loop)
    calls.post(lambda: 1 / 0)
    calls.post(came.set)
    await asyncio.wait_for(came.wait(), WAIT_S)
    assert [type(error) for error in errors] == [ZeroDivisionError]


async def test_work_gives_its_result_or_its_error(other: CountedLoop) -> None:
    calls, back = LoopCalls(other), LoopCalls(asyncio.get_running_loop())

    async def where(fails: bool) -> asyncio.AbstractEventLoop:
        await asyncio.sleep(0)
        if fails:
            raise ValueError("told by the test")
        return asyncio.get_running_loop()

    assert await calls.run(where(False), back) is other
    with pytest.raises(ValueError, match="told by the test"):
        await calls.run(where(True), back)


async def test_work_is_cancelled_with_whoever_waits_for_it(other: CountedLoop) -> None:
    calls, back = LoopCalls(other), LoopCalls(asyncio.get_running_loop())
    began, cancelled = threading.Event(), threading.Event()

    async def forever() -> None:
        began.set()
        try:
            await asyncio.sleep(WAIT_S)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    waits = asyncio.create_task(calls.run(forever(), back))
    assert await asyncio.to_thread(began.wait, WAIT_S)
    waits.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waits
    assert await asyncio.to_thread(cancelled.wait, WAIT_S)
    await asyncio.sleep(0)


async def test_what_is_posted_to_a_loop_that_has_ended_is_given_up() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    LoopCalls(loop).post(lambda: None)
